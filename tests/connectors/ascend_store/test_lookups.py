"""How much of a prompt the pool holds: whole blocks only, asked for in a thread of its own."""

import threading
import time

import pytest
from clocks import Clock
from fake_store import FakePool, FakeStore

from kvpp_connect.connectors.ascend_store.health import StoreHealth
from kvpp_connect.connectors.ascend_store.lookups import LookupService, count_complete
from kvpp_connect.connectors.ascend_store.shards import object_key

SCOPE = "kvpp1:model:layout"
SHARDS = ("s0-0", "s0-1", "s1-0")
HASHES = [bytes([i]) * 32 for i in range(6)]


def key(shard, block):
    return object_key(SCOPE, SHARDS[shard], HASHES[block])


@pytest.fixture
def pool():
    """A pool that holds everything."""
    pool = FakePool()
    for shard in range(len(SHARDS)):
        for block in range(len(HASHES)):
            pool.objects[key(shard, block)] = b"object"
    return pool


@pytest.fixture
def store(pool):
    return FakeStore(pool)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def health(clock):
    return StoreHealth("fake", clock)


@pytest.fixture
def service(store, health, clock):
    service = LookupService(store, health, clock)
    service.ask_about(SHARDS)
    yield service
    store.release()
    service.close()


def answer(lookup):
    """The answer, once it is there."""
    deadline = time.monotonic() + 30
    while lookup.blocks is None:
        assert time.monotonic() < deadline, "no answer"
        threading.Event().wait(0.001)
    return lookup.blocks


def count(store, hashes=HASHES, shards=SHARDS):
    return count_complete(store, SCOPE, shards, hashes)


def test_a_block_counts_when_every_shard_of_it_is_there(store):
    assert count(store) == 6


@pytest.mark.parametrize("shard", range(3))
@pytest.mark.parametrize("block", range(6))
def test_a_missing_object_of_any_shard_cuts_the_prefix_at_its_block(store, pool, shard, block):
    pool.lose([key(shard, block)])
    assert count(store) == block


def test_blocks_behind_a_gap_do_not_count(store, pool):
    pool.lose([key(0, 1), key(2, 3)])
    assert count(store) == 1


def test_the_other_shards_are_asked_only_for_blocks_that_the_first_one_has(store, pool):
    pool.lose([key(0, 2)])
    assert count(store) == 2
    assert (store.calls["exists"], store.keys["exists"]) == (2, 6 + 2 * 2)


def test_a_prompt_of_which_the_first_shard_has_nothing_takes_one_call(store, pool):
    pool.lose([key(0, 0)])
    assert count(store) == 0
    assert (store.calls["exists"], store.keys["exists"]) == (1, 6)


def test_one_shard_takes_one_call(store):
    assert count(store, shards=SHARDS[:1]) == 6
    assert store.calls["exists"] == 1


def test_the_store_is_not_asked_about_nothing(store):
    assert count(store, hashes=[]) == 0
    assert count(store, shards=()) == 0
    assert store.calls["exists"] == 0


def test_objects_under_another_scope_do_not_count(store):
    assert count_complete(store, "kvpp1:model:other", SHARDS, HASHES) == 0


def test_an_answer_comes_later_and_the_caller_does_not_wait(service, store):
    store.block("exists")
    lookup = service.ask(SCOPE, HASHES)
    assert store.waiting.wait(30)
    assert lookup.blocks is None
    store.release()
    assert answer(lookup) == 6


def test_an_answer_says_when_it_was_given(service, store, clock):
    store.block("exists")
    lookup = service.ask(SCOPE, HASHES)
    assert lookup.asked_at == clock()
    assert store.waiting.wait(30)
    clock.advance(2)
    store.release()
    assert answer(lookup) == 6
    assert lookup.answered_at == clock()


def test_a_store_that_fails_answers_nothing_found_and_is_left_alone(service, pool, health, store):
    pool.down = True
    assert answer(service.ask(SCOPE, HASHES)) == 0
    # The one behind it is answered when the first failure has been taken in.
    assert answer(service.ask(SCOPE, HASHES)) == 0
    asked = store.calls["exists"]
    assert not service.is_good
    assert not health.may_use()
    assert service.ask(SCOPE, HASHES).blocks == 0
    assert store.calls["exists"] == asked


def test_a_store_that_comes_back_is_used_again_after_the_pause(service, pool, health, clock):
    health.failed("no answer")
    clock.advance(1)
    assert answer(service.ask(SCOPE, HASHES)) == 6
    assert service.is_good


class BrokenStore(FakeStore):
    def exists(self, keys):
        if not self.calls["exists"]:
            self.calls["exists"] += 1
            raise RuntimeError("a bug in a client's library")
        return super().exists(keys)


def test_a_bug_in_a_store_ends_neither_the_thread_nor_the_request(pool, health, clock):
    service = LookupService(BrokenStore(pool), health, clock)
    service.ask_about(SHARDS)
    assert answer(service.ask(SCOPE, HASHES)) == 0
    assert answer(service.ask(SCOPE, HASHES)) in (0, 6)  # until the failure has been taken in
    clock.advance(60)
    assert answer(service.ask(SCOPE, HASHES)) == 6
    service.close()


def test_a_question_that_nobody_waits_for_is_not_asked(service, store):
    store.block("exists")
    first = service.ask(SCOPE, HASHES)
    assert store.waiting.wait(30)
    second, third = service.ask(SCOPE, HASHES), service.ask(SCOPE, HASHES)
    second.cancelled = True
    store.release()
    assert (answer(first), answer(third)) == (6, 6)
    assert second.blocks is None
    assert store.calls["exists"] == 2 * 2


def test_giving_up_cancels_the_question_and_leaves_the_store_alone(service, store):
    store.block("exists")
    hanging, queued = service.ask(SCOPE, HASHES), service.ask(SCOPE, HASHES)
    assert store.waiting.wait(30)
    service.gave_up(queued)
    assert queued.cancelled
    assert not service.is_good
    assert service.ask(SCOPE, HASHES).blocks == 0
    store.release()
    assert answer(hanging) == 6
    assert service.is_good, "its answer shows that the store works"


def test_forgetting_a_scope_removes_its_objects_and_no_others(service, pool):
    other = object_key(f"{SCOPE}2", SHARDS[0], HASHES[0])
    pool.objects[other] = b"object"
    service.forget(SCOPE)
    assert answer(service.ask(SCOPE, HASHES)) == 0  # answered in order
    assert list(pool.objects) == [other]


def test_look_ups_are_counted_once(service, pool, clock):
    assert answer(service.ask(SCOPE, HASHES)) == 6
    pool.down = True
    answer(service.ask(SCOPE, HASHES))
    service.close()  # the thread is through
    assert service.take_counts() == {"pool_lookups": 2, "pool_failures/lookup": 1}
    assert service.take_counts() == {}


def test_closing_leaves_the_store(service, store):
    service.close()
    assert store.calls["close"] == 1
