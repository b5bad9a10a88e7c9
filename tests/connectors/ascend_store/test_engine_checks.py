"""Engines that the pool refuses before anything is loaded."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from kvpp_connect.connectors.ascend_store import engine_checks
from kvpp_connect.connectors.ascend_store.config import parse_extra_config
from kvpp_connect.connectors.ascend_store.engine_checks import check_engine
from kvpp_connect.errors import ConfigError

MODULE = "kvpp_connect.connectors"
POOL = {"kv_connector": "AscendStoreConnector", "kv_connector_module_path": MODULE}
P_D = {"kv_connector": "MooncakeConnectorV2", "kv_connector_module_path": MODULE}
STRANGER = {"kv_connector": "ExampleConnector"}


def engine(*, mla=True, stages=1, in_flight=1, beside=None):
    """vLLM's configuration as far as it is read."""
    children = [POOL, beside] if beside else []
    transfer = SimpleNamespace(
        kv_connector="MultiConnector" if beside else "AscendStoreConnector",
        kv_connector_module_path=None if beside else MODULE,
        kv_connector_extra_config={"connectors": children},
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(use_mla=mla),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        max_concurrent_batches=in_flight,
        kv_transfer_config=transfer,
    )


def check(vllm_config, **settings):
    check_engine(
        vllm_config, parse_extra_config({"master_server_address": "a:1", **settings}, "kv_both")
    )


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Says who serves KVPP, and what vLLM tells."""

    def say(*, by_host=False, tells=True):
        monkeypatch.setattr(engine_checks, "host_serves", lambda _: by_host)
        monkeypatch.setattr(engine_checks, "TELLS_SYNC_LOADS", tells)

    say()
    return say


def test_a_model_without_mla_is_refused():
    with pytest.raises(ConfigError, match="does not use MLA"):
        check(engine(mla=False))


@pytest.mark.parametrize("setting", [{"use_layerwise": True}, {"load_async": False}])
def test_loads_for_the_step_itself_need_steps_one_after_the_other(setting):
    check(engine(), **setting)
    with pytest.raises(ConfigError, match="steps one after the other"):
        check(engine(in_flight=2), **setting)


@pytest.mark.parametrize("setting", [{"use_layerwise": True}, {"load_async": False}])
def test_a_hosts_own_kvpp_waits_for_no_load(served, setting):
    served(by_host=True)
    check(engine())
    with pytest.raises(ConfigError, match=r"own KVPP broadcasts.*remove use_layerwise"):
        check(engine(), **setting)


@pytest.mark.parametrize(
    ("facts", "settings", "way_out"),
    [
        ({}, {"use_layerwise": True}, "remove use_layerwise"),
        ({}, {"load_async": False}, "remove use_layerwise"),
        ({"stages": 2}, {}, "--pipeline-parallel-size 1"),
        ({"beside": STRANGER}, {}, "ExampleConnector beside it"),
    ],
)
def test_an_older_vllm_is_refused_what_it_cannot_tell(served, facts, settings, way_out):
    check(engine(**facts), **settings)
    served(tells=False)
    with pytest.raises(ConfigError, match=rf"too old for .*{way_out}"):
        check(engine(**facts), **settings)


def test_an_older_vllm_serves_p_d_beside_the_pool(served):
    served(tells=False)
    check(engine(beside=P_D))
