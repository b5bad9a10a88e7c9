"""What an engine tells routers of the pool: only what all its ranks have stored, and once."""

import pytest

pytest.importorskip("vllm")

from pool_scheduling import FakeRequest, Scheduling, names_of, prompt
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvpp_connect.connectors.ascend_store.orders import PutReport
from kvpp_connect.seam.older_vllm import MEDIUM_STORAGE


@pytest.fixture
def telling():
    return Scheduling(events=True)


def vllm_names(tokens):
    """Names that vLLM itself gives these blocks."""
    return [maybe_convert_block_hash(name) for name in FakeRequest("", list(tokens)).block_hashes]


def stored_names(events):
    return [list(event.block_hashes) for event in events if isinstance(event, BlockStored)]


def stored_prompt(engine, request_id="r", blocks=2, **facts):
    """The order that stores a whole prompt."""
    request = engine.arrive(request_id, prompt(blocks), **facts)
    engine.admit(request)
    (order,) = engine.step({request: 4 * blocks}).puts
    return order


def test_a_block_is_told_when_all_ranks_have_stored_it_with_its_parent(telling):
    order = stored_prompt(telling)
    telling.report(puts={order.job: PutReport(copied=2, ended=1)})
    assert telling.side.take_events() == []
    telling.report(puts={order.job: PutReport(ended=1)})
    first, second = telling.side.take_events()
    names = vllm_names(prompt(2))
    assert (first.block_hashes, first.parent_block_hash) == ([names[0]], None)
    assert (second.block_hashes, second.parent_block_hash) == ([names[1]], names[0])
    assert (second.token_ids, second.block_size) == (prompt(2)[4:], 4)
    assert (second.medium, second.lora_id) == (MEDIUM_STORAGE, None)
    assert telling.side.take_events() == []


def test_a_block_that_two_requests_store_is_told_once(telling):
    first, second = stored_prompt(telling, "a"), stored_prompt(telling, "b")
    telling.stored(first)
    telling.stored(second)
    assert len(telling.side.take_events()) == 2
    telling.stored(stored_prompt(telling, "c"))
    assert telling.side.take_events() == []


def test_a_block_that_some_rank_could_not_store_is_not_told(telling):
    telling.stored(stored_prompt(telling), failed=[0])
    assert stored_names(telling.side.take_events()) == [[vllm_names(prompt(2))[1]]]


def test_a_block_that_one_of_two_requests_could_store_is_told(telling):
    first, second = stored_prompt(telling, "a"), stored_prompt(telling, "b")
    telling.stored(first, failed=[0, 1])
    telling.stored(second)
    assert len(stored_names(telling.side.take_events())) == 2


def test_a_lost_block_is_told_as_removed_and_again_when_it_is_stored_again(telling):
    telling.stored(stored_prompt(telling))
    telling.side.take_events()
    name = names_of(prompt(2))[0]
    telling.report(lost={name})
    (event,) = telling.side.take_events()
    assert isinstance(event, BlockRemoved)
    assert event.block_hashes == [vllm_names(prompt(2))[0]]
    telling.report(lost={name})
    assert telling.side.take_events() == []
    telling.stored(stored_prompt(telling, "again"))
    assert stored_names(telling.side.take_events()) == [[vllm_names(prompt(2))[0]]]


def test_a_reset_tells_that_all_blocks_are_gone(telling):
    telling.stored(stored_prompt(telling))
    telling.side.take_events()
    telling.side.reset()
    (event,) = telling.side.take_events()
    assert isinstance(event, BlockRemoved)
    assert sorted(event.block_hashes) == sorted(vllm_names(prompt(2)))


def test_an_old_put_that_ends_after_a_reset_tells_nothing_of_the_new_keys(telling):
    old = stored_prompt(telling, "old")
    telling.side.reset()
    new = stored_prompt(telling, "new")
    telling.stored(old)
    assert telling.side.take_events() == []
    telling.stored(new)
    assert len(telling.side.take_events()) == 2


def test_blocks_that_vllm_has_not_named_are_not_told(telling):
    telling.stored(stored_prompt(telling, is_named=False))
    assert telling.side.take_events() == []


def test_an_engine_that_tells_nobody_keeps_no_events():
    engine = Scheduling()
    engine.stored(stored_prompt(engine))
    assert engine.side.take_events() == []
