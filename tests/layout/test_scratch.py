import pytest
from builders import bundle_stage, equal_stage
from hypothesis import given
from hypothesis import strategies as st

from kvpp_connect.errors import ConfigError, LayoutError
from kvpp_connect.layout import (
    RunningScratch,
    capacity_ratio,
    place_rank,
    plan_budget,
    plan_group,
    running_scratch,
)
from kvpp_connect.layout.budget import fitting_blocks

PAGE = 36_864

sizes = st.builds(
    lambda least, more, divisor: RunningScratch(
        least=least, most=least + more, share_divisor=divisor
    ),
    st.integers(1, 20),
    st.integers(0, 50),
    st.integers(1, 8),
)


@given(size=sizes, num_blocks=st.integers(1, 500))
def test_scratch_never_falls_as_blocks_rise_and_never_exceeds_them(size, num_blocks):
    assert 1 <= size.blocks(num_blocks) <= num_blocks
    assert size.blocks(num_blocks) <= size.blocks(num_blocks + 1)


@given(
    bundles=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=2), min_size=1, max_size=9),
    drafts=st.lists(st.integers(1, 40), max_size=2),
    group_size=st.integers(1, 5),
    memory=st.integers(0, 50_000),
    alignment=st.sampled_from([1, 64]),
    size=sizes,
)
def test_the_blocks_fit_and_one_more_would_not(
    bundles, drafts, group_size, memory, alignment, size
):
    layout = plan_group(bundle_stage(bundles, drafts), group_size, alignment, size)
    for rank in range(group_size):
        blocks = fitting_blocks(layout, rank, memory)
        assert layout.rank_bytes(rank, blocks + 1) > memory
        if blocks:
            assert place_rank(layout, rank, blocks).total_bytes <= memory


@given(
    bundles=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=2), min_size=1, max_size=9),
    group_size=st.integers(1, 5),
    num_blocks=st.integers(1, 60),
    size=sizes,
)
def test_scratch_and_persistent_bytes_are_disjoint_and_all_views_end_inside(
    bundles, group_size, num_blocks, size
):
    layout = plan_group(bundle_stage(bundles), group_size, 8, size)
    for rank in range(group_size):
        placement = place_rank(layout, rank, num_blocks)
        slots_end = 2 * layout.slot_bytes(num_blocks)
        for place in placement.components:
            if place.persistent:
                assert place.offset >= slots_end
            else:
                assert place.offset + place.size <= slots_end
            view_end = place.offset + place.component.page_bytes * num_blocks
            assert view_end <= placement.total_bytes
        for bundle in placement.bundles:
            assert bundle.slot_offset + layout.slot_bytes(num_blocks) <= slots_end


@given(
    bundles=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=2), min_size=1, max_size=9),
    group_size=st.integers(1, 5),
    num_blocks=st.integers(1, 60),
    alignment=st.sampled_from([1, 8, 64]),
    size=sizes,
)
def test_the_blocks_that_a_forward_uses_are_one_range_of_the_slot_and_nothing_else(
    bundles, group_size, num_blocks, alignment, size
):
    stage = bundle_stage(bundles)
    layout = plan_group(stage, group_size, alignment, size)
    for rank in range(group_size):
        placement = place_rank(layout, rank, num_blocks)
        for bundle, target in zip(placement.bundles, stage.targets, strict=True):
            assert [p.component for p in bundle.scratch] == list(target.components)
            assert bundle.components == bundle.scratch or bundle.owner == rank
            for used in range(1, placement.scratch_blocks + 1):
                (run,) = bundle.runs
                start, length = bundle.used_range(run, used)
                pieces = [place.used_range(used) for place in bundle.scratch]
                assert length == used * target.page_bytes
                assert [n for _, n in pieces] == [used * c.page_bytes for c in target.components]
                assert pieces[0][0] == start
                assert sum(pieces[-1]) == start + length
                assert bundle.slot_offset <= start
                assert start + length <= bundle.slot_offset + layout.slot_bytes(num_blocks)
                for place, (offset, length) in zip(bundle.scratch, pieces, strict=True):
                    assert place.offset <= offset
                    assert offset + length <= place.offset + place.size


