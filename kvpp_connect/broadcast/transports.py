"""Choosing how broadcasts travel."""

from platform import machine

import torch.distributed as dist

from kvpp_connect._log import get_logger
from kvpp_connect.broadcast.collective import GroupBroadcast, create_group_broadcast
from kvpp_connect.broadcast.meeting import Gather, NotOneMachineError
from kvpp_connect.broadcast.shared_memory import SharedMemoryBroadcast
from kvpp_connect.config import Transport
from kvpp_connect.errors import ConfigError
from kvpp_connect.platforms.base import Platform

logger = get_logger(__name__)

_ORDERED_MACHINES = ("x86_64",)  # see shared_memory.py


def create_transport(
    wanted: Transport,
    platform: Platform,
    groups: tuple[tuple[int, ...], ...],
    gather: Gather,
    timeout_s: float,
) -> GroupBroadcast:
    """Create this process's transport. Collective over the world.

    Args:
        wanted: the user's choice; ``auto`` is shared memory for ranks on one machine without an
            accelerator, and the collective for all others.
        groups: global ranks of every KVPP group of the world, the same tuple on every process.
        gather: exchanges bytes inside this process's group, ordered by rank in group.
        timeout_s: seconds after which a broadcast without progress fails.

    Raises:
        ConfigError: shared memory is wanted and cannot work here.
        PeerError: a rank died.
    """
    backend = platform.collective_backend
    # Created always: it is collective over the world, and not every group may share a machine.
    collective = create_group_broadcast(groups, backend, timeout_s, platform.create_group_options)
    ranks = next(ranks for ranks in groups if dist.get_rank() in ranks)
    rank = ranks.index(dist.get_rank())
    chosen: GroupBroadcast = collective
    text, reason = f"{backend} collective", "" if wanted == "collective" else _unfit(platform)
    if wanted != "collective" and not reason:
        try:
            chosen = SharedMemoryBroadcast.connect(rank, gather, timeout_s)
            text = "shared memory"
        except NotOneMachineError as error:
            reason = str(error)
    if reason and wanted == "shared_memory":
        raise ConfigError(
            f'additional_config.kvpp.transport is "shared_memory", but {reason}. Use "auto"'
        )
    if rank == 0:
        because = f" (not shared memory: {reason})" if reason else ""
        logger.info("KVPP transport: %s between %d ranks%s", text, len(ranks), because)
    return chosen


def _unfit(platform: Platform) -> str:
    """Why ranks cannot use shared memory here; empty if they can."""
    if platform.name != "cpu":
        return f"the caches are in the memory of a {platform.name}"
    if machine() not in _ORDERED_MACHINES:
        return f"a {machine()} may show other ranks a counter before the bytes that it counts"
    return ""
