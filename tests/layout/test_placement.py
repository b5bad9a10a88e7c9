import itertools

import pytest
from builders import bundle_stage, equal_stage
from hypothesis import given
from hypothesis import strategies as st

from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import CacheComponent, place_rank, plan_group, stage_layers

stages = st.builds(
    bundle_stage,
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), max_size=9),
    st.lists(st.integers(1, 40), max_size=2),
)


def overlap(a, b):
    return a.offset < b.offset + b.size and b.offset < a.offset + a.size


@given(
    stage=stages,
    group_size=st.integers(1, 5),
    num_blocks=st.integers(1, 9),
    alignment=st.sampled_from([1, 8, 64]),
)
def test_every_component_has_one_place_and_persistent_ranges_are_disjoint(
    stage, group_size, num_blocks, alignment
):
    layout = plan_group(stage, group_size, alignment)
    names = [c.layer_name for b in stage.targets for c in b.components]
    names += [c.layer_name for c in stage.drafts]
    holders = dict.fromkeys(names, 0)
    for rank in range(group_size):
        placement = place_rank(layout, rank, num_blocks)
        assert sorted(p.component.layer_name for p in placement.components) == sorted(names)
        for place in placement.components:
            assert place.size == place.component.page_bytes * num_blocks
            assert place.offset % alignment == 0
            assert place.offset >= 0
            assert place.offset + place.size <= placement.total_bytes
            holders[place.component.layer_name] += place.persistent
        kept = [p for p in placement.components if p.persistent]
        scratch = [p for p in placement.components if not p.persistent]
        for i, place in enumerate(kept):
            assert not any(overlap(place, other) for other in kept[i + 1 :])
            assert not any(overlap(place, other) for other in scratch)
        assert placement.total_bytes == layout.rank_bytes(rank, num_blocks)
    targets = {c.layer_name for b in stage.targets for c in b.components}
    for name, count in holders.items():
        assert count == (1 if name in targets else group_size), name


@given(stage=stages, group_size=st.integers(2, 5), num_blocks=st.integers(1, 9))
def test_the_two_scratch_slots_are_disjoint_and_consecutive_layers_alternate(
    stage, group_size, num_blocks
):
    layout = plan_group(stage, group_size, 8)
    for rank in range(group_size):
        bundles = place_rank(layout, rank, num_blocks).bundles
        strangers = [b for b in bundles if b.owner != rank]
        for a in strangers:
            for b in strangers:
                if a.slot != b.slot:
                    assert not overlap(a, b)
                else:
                    assert a.offset == b.offset
        for a, b in itertools.pairwise(bundles):
            assert a.slot != b.slot


@given(stage=stages, group_size=st.integers(1, 5), num_blocks=st.integers(1, 9))
def test_a_bundle_looks_the_same_inside_on_every_rank(stage, group_size, num_blocks):
    layout = plan_group(stage, group_size, 8)
    placements = [place_rank(layout, rank, num_blocks) for rank in range(group_size)]
    for ordinal, bundle in enumerate(stage.targets):
        inner = {
            (
                placement.bundles[ordinal].size,
                *(
                    placement.by_layer_name[c.layer_name].offset - placement.bundles[ordinal].offset
                    for c in bundle.components
                ),
            )
            for placement in placements
        }
        assert len(inner) == 1


def test_a_worked_example_by_hand():
    # 3 layers of 10 bytes a block over 2 ranks, 4 blocks: rank 0 owns layers 0 and 1.
    placement = place_rank(plan_group(equal_stage(3, 10), 2), 1, 4)
    assert [(b.owner, b.offset, b.size) for b in placement.bundles] == [
        (0, 0, 40),  # scratch slot 0
        (0, 40, 40),  # scratch slot 1
        (1, 80, 40),  # the one owned bundle
    ]
    assert placement.total_bytes == 120
    assert placement.persistent_layers == {"model.layers.2.self_attn.c0"}


def test_a_stage_without_target_layers_pays_no_scratch():
    layout = plan_group(bundle_stage([], drafts=[10]), 2)
    assert layout.rank_bytes(0, 4) == layout.rank_bytes(1, 4) == 40


def test_the_plan_does_not_depend_on_the_order_of_the_input():
    names = [f"model.layers.{i}.attn" for i in (10, 2, 1)]
    components = {
        int(name.split(".")[2]): [CacheComponent(layer_name=name, page_bytes=4)] for name in names
    }
    backwards = dict(reversed(components.items()))
    assert stage_layers(targets=components, drafts=[]) == stage_layers(targets=backwards, drafts=[])
    stage = stage_layers(targets=components, drafts=[])
    assert [b.layer_index for b in stage.targets] == [1, 2, 10]


def test_bad_input_is_refused_by_name():
    layout = plan_group(equal_stage(2), 2)
    with pytest.raises(LayoutError, match="rank 2 is outside"):
        place_rank(layout, 2, 1)
    with pytest.raises(LayoutError, match="at least one block"):
        place_rank(layout, 0, 0)
    with pytest.raises(LayoutError, match="more than once: same"):
        stage_layers(
            targets={
                0: [CacheComponent(layer_name="same", page_bytes=1)],
                1: [CacheComponent(layer_name="same", page_bytes=1)],
            },
            drafts=[],
        )
    with pytest.raises(LayoutError, match="page_bytes is 0"):
        CacheComponent(layer_name="x", page_bytes=0)
