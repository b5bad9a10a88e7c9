"""Routers hear of each block once, when the pool has it, and again when it is lost."""

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_events import BlockRemoved

from kvpp_connect.connectors.ascend_store.events import PoolEvents

A, B, C = (bytes([i]) * 32 for i in range(3))


@pytest.fixture
def events():
    events = PoolEvents()
    for block, name in ((A, "a"), (B, "b"), (C, "c")):
        events.expect(block, name, f"stored {name}")
    return events


def removed(events):
    """Names in the events of removal."""
    taken = events.take()
    assert all(isinstance(event, BlockRemoved) for event in taken)
    return [list(event.block_hashes) for event in taken]


def test_nothing_is_told_of_a_block_before_it_is_stored(events):
    assert events.take() == []
    assert not events.is_told(A)


def test_stored_blocks_are_told_in_their_order_and_once(events):
    events.stored([A, B])
    assert events.take() == ["stored a", "stored b"]
    events.stored([A])
    assert events.take() == []
    assert events.is_told(A)


def test_a_block_that_could_not_be_stored_is_not_told_and_may_be_later(events):
    events.failed([A])
    events.stored([A])
    assert events.take() == []
    assert not events.is_told(A)
    events.expect(A, "a", "stored a at last")
    events.stored([A])
    assert events.take() == ["stored a at last"]


def test_a_block_is_expected_until_all_puts_of_it_have_failed(events):
    events.expect(A, "a", "stored a")
    events.failed([A])
    events.stored([A])
    assert events.take() == ["stored a"]
    events.expect(B, "b", "stored b")
    events.failed([B])
    events.failed([B])
    events.stored([B])
    assert events.take() == []


def test_a_put_that_fails_after_another_has_stored_the_block_changes_nothing(events):
    events.expect(A, "a", "stored a")
    events.stored([A])
    events.failed([A])
    assert events.is_told(A)
    assert events.take() == ["stored a"]


def test_a_block_that_was_told_is_told_as_removed_when_it_is_lost(events):
    events.stored([A, B])
    events.take()
    events.lost([A, C])
    assert removed(events) == [["a"]]
    events.lost([A])
    assert removed(events) == []
    assert not events.is_told(A)
    assert events.is_told(B)


def test_a_lost_block_that_is_stored_again_is_told_again(events):
    events.stored([A])
    events.lost([A])
    events.expect(A, "a", "stored a again")
    events.stored([A])
    assert events.take()[-1] == "stored a again"


def test_a_reset_tells_all_that_was_told_as_removed_and_expects_nothing(events):
    events.stored([A, B])
    events.take()
    events.reset()
    assert removed(events) == [["a", "b"]]
    events.stored([C])
    events.reset()
    assert events.take() == []
