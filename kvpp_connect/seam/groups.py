"""The KVPP group of this process: the TP x PCP ranks of one DP replica and one PP stage."""

from dataclasses import dataclass

import torch.distributed as dist
from vllm.distributed.parallel_state import (
    get_dcp_group,
    get_pcp_group,
    get_pp_group,
    get_tp_group,
)

from kvpp_connect.layout import TokenShard


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """This process's place. ``rank_in_group`` is ``pcp_rank * tp_size + tp_rank``."""

    pp_rank: int
    rank_in_group: int
    group_size: int


def group_info() -> GroupInfo:
    """Place of this process in its KVPP group and pipeline."""
    tp, pcp = get_tp_group(), get_pcp_group()
    return GroupInfo(
        pp_rank=get_pp_group().rank_in_group,
        rank_in_group=pcp.rank_in_group * tp.world_size + tp.rank_in_group,
        group_size=tp.world_size * pcp.world_size,
    )


def token_shard(interleave_tokens: int) -> TokenShard:
    """Which tokens this process keeps in its caches under decode context parallelism."""
    group = get_dcp_group()
    return TokenShard(
        index=group.rank_in_group, count=group.world_size, interleave_tokens=interleave_tokens
    )


def world_groups(group_size: int) -> tuple[tuple[int, ...], ...]:
    """Global ranks of every KVPP group of the world.

    vLLM numbers ranks as external DP x DP x PP x PCP x TP, so each group is a run of neighbours.
    """
    world_size = dist.get_world_size()
    return tuple(
        tuple(range(start, start + group_size)) for start in range(0, world_size, group_size)
    )


def gather_in_group(value: bytes) -> list[bytes]:
    """Exchange bytes inside the KVPP group, over the CPU; ordered by rank in group.

    Collective: every rank of the group has to call it.
    """
    rows: list[bytes] = [b""] * get_tp_group().world_size
    dist.all_gather_object(rows, value, group=get_tp_group().cpu_group)
    if get_pcp_group().world_size == 1:
        return rows
    table: list[list[bytes]] = [[]] * get_pcp_group().world_size
    dist.all_gather_object(table, rows, group=get_pcp_group().cpu_group)
    return [value for row in table for value in row]