@given(
    bundles=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=9),
    group_size=st.integers(1, 5),
    num_blocks=st.integers(1, 60),
    alignment=st.sampled_from([1, 8, 64]),
    size=sizes,
)
def test_with_one_numbering_each_component_begins_at_its_own_aligned_base(
    bundles, group_size, num_blocks, alignment, size
):
    layout = plan_group(bundle_stage(bundles), group_size, alignment, size, "layer")
    for rank in range(group_size):
        placement = place_rank(layout, rank, num_blocks)
        for bundle in placement.bundles:
            slot_end = bundle.slot_offset + layout.slot_bytes(num_blocks)
            assert len(bundle.runs) == len(bundle.scratch)
            for used in range(1, placement.scratch_blocks + 1):
                ranges = [bundle.used_range(run, used) for run in bundle.runs]
                assert ranges == [
                    (place.offset, used * place.component.page_bytes) for place in bundle.scratch
                ]
                for (start, length), after in zip(
                    ranges, [*(start for start, _ in ranges[1:]), slot_end], strict=True
                ):
                    assert start % alignment == 0
                    assert start + length <= after
            for place in bundle.scratch:
                assert place.first_block(1) == 0
                view_end = place.offset + place.component.page_bytes * num_blocks
                assert view_end <= placement.total_bytes


def test_two_components_meet_in_the_middle_by_hand():
    # Slots of 4 blocks; pages of 10 and 3 bytes; the first component ends where 8 divides.
    scratch = RunningScratch(least=4, most=4)
    placement = place_rank(plan_group(bundle_stage([[10, 3], [10]]), 2, 8, scratch), 1, 9)
    both, main = placement.bundles
    assert [(p.offset, p.from_back) for p in both.scratch] == [(0, True), (40, False)]
    assert both.used_range(both.runs[0], 3) == (10, 39)
    assert [place.first_block(3) for place in both.scratch] == [1, 0]
    assert main.scratch[0].from_back is False
    odd = place_rank(plan_group(bundle_stage([[9, 3]]), 2, 8, scratch), 1, 9).bundles[0]
    assert [p.offset for p in odd.scratch] == [4, 40]
    assert odd.used_range(odd.runs[0], 1) == (31, 12)


def test_three_components_of_one_layer_are_refused_with_the_way_out():
    scratch = RunningScratch(least=4, most=4)
    with pytest.raises(LayoutError, match=r"3 cache components.*kvpp\.mode to full"):
        plan_group(bundle_stage([[4], [4, 2, 2]]), 2, 1, scratch)
    plan_group(bundle_stage([[4], [4, 2, 2]]), 2)
    plan_group(bundle_stage([[4], [4, 2, 2]]), 2, 1, scratch, "layer")


@pytest.mark.parametrize(
    ("bundles", "changes"),
    [
        ([[8], [8], [8]], False),
        ([[8, 2], [8], [8, 2]], False),
        ([[8], [6]], True),
        ([[8, 2], [8, 4]], True),
    ],
)
def test_slots_change_shape_where_components_of_one_kind_have_several_sizes(bundles, changes):
    assert plan_group(bundle_stage(bundles), 2).slots_change_shape is changes


def test_the_example_of_the_design_to_the_block():
    # 120 MB, 150 running blocks: (120,000,000 - 2 x 150 pages) // 3 pages = 985; plain 542.
    layout = plan_group(equal_stage(6, PAGE), 2, 64, RunningScratch(least=150, most=150))
    budget = plan_budget(layout, 0, 120_000_000, planner_block_bytes=6 * PAGE)
    assert (budget.num_blocks, budget.plain_blocks) == (985, 542)
    assert budget.num_blocks / budget.plain_blocks == pytest.approx(
        capacity_ratio(6, 2, 150 / 985), rel=2e-3
    )


@pytest.mark.parametrize("group_size", [2, 4, 8])
@pytest.mark.parametrize("running", [64, 1000, 2500])
def test_capacity_equals_the_formula_to_the_block(group_size, running):
    layers, memory = 61, 4_000_000_000
    scratch = RunningScratch(least=running, most=running)
    layout = plan_group(equal_stage(layers, PAGE), group_size, 1, scratch)
    blocks = fitting_blocks(layout, 0, memory)
    owned = -(-layers // group_size)
    assert blocks == (memory - 2 * running * PAGE) // (owned * PAGE)


def test_the_default_is_a_quarter_of_the_cache_between_one_request_and_all():
    size = running_scratch(
        block_tokens=16, max_model_tokens=1024, max_requests=4, running_tokens=None
    )
    assert size.blocks(100) == 65
    assert size.blocks(400) == 100
    assert size.blocks(10_000) == 4 * 65


def test_too_few_running_tokens_are_refused_with_the_number_needed():
    with pytest.raises(ConfigError, match=r"running_tokens is 500.*needs 1040"):
        running_scratch(block_tokens=16, max_model_tokens=1024, max_requests=4, running_tokens=500)
