"""Every cache of every block is in exactly one object, and other layouts have other keys."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpp_connect.connectors.ascend_store.backends.base import MAX_KEY_LENGTH
from kvpp_connect.connectors.ascend_store.shards import (
    HeldCaches,
    PoolComponent,
    key_scope,
    layout_digest,
    object_key,
    plan_stage,
)
from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import CacheComponent, TokenShard, place_rank, plan_group, stage_layers


def component(layer, part="attn", page=1152, dtype="float32"):
    return PoolComponent(
        layer_name=f"model.layers.{layer}.self_attn.{part}", page_bytes=page, dtype=dtype
    )


def replicas(ranks, components):
    return [HeldCaches(rank=rank, components=tuple(components)) for rank in range(ranks)]


def under_kvpp(ranks, layers, drafts=()):
    """What each rank holds when KVPP's own planner cuts the layers."""
    as_cache = {c.layer_name: c for c in (*layers, *drafts)}
    targets = {}
    for c in layers:
        index = int(c.layer_name.split(".")[2])
        targets.setdefault(index, []).append(
            CacheComponent(layer_name=c.layer_name, page_bytes=c.page_bytes)
        )
    stage = stage_layers(
        targets=targets,
        drafts=[CacheComponent(layer_name=c.layer_name, page_bytes=c.page_bytes) for c in drafts],
    )
    layout = plan_group(stage, ranks)
    held = []
    for rank in range(ranks):
        names = place_rank(layout, rank, 4).persistent_layers
        held.append(
            HeldCaches(rank=rank, components=tuple(as_cache[name] for name in sorted(names)))
        )
    return held


def names(shard):
    return [c.layer_name for c in shard.components]


def assert_each_cache_once(stage, held):
    stored = [name for shard in stage.shards for name in names(shard)]
    assert sorted(stored) == sorted({c.layer_name for h in held for c in h.components})
    for rank_held in held:
        loaded = [n for shard in stage.held_by(rank_held) for n in names(shard)]
        assert sorted(loaded) == sorted(c.layer_name for c in rank_held.components)
        own = {c.layer_name for c in rank_held.components}
        for shard in stage.written_by(rank_held.rank):
            assert set(names(shard)) <= own


@given(st.integers(1, 9), st.integers(1, 14), st.integers(0, 2), st.booleans(), st.randoms())
def test_each_cache_is_stored_once_and_loaded_by_whoever_holds_it(
    ranks, layers, drafts, indexers, rng
):
    caches = [component(i) for i in range(layers)]
    if indexers:
        caches += [component(i, "indexer.k_cache", 132) for i in range(0, layers, 2)]
    extra = [component(100 + i) for i in range(drafts)]
    held = under_kvpp(ranks, caches, extra) if ranks > 1 else replicas(1, caches + extra)
    rng.shuffle(caches)
    assert_each_cache_once(plan_stage(0, held), held)
    plain = replicas(ranks, caches + extra)
    assert_each_cache_once(plan_stage(0, plain), plain)


def test_layers_in_the_order_of_their_numbers_and_not_of_their_letters():
    stage = plan_stage(0, replicas(1, [component(i) for i in (10, 2, 9, 1)]))
    assert [n.split(".")[2] for n in names(stage.shards[0])] == ["1", "2", "9", "10"]


def test_drafts_are_stored_once_by_the_rank_that_stores_least():
    held = under_kvpp(2, [component(i) for i in range(5)], [component(5)])
    stage = plan_stage(0, held)
    assert [(s.name, s.writer, len(s.components)) for s in stage.shards] == [
        ("s0-0", 0, 3),
        ("s0-1", 1, 2),
        ("s0-d", 1, 1),
    ]
    assert len(stage.held_by(held[0])) == len(stage.held_by(held[1])) == 2


def test_ranks_that_own_nothing_store_nothing():
    held = under_kvpp(4, [component(0), component(1)])
    stage = plan_stage(0, held)
    assert len(stage.shards) == 2
    assert [len(stage.written_by(rank)) for rank in range(4)] == [1, 1, 0, 0]
    assert stage.held_by(held[3]) == ()


