"""Bytes to blocks: how many blocks fit, and what vLLM's planner has to be told.

vLLM's planner divides the memory that a worker reports by its own bytes per block. A KVPP worker
therefore reports a *logical* budget, the number of blocks that really fit times the planner's
bytes per block, and allocates the placement of the block count that the planner returns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpp_connect.errors import LayoutError
from kvpp_connect.layout.placement import NUM_SCRATCH_SLOTS, GroupLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBudget:
    """What one rank can hold.

    ``num_blocks`` fit into ``memory_bytes``; ``logical_bytes`` is what the planner is told;
    ``plain_blocks`` is what the same memory holds without KVPP.
    """

    memory_bytes: int
    num_blocks: int
    plain_blocks: int
    logical_bytes: int


def fitting_blocks(layout: GroupLayout, rank: int, memory_bytes: int) -> int:
    """Largest block count whose allocation on ``rank`` fits into ``memory_bytes``.

    Bisection, because alignment and the size of scratch make the allocation a step function of
    the blocks; in ``full`` mode without alignment the answer is
    ``memory // (owned + drafts + 2 x largest target bundle)``.
    """
    page_bytes = layout.rank_bytes(rank, 1)
    if page_bytes == 0:
        raise LayoutError(f"rank {rank} has no cache to allocate: the stage holds no layer")
    low, high = 0, 1
    while layout.rank_bytes(rank, high) <= memory_bytes:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high + 1) // 2
        if layout.rank_bytes(rank, middle) <= memory_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def plan_budget(
    layout: GroupLayout, rank: int, memory_bytes: int, planner_block_bytes: int
) -> RankBudget:
    """Turn a rank's KV memory into the logical budget for vLLM's planner.

    Args:
        memory_bytes: memory for KV caches on this rank.
        planner_block_bytes: bytes by which the planner divides the budget; with several cache
            groups this is not the sum of the page sizes.

    Raises:
        LayoutError: not a single block fits.
    """
    num_blocks = fitting_blocks(layout, rank, memory_bytes)
    if num_blocks < 1:
        raise LayoutError(
            f"KVPP: not one block fits on rank {rank}: {memory_bytes} bytes of KV memory, "
            f"{layout.rank_bytes(rank, 1)} bytes needed; give the KV cache more memory "
            "(--kv-cache-memory-bytes or --gpu-memory-utilization)"
        )
    return RankBudget(
        memory_bytes=memory_bytes,
        num_blocks=num_blocks,
        plain_blocks=memory_bytes // layout.stage.plain_page_bytes,
        logical_bytes=num_blocks * planner_block_bytes,
    )


def group_blocks(layout: GroupLayout, memory_bytes: int) -> int:
    """Blocks of the whole group, which the fullest rank sets, with the same memory on each rank.

    Raises:
        LayoutError: not a single block fits.
    """
    ranks: dict[tuple[int, ...], int] = {}  # those that own the same sizes are asked once
    for rank in range(layout.group_size):
        owned = tuple(
            component.page_bytes
            for bundle, owner in zip(layout.stage.targets, layout.owners, strict=True)
            if owner == rank
            for component in bundle.components
        )
        ranks.setdefault(owned, rank)
    return min(plan_budget(layout, rank, memory_bytes, 1).num_blocks for rank in ranks.values())


def capacity_ratio(
    num_layers: int, group_size: int, scratch_share: float = 1.0, draft_layers: int = 0
) -> float:
    """Capacity over plain for equal layers: ``(L + D) / (ceil(L/K) + D + 2f)``.

    ``capacity_by_bytes`` is the same for layers of any size.

    The two is the number of scratch slots per rank; ``scratch_share`` is f, a slot's blocks over
    all blocks: 1 in ``full`` mode. The D draft layers are on every rank.

    Example:
        >>> round(capacity_ratio(78, 8), 2), round(capacity_ratio(78, 8, 0.1), 2)
        (6.5, 7.65)
    """
    held = -(-num_layers // group_size) + draft_layers
    return (num_layers + draft_layers) / (held + NUM_SCRATCH_SLOTS * scratch_share)


def capacity_by_bytes(layouts: Sequence[GroupLayout], scratch_share: float) -> float:
    """Capacity over plain of all stages: all layers over the fullest rank's share and its scratch.

    For equal layers it is ``capacity_ratio``.
    """
    plain = max(layout.stage.plain_page_bytes for layout in layouts)
    return plain / max(layout.shared_block_bytes(scratch_share) for layout in layouts)
