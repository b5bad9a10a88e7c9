from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import assign_owners, equal_counts


def shares(sizes, owners, group_size):
    return [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        for rank in range(group_size)
    ]


def smallest_largest_share(sizes, group_size):
    """Every cut tried: the yardstick for the planner."""
    ends = range(len(sizes) + 1)
    best = None
    for cuts in combinations([*ends] * (group_size - 1), group_size - 1):
        edges = [0, *sorted(cuts), len(sizes)]
        largest = max(sum(sizes[a:b]) for a, b in pairwise(edges))
        best = largest if best is None else min(best, largest)
    return sum(sizes) if best is None else best


def test_eight_equal_layers_over_three_ranks_leave_the_remainder_to_the_lower_ranks():
    assert assign_owners([7] * 8, 3) == (0, 0, 0, 1, 1, 1, 2, 2)


@pytest.mark.parametrize("group_size", range(1, 10))
@pytest.mark.parametrize("num_layers", [0, 1, 2, 5, 8, 61, 78])
def test_equal_layers_are_cut_into_equal_counts(num_layers, group_size):
    owners = assign_owners([36864] * num_layers, group_size)
    assert tuple(owners.count(rank) for rank in range(group_size)) == equal_counts(
        num_layers, group_size
    )


def test_a_rank_may_own_nothing():
    assert assign_owners([5, 5], 4) == (0, 1)
    assert assign_owners([], 2) == ()


def test_unequal_layers_are_balanced_by_bytes_not_by_count():
    assert assign_owners([4, 1, 1, 1, 1], 2) == (0, 1, 1, 1, 1)


def test_of_equally_good_cuts_the_one_nearest_to_equal_counts_wins():
    # Limit 6 allows counts (1,3), (2,2) is not possible in fewer bytes: 6+1 > 6.
    assert assign_owners([6, 1, 1, 1], 2) == (0, 1, 1, 1)
    # Both (2,2) and (3,1) keep the largest share at 10; equal counts win.
    assert assign_owners([9, 1, 1, 9], 2) == (0, 0, 1, 1)


def test_of_cuts_equally_near_to_equal_counts_the_lower_ranks_take_more():
    # Counts (1, 2, 1) and (1, 1, 2) both keep the largest share at 5.
    assert assign_owners([5, 3, 2, 3], 3) == (0, 1, 1, 2)


def test_a_group_without_ranks_is_refused():
    with pytest.raises(LayoutError, match="group size is 0"):
        assign_owners([1], 0)


@given(
    sizes=st.lists(st.integers(min_value=1, max_value=50), max_size=7),
    group_size=st.integers(min_value=1, max_value=4),
)
def test_ranges_are_contiguous_and_the_largest_share_is_the_smallest_possible(sizes, group_size):
    owners = assign_owners(sizes, group_size)
    assert list(owners) == sorted(owners)
    assert all(0 <= owner < group_size for owner in owners)
    if sizes:
        assert max(shares(sizes, owners, group_size)) == smallest_largest_share(sizes, group_size)