def test_an_engine_without_kvpp_cuts_its_layers_as_one_with_kvpp_does():
    caches = [component(i, page=1000 + 64 * i) for i in range(7)]
    with_kvpp = plan_stage(0, under_kvpp(3, caches))
    without = plan_stage(0, replicas(3, caches))
    assert with_kvpp == without
    assert layout_digest([with_kvpp], 16) == layout_digest([without], 16)


def test_ranks_that_keep_other_tokens_of_a_block_have_shards_of_their_own():
    caches = tuple(component(i) for i in range(4))
    held = [
        HeldCaches(rank=r, components=caches, tokens=TokenShard(index=r % 2, count=2))
        for r in range(4)
    ]
    stage = plan_stage(0, held)
    assert sorted(s.name for s in stage.shards) == ["s0t0-0", "s0t0-2", "s0t1-1", "s0t1-3"]
    for rank_held in held:
        assert sum(len(s.components) for s in stage.held_by(rank_held)) == 4


def test_a_cache_held_by_some_ranks_is_refused():
    all_three = replicas(3, [component(0), component(1)])
    some = [*all_three[:2], dataclasses.replace(all_three[2], components=(component(0),))]
    with pytest.raises(LayoutError, match=r"layers\.1\.self_attn\.attn is held by ranks \[0, 1\]"):
        plan_stage(0, some)


def test_ranks_that_describe_a_cache_differently_are_refused():
    a, b = replicas(2, [component(0)])
    b = dataclasses.replace(b, components=(component(0, page=2304),))
    with pytest.raises(LayoutError, match="rank 1 holds"):
        plan_stage(0, [a, b])


def test_the_order_of_what_ranks_hold_does_not_matter():
    caches = [component(i) for i in range(6)]
    held = under_kvpp(2, caches)
    shuffled = []
    for h in held:
        parts = list(h.components)
        random.Random(1).shuffle(parts)
        shuffled.append(dataclasses.replace(h, components=tuple(parts)))
    assert plan_stage(0, held) == plan_stage(0, shuffled)


BASE = [component(i) for i in range(6)]
OTHER_LAYOUTS = {
    "one rank": ([plan_stage(0, replicas(1, BASE))], 16),
    "other group size": ([plan_stage(0, replicas(3, BASE))], 16),
    "other block size": ([plan_stage(0, replicas(2, BASE))], 32),
    "other dtype": (
        [plan_stage(0, replicas(2, [component(i, dtype="bfloat16") for i in range(6)]))],
        16,
    ),
    "other page size": (
        [plan_stage(0, replicas(2, [component(i, page=656) for i in range(6)]))],
        16,
    ),
    "a layer more": ([plan_stage(0, replicas(2, [*BASE, component(6)]))], 16),
    "drafts": ([plan_stage(0, under_kvpp(2, BASE, [component(6)]))], 16),
    "an indexer": ([plan_stage(0, replicas(2, [*BASE, component(3, "indexer.k_cache", 132)]))], 16),
    "two stages": (
        [plan_stage(0, replicas(2, BASE[:3])), plan_stage(1, replicas(2, BASE[3:]))],
        16,
    ),
    "other pipeline cut": (
        [plan_stage(0, replicas(2, BASE[:4])), plan_stage(1, replicas(2, BASE[4:]))],
        16,
    ),
}


def test_another_layout_has_other_keys():
    digests = {name: layout_digest(*layout) for name, layout in OTHER_LAYOUTS.items()}
    digests["the layout"] = layout_digest([plan_stage(0, replicas(2, BASE))], 16)
    assert len(set(digests.values())) == len(digests), digests


def test_keys_are_made_of_what_every_store_takes():
    layout = layout_digest([plan_stage(12, replicas(8, BASE))], 128)
    key = object_key(key_scope("ab" * 16, layout), "s12t7-15", bytes(range(32)))
    assert len(key) < MAX_KEY_LENGTH
    assert all(c.isascii() and (c.isalnum() or c in "-_:@#") for c in key)
