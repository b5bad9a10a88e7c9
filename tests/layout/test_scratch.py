import pytest
from builders import bundle_stage, equal_stage
from hypothesis import given
from hypothesis import strategies as st

from kvpp_connect.errors import ConfigError
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
    bundles=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=9),
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
    bundles=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=9),
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


def test_the_example_of_the_design_to_the_block():
    # 120 MB, 150 running blocks: (120,000,000 - 2 x 150 pages) // 3 pages = 985; plain 542.
    layout = plan_group(equal_stage(6, PAGE), 2, 64, RunningScratch(least=150, most=150))
    budget = plan_budget(layout, 0, 120_000_000, planner_block_bytes=6 * PAGE)
    assert (budget.num_blocks, budget.plain_blocks) == (985, 542)
    assert budget.capacity_ratio == pytest.approx(capacity_ratio(6, 2, 150 / 985), rel=2e-3)


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
