"""A load ends in time with the place of its first bad block, and never writes a wrong byte."""

import pytest
from pool_rank import SCOPE, Rank, hashes, key, payload, sealed, store_blocks

from kvpp_connect.connectors.ascend_store.backends.base import GetOutcome
from kvpp_connect.connectors.ascend_store.loader import GIVEN_UP_READ_S
from kvpp_connect.connectors.ascend_store.orders import LoadOrder, block_list

HASHES = hashes(5)
PLACES = [7, 2, 9, 4, 1]
SHARDS = ("s0-0", "s0-d")


@pytest.fixture
def rank():
    """A rank with two shards whose five blocks are all in the pool."""
    rank = Rank(*SHARDS)
    store_blocks(rank.pool, SHARDS, HASHES)
    yield rank
    rank.close()


def order(blocks=5):
    return LoadOrder(
        request_id="r", blocks=block_list(HASHES[:blocks], PLACES[:blocks]), in_step=False
    )


def load_all(rank, loader=None, blocks=5):
    load = (loader or rank.loader()).begin(order(blocks), SCOPE)
    assert load.ended.wait(30)
    return load


def assert_loaded(rank, good, name):
    """The first blocks are there, and bytes outside of the order's blocks as they were."""
    for place, block in list(zip(PLACES, HASHES, strict=True))[:good]:
        assert rank.holds(name, block, place)
    rank.assert_nothing_else_was_written(name, PLACES)


def test_every_block_of_every_shard_comes_into_its_place_and_nothing_else_is_written(rank):
    load = load_all(rank)
    assert load.first_bad == 5
    for name in SHARDS:
        assert_loaded(rank, 5, name)
    counts = rank.counts()
    assert (counts.load_objects, counts.load_bytes) == (10, 10 * 64)


@pytest.mark.parametrize("bad", range(5))
@pytest.mark.parametrize("name", SHARDS)
def test_the_result_is_the_first_block_of_which_some_shard_failed(rank, name, bad):
    rank.pool.lose([key(name, HASHES[bad])])
    loader = rank.loader()
    load = load_all(rank, loader)
    assert load.first_bad == bad
    assert loader.take_lost() == {HASHES[bad]}
    for each in SHARDS:
        assert_loaded(rank, bad, each)
    assert rank.untouched(name, PLACES[bad])


def test_the_first_of_several_failures_is_the_result_in_whatever_order_they_come(rank):
    rank.pool.lose([key("s0-0", HASHES[3]), key("s0-d", HASHES[1])])
    assert load_all(rank).first_bad == 1


def test_blocks_behind_a_failed_one_are_not_fetched():
    rank = Rank("s", threads=1)
    store_blocks(rank.pool, ["s"], HASHES[1:])
    assert load_all(rank).first_bad == 0
    assert rank.store.calls["get"] == 1
    rank.close()


def test_an_order_of_a_rank_that_holds_nothing_is_done_at_once():
    rank = Rank()
    assert rank.loader().begin(order(), SCOPE).is_closed
    rank.close()


def damage(rank, block, how):
    name = key("s0-0", block)
    if how == "flipped":
        content = bytearray(rank.pool.objects[name])
        content[-1] ^= 1
        rank.pool.objects[name] = bytes(content)
    elif how == "header":
        rank.pool.corrupt(name)
    elif how == "short":
        rank.pool.shorten(name)
    else:
        rank.pool.objects[name] = sealed("s0-d", block)  # right in itself, of another key


@pytest.mark.parametrize("how", ["flipped", "header", "short", "foreign"])
def test_a_damaged_object_is_not_used_is_removed_and_counts_as_lost(rank, how):
    damage(rank, HASHES[1], how)
    loader = rank.loader()
    load = load_all(rank, loader)
    assert load.first_bad == 1
    assert rank.untouched("s0-0", PLACES[1])
    assert key("s0-0", HASHES[1]) not in rank.pool.objects
    assert len(rank.pool.objects) == 9
    assert loader.take_lost() == {HASHES[1]}
    assert loader.take_lost() == set()
    assert rank.counts().failures_damaged == 1


def test_without_verification_an_object_of_the_right_size_is_taken_as_it_is(rank):
    damage(rank, HASHES[1], "flipped")
    assert load_all(rank, rank.loader(verify=False)).first_bad == 5
    assert rank.read("s0-0", PLACES[1]) != payload("s0-0", HASHES[1]).tobytes()


def test_a_read_that_failed_is_not_lost_and_its_staging_is_kept_away(rank):
    rank.pool.failing.add(key("s0-0", HASHES[0]))
    loader = rank.loader()
    assert load_all(rank, loader, blocks=2).first_bad == 0
    assert loader.take_lost() == set()
    assert rank.counts().failures_read == 1
    slot = rank.staging.take(0)
    assert rank.staging.take(0) is None, "Mooncake may still write the other one"
    rank.clock.advance(GIVEN_UP_READ_S)
    assert rank.staging.take(0) not in (None, slot)


