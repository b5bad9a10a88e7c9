"""What measurements between local ranks have in common: both transports, and times of rounds."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist

from kvpp_connect.broadcast.collective import GroupBroadcast
from kvpp_connect.broadcast.transports import create_transport
from kvpp_connect.platforms.base import Platform, select_platform

TransportName = Literal["collective", "shared_memory"]
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Seconds of one copy, broadcast or step: median, least and most of all rounds."""

    median_s: float
    least_s: float
    most_s: float


def spread(times_s: list[float]) -> Spread:
    """Sum up the rounds."""
    return Spread(median_s=statistics.median(times_s), least_s=min(times_s), most_s=max(times_s))


def make_transports(platform: Platform | None = None) -> dict[TransportName, GroupBroadcast]:
    """One transport of each kind between all ranks. Collective.

    Args:
        platform: of the ranks' memory; default: the CPU. Others have the collective only.
    """
    platform = platform or select_platform("cpu")
    names: tuple[TransportName, ...] = get_args(TransportName)
    ranks = tuple(range(dist.get_world_size()))
    return {
        name: create_transport(name, platform, (ranks,), _gather, _TIMEOUT_S)
        for name in names
        if name == "collective" or platform.name == "cpu"
    }


def _nothing() -> None:
    """Work on a CPU is done when the call returns."""


def timed(
    work: Callable[[], None],
    number: int = 1,
    *,
    alone: bool = False,
    finish: Callable[[], None] = _nothing,
) -> float:
    """Seconds of one of ``number`` things, until the last rank has done them. Collective.

    Args:
        alone: rank 0 works and the others wait.
        finish: waits for a device that works behind the host.
    """
    finish()
    dist.barrier()
    begin = time.perf_counter()
    if not alone or dist.get_rank() == 0:
        work()
        finish()
    taken = torch.tensor([(time.perf_counter() - begin) / number])
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()


def _gather(value: bytes) -> list[bytes]:
    rows = [b""] * dist.get_world_size()
    dist.all_gather_object(rows, value)
    return rows
