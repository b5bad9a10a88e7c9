"""What a vLLM asks that has no get_transfer_results."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvpp_connect.connectors.caches import BlockShape, block_shape
from kvpp_connect.connectors.mooncake_v2 import worker_side
from kvpp_connect.connectors.mooncake_v2.config import MooncakeV2Config
from kvpp_connect.connectors.mooncake_v2.connector import MooncakeConnectorV2
from kvpp_connect.connectors.mooncake_v2.metadata import StepOrders
from kvpp_connect.connectors.mooncake_v2.puller import PullResult
from kvpp_connect.errors import ConfigError


class ScriptedPuller:
    """Ends pulls as the test says."""

    def __init__(self):
        self.results = []

    def submit(self, pull):
        del pull

    def cancel(self, request_ids):
        del request_ids

    def take_results(self):
        taken, self.results = self.results, []
        return taken


@pytest.fixture
def connector(monkeypatch):
    """A worker's connector whose pulls end as the test says."""
    monkeypatch.setattr(worker_side, "share_engine", lambda host, protocol: None)
    worker = worker_side.WorkerSide(
        config=MooncakeV2Config(),
        host="127.0.0.1",
        protocol="tcp",
        shape=BlockShape(num_blocks=32, block_tokens=16),
        consumes=True,
    )
    worker._puller = ScriptedPuller()  # noqa: SLF001 - made when caches are registered
    connector = MooncakeConnectorV2.__new__(MooncakeConnectorV2)
    connector._worker, connector._failed_blocks = worker, set()  # noqa: SLF001
    return SimpleNamespace(api=connector, worker=worker, puller=worker._puller)  # noqa: SLF001


def pull(request_id, blocks, first_token=0):
    return SimpleNamespace(
        request_id=request_id, local_block_ids=blocks, first_token=first_token, end_token=64
    )


def test_failed_receives_are_received_ones_whose_blocks_are_invalid(connector):
    pulls = (pull("good", (1, 2)), pull("bad", (3, 4, 5, 6), first_token=32))
    connector.worker.carry_out(StepOrders(pulls=pulls, ended_leases=frozenset({"sent"})))
    connector.puller.results = [PullResult("good", True), PullResult("bad", False)]
    assert connector.api.get_finished(set()) == ({"sent"}, {"good", "bad"})
    assert connector.api.get_block_ids_with_load_errors() == {5, 6}  # 3 and 4 were cached here


def test_nothing_is_told_twice(connector):
    connector.worker.carry_out(StepOrders(pulls=(pull("bad", (3,)),)))
    connector.puller.results = [PullResult("bad", False)]
    connector.api.get_finished(set())
    assert connector.api.get_block_ids_with_load_errors() == {3}
    assert connector.api.get_finished(set()) == (set(), set())
    assert connector.api.get_block_ids_with_load_errors() == set()


def test_a_vllm_that_does_not_tell_which_caches_it_splits_may_not_split_any():
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=128))
    cache_config = SimpleNamespace(kv_cache_groups=[group], num_blocks=4)
    parallel = SimpleNamespace(decode_context_parallel_size=1, cp_kv_cache_interleave_size=1)
    config = SimpleNamespace(parallel_config=parallel)
    shape = block_shape("Connector", cache_config, config)
    assert shape == BlockShape(num_blocks=4, block_tokens=128)
    parallel.decode_context_parallel_size = 2
    with pytest.raises(ConfigError, match="decode_context_parallel_size is 2"):
        block_shape("Connector", cache_config, config)