def test_the_staging_of_a_whole_read_is_free_at_once(rank):
    load_all(rank)
    assert None not in [rank.staging.take(0) for _ in range(2)]


def test_a_store_that_raises_fails_the_load_and_is_left_alone(rank):
    rank.pool.down = True
    loader = rank.loader()
    assert load_all(rank, loader).first_bad == 0
    assert not rank.health.is_good
    assert rank.counts().failures_unreachable
    asked = rank.store.calls["get"]
    rank.pool.down = False
    assert load_all(rank, loader).first_bad == 0
    assert rank.store.calls["get"] == asked
    assert all(rank.untouched(name, place) for name in SHARDS for place in PLACES)


def test_a_raising_get_may_still_write_and_its_staging_is_kept_away(rank):
    rank.pool.down = True
    load_all(rank, blocks=2)
    taken = [rank.staging.take(0) for _ in range(2)]
    assert None in taken


def test_a_store_that_works_again_is_used_after_the_pause(rank):
    rank.pool.down = True
    loader = rank.loader()
    load_all(rank, loader)
    rank.pool.down = False
    rank.clock.advance(60)
    load_all(rank, loader, blocks=1)
    assert load_all(rank, loader).first_bad == 5
    assert rank.health.is_good


def test_a_load_that_takes_too_long_ends_and_what_arrives_afterwards_is_dropped(rank):
    rank.store.block("get")
    loader = rank.loader(timeout_s=10)
    load = loader.begin(order(), SCOPE)
    assert rank.store.waiting.wait(30)
    rank.clock.advance(9.9)
    assert not loader.is_due(load)
    rank.clock.advance(0.1)
    assert loader.is_due(load)
    assert load.first_bad == 0
    assert not rank.health.is_good
    # Its blocks are somebody else's from here on.
    rank.store.release()
    rank.wait_for_staging()
    assert load.first_bad == 0
    for name in SHARDS:
        rank.assert_nothing_else_was_written(name, [])
    assert rank.counts().failures_late == 6  # batches


def test_waiting_for_a_load_ends_at_its_deadline(rank):
    rank.store.block("get")
    loader = rank.loader(timeout_s=10)
    load = loader.begin(order(), SCOPE)
    rank.clock.advance(10)
    loader.wait(load)
    assert load.is_closed
    assert load.first_bad == 0


def test_waiting_for_a_load_that_works_answers_its_end(rank):
    loader = rank.loader()
    load = loader.begin(order(), SCOPE)
    loader.wait(load)
    assert (load.is_closed, load.first_bad) == (True, 5)


def test_batches_that_are_through_count_when_the_rest_is_given_up():
    rank = Rank("s", rows=2, threads=1)
    store_blocks(rank.pool, ["s"], HASHES)
    real_get = rank.store.get

    def get(keys, targets):
        if key("s", HASHES[2]) in keys:
            rank.store.block("get")
        return real_get(keys, targets)

    rank.store.get = get
    load = rank.loader().begin(order(), SCOPE)
    assert rank.store.waiting.wait(30)
    assert load.close() == 2
    assert load.first_bad == 2
    rank.close()
    assert rank.holds("s", HASHES[1], PLACES[1])


def test_a_cancelled_load_writes_nothing_any_more(rank):
    rank.store.block("get")
    load = rank.loader().begin(order(), SCOPE)
    assert rank.store.waiting.wait(30)
    load.close()
    assert load.is_closed
    rank.store.release()
    rank.wait_for_staging()
    for name in SHARDS:
        rank.assert_nothing_else_was_written(name, [])
    assert rank.health.is_good, "a request that was aborted says nothing about the store"


def test_a_load_that_gets_no_staging_in_time_fails(rank):
    for _ in range(2):
        rank.staging.take(0)
    loader = rank.loader(timeout_s=0)
    assert load_all(rank, loader, blocks=2).first_bad == 0
    assert rank.store.calls["get"] == 0
    assert rank.counts().failures_late


def test_a_bug_in_a_store_fails_the_load_and_not_the_threads(rank):
    real_get, broken = rank.store.get, [True]

    def get(keys, targets):
        if broken:
            raise RuntimeError("a bug")
        return real_get(keys, targets)

    rank.store.get = get
    loader = rank.loader()
    assert load_all(rank, loader).first_bad == 0
    assert rank.counts().failures_read
    broken.clear()
    rank.clock.advance(GIVEN_UP_READ_S)
    assert load_all(rank, loader).first_bad == 5


def test_a_failed_object_in_the_middle_leaves_the_good_ones_before_it(rank):
    rank.pool.failing.add(key("s0-0", HASHES[1]))
    outcomes = rank.store.get
    seen = []

    def get(keys, targets):
        seen.append(outcomes(keys, targets))
        return seen[-1]

    rank.store.get = get
    assert load_all(rank).first_bad == 1
    assert [GetOutcome.READ, GetOutcome.FAILED] in seen
    assert rank.holds("s0-0", HASHES[0], PLACES[0])
    assert rank.untouched("s0-0", PLACES[1])
