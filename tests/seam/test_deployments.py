"""Whole deployments judged by vLLM and the seam, before any process starts."""

import pytest
from planning_tools import MLA, write_config

pytest.importorskip("vllm", reason="needs vLLM")

from kvpp_connect.demo.model import write_checkpoint
from kvpp_connect.seam import checks

# vLLM looks at the model's class in a process of its own.
pytestmark = pytest.mark.distributed

ON = {"enable_kvpp": True}
P_NODE = {
    "kv_connector": "MooncakeConnectorV2",
    "kv_role": "kv_producer",
    "kv_connector_module_path": "kvpp_connect.connectors",
}
FLOAT = "--dtype=float32"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny") / "config.json"


def problems(config, *arguments, additional=ON, transfer=None):
    return checks.deployment_problems(config, [FLOAT, *arguments], additional, transfer or {})


def test_a_deployment_that_starts_has_none(config):
    assert problems(config, "--tensor-parallel-size=2", transfer=P_NODE) == ()


def test_all_of_our_objections_are_listed_at_once(config):
    found = problems(config, transfer={"kv_connector": "ExampleConnector", "kv_role": "kv_both"})
    assert any("the KVPP group" in problem for problem in found)
    assert any("does not know that most ranks hold scratch" in problem for problem in found)


def test_with_kvpp_off_only_vllm_judges(config):
    assert problems(config, additional={}) == ()


def test_vllms_own_refusal_is_one_line(config):
    (found,) = problems(config, "--tensor-parallel-size=3")
    assert found.startswith("vLLM refuses the deployment: ")
    assert "must be divisible by tensor parallel size (3)" in found
    assert "\n" not in found


def test_arguments_that_vllm_does_not_know_are_one_line(config):
    (found,) = problems(config, "--no-such-flag=1")
    assert found == "vllm serve: unrecognized arguments: --no-such-flag=1"


def test_a_connector_that_does_not_load_is_named(config):
    transfer = {**P_NODE, "kv_connector": "NoSuchConnector"}
    found = problems(config, "--tensor-parallel-size=2", additional={}, transfer=transfer)
    assert any("NoSuchConnector" in problem for problem in found)


def test_our_own_keys_come_first(config):
    (found,) = problems(config, additional={"enable_kvpp": "maybe"})
    assert "enable_kvpp is 'maybe'" in found


def test_a_config_file_of_any_name_will_do(config, tmp_path):
    other = tmp_path / "tiny.json"
    other.write_bytes(config.read_bytes())
    assert problems(other, "--tensor-parallel-size=2") == ()
    nonsense = write_config(tmp_path / "bad", {**MLA, "model_type": "no_such_type"})
    (found,) = problems(nonsense / "config.json")
    assert found.startswith("vLLM refuses the deployment: ")
