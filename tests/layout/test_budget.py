import pytest
from builders import bundle_stage, equal_stage
from hypothesis import given
from hypothesis import strategies as st

from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import (
    capacity_by_bytes,
    capacity_ratio,
    group_blocks,
    place_rank,
    plan_budget,
    plan_group,
)
from kvpp_connect.layout.budget import fitting_blocks

PAGE = 36_864  # 16 tokens x 576 values x 4 bytes


def test_six_layers_over_two_ranks_in_sixty_megabytes_by_hand():
    # 60,000,000 // (3 owned + 2 scratch) pages = 325 blocks; plain: 60,000,000 // 6 pages = 271.
    layout = plan_group(equal_stage(6, PAGE), 2)
    budget = plan_budget(layout, 0, 60_000_000, planner_block_bytes=6 * PAGE)
    assert (budget.num_blocks, budget.plain_blocks) == (325, 271)
    assert budget.logical_bytes == 325 * 6 * PAGE
    assert round(budget.num_blocks / budget.plain_blocks, 2) == 1.2


def test_drafts_and_the_largest_bundle_count_by_hand():
    # Rank 1 owns 3 + 3, drafts 2, scratch 2 x 5: 18 bytes a block.
    layout = plan_group(bundle_stage([[5], [3], [3]], drafts=[2]), 2)
    assert layout.owners == (0, 1, 1)
    assert fitting_blocks(layout, 1, 18 * 7 + 17) == 7
    assert fitting_blocks(layout, 0, 17 * 7) == 7


def test_the_fullest_rank_sets_the_blocks_of_the_group_and_the_ratio():
    # As above; plain vLLM pays 5 + 3 + 3 + 2 a block on every rank.
    layout = plan_group(bundle_stage([[5], [3], [3]], drafts=[2]), 2)
    assert group_blocks(layout, 18 * 7 + 17) == 7
    assert capacity_by_bytes([layout], 1.0) == 13 / 18
    assert capacity_by_bytes([layout], 0.25) == 13 / (8 + 2.5)


@given(
    layers=st.integers(1, 99),
    ranks=st.integers(1, 16),
    share=st.floats(0, 1),
    drafts=st.integers(0, 2),
)
def test_for_equal_layers_the_ratio_by_bytes_is_the_formula(layers, ranks, share, drafts):
    layout = plan_group(bundle_stage([[PAGE]] * layers, [PAGE] * drafts), ranks)
    formula = capacity_ratio(layers, ranks, share, drafts)
    assert capacity_by_bytes([layout], share) == pytest.approx(formula)


def test_few_layers_can_lose_capacity():
    # 3 layers over 2 ranks: (2 + 2) pages a block instead of 3.
    assert capacity_ratio(3, 2) == 0.75


def test_the_formula_of_the_design():
    assert capacity_ratio(78, 8) == 6.5
    assert round(capacity_ratio(6, 2), 2) == 1.2


def test_no_block_at_all_is_an_error_with_the_bytes_needed():
    layout = plan_group(equal_stage(6, PAGE), 2)
    with pytest.raises(LayoutError, match=f"{5 * PAGE} bytes needed"):
        plan_budget(layout, 0, 5 * PAGE - 1, planner_block_bytes=6 * PAGE)


@given(
    bundles=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=9),
    drafts=st.lists(st.integers(1, 40), max_size=2),
    group_size=st.integers(1, 5),
    memory=st.integers(0, 100_000),
    alignment=st.sampled_from([1, 8, 64, 2048]),
)
def test_the_blocks_fit_and_one_more_would_not(bundles, drafts, group_size, memory, alignment):
    layout = plan_group(bundle_stage(bundles, drafts), group_size, alignment)
    for rank in range(group_size):
        blocks = fitting_blocks(layout, rank, memory)
        assert layout.rank_bytes(rank, blocks + 1) > memory
        if blocks:
            assert place_rank(layout, rank, blocks).total_bytes <= memory
