"""Which rank of the KVPP group owns which target bundle.

The bundles, in layer order, are cut into contiguous ranges, one per rank. The fullest rank sets
the block count of all, so the cut minimises the largest rank's bytes; among those cuts it is the
one nearest to equal counts, with the remainder on the lower ranks.
"""

from collections.abc import Sequence
from functools import cache

from kvpp_connect.errors import LayoutError


def equal_counts(num_bundles: int, group_size: int) -> tuple[int, ...]:
    """Split a count evenly, the remainder on the lower ranks: 8 over 3 is ``(3, 3, 2)``."""
    quotient, remainder = divmod(num_bundles, group_size)
    return tuple(quotient + (rank < remainder) for rank in range(group_size))


def assign_owners(bundle_bytes: Sequence[int], group_size: int) -> tuple[int, ...]:
    """Return the owning rank in the group for each bundle, in layer order.

    Args:
        bundle_bytes: bytes of one block of each target bundle, in layer order.
        group_size: ranks in the KVPP group; a rank may end up owning nothing.

    Example:
        >>> assign_owners([1] * 8, 3)
        (0, 0, 0, 1, 1, 1, 2, 2)
        >>> assign_owners([4, 1, 1, 1, 1], 2)
        (0, 1, 1, 1, 1)
    """
    if group_size < 1:
        raise LayoutError(f"KVPP group size is {group_size}, expected at least 1")
    counts = _balanced_counts(tuple(bundle_bytes), group_size)
    return tuple(rank for rank, count in enumerate(counts) for _ in range(count))


def _balanced_counts(sizes: tuple[int, ...], group_size: int) -> tuple[int, ...]:
    prefix = [0]
    for size in sizes:
        prefix.append(prefix[-1] + size)
    limit = _smallest_largest_share(sizes, group_size)
    wanted = equal_counts(len(sizes), group_size)

    @cache
    def best(rank: int, start: int) -> tuple[int, tuple[int, ...]] | None:
        """Least deviation from the equal counts for ``rank`` and above, and the counts."""
        if rank == group_size:
            return (0, ()) if start == len(sizes) else None
        found: tuple[int, tuple[int, ...]] | None = None
        # Larger counts first: of equally good cuts the remainder goes to the lower ranks.
        for end in range(len(sizes), start - 1, -1):
            if prefix[end] - prefix[start] > limit:
                continue
            rest = best(rank + 1, end)
            if rest is None:
                continue
            deviation = abs(end - start - wanted[rank]) + rest[0]
            if found is None or deviation < found[0]:
                found = (deviation, (end - start, *rest[1]))
        return found

    result = best(0, 0)
    assert result is not None, "the limit was chosen so that a cut exists"
    return result[1]


def _smallest_largest_share(sizes: tuple[int, ...], group_size: int) -> int:
    """Smallest limit in bytes for which contiguous ranges within it need at most that many ranks.

    Bisection over the answer with a greedy fill: a range is closed when the next bundle would
    pass the limit.
    """

    def ranks_needed(limit: int) -> int:
        ranks, filled = 1, 0
        for size in sizes:
            if filled + size > limit:
                ranks, filled = ranks + 1, 0
            filled += size
        return ranks

    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if ranks_needed(middle) <= group_size:
            high = middle
        else:
            low = middle + 1
    return low
