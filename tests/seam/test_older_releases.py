"""What stands in where an older vLLM says less."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.v1.core.sched.output import CachedRequestData

from kvpp_connect.seam import older_vllm
from kvpp_connect.seam.older_vllm import BlockTables, has_sync_loads


@dataclass
class Output:
    """What is read of vLLM's SchedulerOutput."""

    new: dict[str, list[int]] = field(default_factory=dict)
    added: dict[str, list[int] | None] = field(default_factory=dict)
    resumed: frozenset[str] = frozenset()
    finished_req_ids: frozenset[str] = frozenset()

    @property
    def scheduled_new_reqs(self):
        return [SimpleNamespace(req_id=name, block_ids=(ids,)) for name, ids in self.new.items()]

    @property
    def scheduled_cached_reqs(self):
        cached = CachedRequestData.make_empty()
        cached.req_ids = list(self.added)
        cached.new_block_ids = [None if ids is None else (ids,) for ids in self.added.values()]
        cached.resumed_req_ids = set(self.resumed)
        return cached


@pytest.fixture
def tables():
    tables = BlockTables()
    tables.follow(Output(new={"a": [3, 1], "b": [7]}))
    return tables


def test_blocks_of_later_steps_come_behind_those_of_earlier_ones(tables):
    tables.follow(Output(added={"a": [9], "b": None}))
    assert (tables.block_ids("a"), tables.block_ids("b")) == ([3, 1, 9], [7])


def test_a_request_that_was_preempted_begins_again(tables):
    tables.follow(Output(added={"a": [4, 5]}, resumed=frozenset({"a"})))
    assert tables.block_ids("a") == [4, 5]


def test_a_finished_requests_name_may_come_again(tables):
    tables.follow(Output(new={"a": [2]}, finished_req_ids=frozenset({"a"})))
    assert tables.block_ids("a") == [2]
    tables.follow(Output(finished_req_ids=frozenset({"a"})))
    with pytest.raises(KeyError):
        tables.block_ids("a")


def test_where_vllm_does_not_tell_nobody_loads_what_the_forward_reads(monkeypatch):
    monkeypatch.setattr(older_vllm, "TELLS_SYNC_LOADS", False)
    assert not has_sync_loads(SimpleNamespace())


def test_this_vllm_tells(monkeypatch):
    assert older_vllm.TELLS_SYNC_LOADS
    for told in (True, False):
        assert has_sync_loads(SimpleNamespace(has_sync_kv_loads=told)) is told
