"""Layers come one after the other; each may be read once its own bytes are there, not before."""

import threading

import pytest
from pool_rank import PAGES, SCOPE, Rank, hashes, key, store_blocks, until

from kvpp_connect.connectors.ascend_store.layerwise import LayerLoader, cut_layers
from kvpp_connect.connectors.ascend_store.loader import LoadTools
from kvpp_connect.connectors.ascend_store.orders import LoadOrder, block_list

HASHES = hashes(5)
PLACES = [7, 2, 9, 4, 1]
SHARDS = ("s0-0", "s0-d")
# Each shard has two layers of one cache; drafts are loaded first.
TARGETS = ["s0-0.layers.0.attn", "s0-0.layers.1.attn"]
DRAFTS = ["s0-d.layers.0.attn", "s0-d.layers.1.attn"]


@pytest.fixture
def rank():
    """A rank with a shard of targets and one of drafts, whose blocks are all in the pool."""
    rank = Rank(*SHARDS)
    store_blocks(rank.pool, SHARDS, HASHES)
    yield rank
    rank.close()


def layer_loader(rank, timeout_s=10.0, threads=1):
    tools = LoadTools(
        store=rank.store,
        copier=rank.copier,
        staging=rank.staging,
        health=rank.health,
        counters=rank.counters,
        timeout_s=timeout_s,
        verify=True,
        clock=rank.clock,
    )
    return LayerLoader(tools, rank.shards, threads, rank.clock)


def order(name="r", blocks=5):
    return LoadOrder(
        request_id=name, blocks=block_list(HASHES[:blocks], PLACES[:blocks]), in_step=True
    )


def test_all_layers_come_into_their_places_and_nothing_else_is_written(rank):
    loader = layer_loader(rank)
    loader.begin([order()], SCOPE)
    for layer in TARGETS:
        loader.wait(layer)
        assert loader.is_ready(layer)
    [load] = loader.finish()
    assert load.first_bad == 5
    for name in SHARDS:
        for place, block in zip(PLACES, HASHES, strict=True):
            assert rank.holds(name, block, place)
        rank.assert_nothing_else_was_written(name, PLACES)
    counts = rank.counts()
    assert (counts.load_objects, counts.load_bytes) == (10, 10 * sum(PAGES))


def test_drafts_are_there_when_the_step_begins(rank):
    loader = layer_loader(rank)
    loader.begin([order()], SCOPE)
    assert all(loader.is_ready(layer) for layer in DRAFTS)
    for place, block in zip(PLACES, HASHES, strict=True):
        assert rank.holds("s0-d", block, place)
    loader.finish()


def test_a_layer_is_not_ready_before_its_bytes_are_there(rank):
    rank.shards = [s for s in rank.shards if s.shard.name == "s0-0"]
    loader = layer_loader(rank)
    rank.store.block("get_ranges")
    loader.begin([order()], SCOPE)
    rank.store.waiting.wait(30)
    assert not any(loader.is_ready(layer) for layer in TARGETS)
    waited = threading.Event()
    waiter = threading.Thread(target=lambda: (loader.wait(TARGETS[0]), waited.set()))
    waiter.start()
    assert not waited.is_set()
    rank.store.release()
    waiter.join(30)
    for place, block in zip(PLACES, HASHES, strict=True):
        assert rank.read("s0-0", place)[: PAGES[0]] == rank.read_payload("s0-0", block)[: PAGES[0]]
    loader.finish()


def test_layers_that_this_rank_does_not_hold_are_nobodys_wait(rank):
    loader = layer_loader(rank)
    rank.store.block("get_ranges")
    assert loader.is_ready("of.another.rank")
    loader.wait("of.another.rank")
    loader.wait(TARGETS[0])  # no step is under way


@pytest.mark.parametrize("bad", range(5))
@pytest.mark.parametrize("name", SHARDS)
def test_the_result_is_the_first_block_that_is_gone(rank, name, bad):
    rank.pool.lose([key(name, HASHES[bad])])
    loader = layer_loader(rank)
    loader.begin([order()], SCOPE)
    for layer in TARGETS:
        loader.wait(layer)
    [load] = loader.finish()
    assert load.first_bad == bad


@pytest.mark.parametrize("name", SHARDS)
def test_a_damaged_object_is_noticed_with_the_last_layer_and_removed(rank, name):
    rank.pool.corrupt(key(name, HASHES[3]))
    loader = layer_loader(rank)
    loader.begin([order()], SCOPE)
    [load] = loader.finish()
    assert load.first_bad == 3
    assert key(name, HASHES[3]) not in rank.pool.objects
    assert rank.counts().failures_damaged == 1


def test_a_store_that_does_not_answer_lets_the_step_go_on_in_time(rank):
    rank.shards = [s for s in rank.shards if s.shard.name == "s0-0"]
    loader = layer_loader(rank, timeout_s=5)
    rank.store.block("get_ranges")
    loader.begin([order()], SCOPE)
    rank.clock.now += 6
    for layer in TARGETS:
        loader.wait(layer)
        assert loader.is_ready(layer)
    [load] = loader.finish()
    assert load.first_bad == 0
    rank.store.release()
    until(lambda: rank.staging.take(0))
    for place in PLACES:
        assert rank.untouched("s0-0", place)


def test_several_requests_load_in_one_step(rank):
    loader = layer_loader(rank)
    rank.pool.lose([key("s0-0", HASHES[1])])
    a = LoadOrder(request_id="a", blocks=block_list(HASHES[:2], PLACES[:2]), in_step=True)
    b = LoadOrder(request_id="b", blocks=block_list(HASHES[2:], PLACES[2:]), in_step=True)
    loader.begin([a, b], SCOPE)
    loads = {load.order.request_id: load for load in loader.finish()}
    assert (loads["a"].first_bad, loads["b"].first_bad) == (1, 3)
    assert loader.finish() == []


def test_the_parts_of_a_shard_cover_its_objects(rank):
    parts, drafts = cut_layers(rank.shards)
    assert drafts == 2
    for name in SHARDS:
        own = [part for part in parts if part.shard.name == name]
        assert [part.begin for part in own] == [0, *(part.end for part in own[:-1])]
        assert own[-1].end == 64 + sum(PAGES)
