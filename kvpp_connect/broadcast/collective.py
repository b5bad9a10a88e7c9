"""Moving bytes from one rank of the KVPP group to all others.

Transports know nothing about layers: they broadcast one contiguous byte tensor.

Where the device has streams, a transport that works on streams orders the stream that is current
at ``start`` before and after the broadcast, and the host never waits. Every other transport makes
the host wait, in ``PendingBroadcast.wait``. Callers do the same for both.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from kvpp_connect.broadcast.pages import PageGather
from kvpp_connect.errors import PeerError

STREAM_BACKENDS = frozenset({"nccl", "hccl"})


class PendingBroadcast(Protocol):
    """A broadcast under way."""

    def wait(self) -> None:
        """Return when work that is ordered after ``start`` may read and write the local bytes.

        Returns at once where streams order that; blocks the host elsewhere.

        Raises:
            PeerError: a peer died or the time limit passed; the group is unusable from then on.
        """
        ...


class GroupBroadcast(Protocol):
    """Broadcast inside one KVPP group. Every rank must start the same broadcasts in one order.

    Several may be under way; they are waited for in the order of their starts.
    """

    def start(
        self, data: torch.Tensor, source_rank: int, gather: PageGather | None = None
    ) -> PendingBroadcast:
        """Send ``data`` from ``source_rank`` (rank in group), or receive into it elsewhere.

        Args:
            data: contiguous one-dimensional byte tensor, untouched until the wait returns.
            gather: on the source, where the bytes have yet to be collected from. The transport
                may collect them in ``data``, or send them without.

        Raises:
            PeerError: the broadcast cannot start; the group is unusable from then on.
        """
        ...


class _TorchPending:
    def __init__(self, work: dist.Work, source_rank: int) -> None:
        self._work = work
        self._source_rank = source_rank

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerError(
                f"broadcast from rank {self._source_rank} of the KVPP group failed: {error}"
            ) from error


class TorchBroadcast:
    """Collective of ``torch.distributed`` (gloo on CPU) on a group of its own."""

    def __init__(self, group: dist.ProcessGroup, global_ranks: tuple[int, ...]) -> None:
        self._group = group
        self._global_ranks = global_ranks

    def start(
        self, data: torch.Tensor, source_rank: int, gather: PageGather | None = None
    ) -> PendingBroadcast:
        if gather is not None:
            gather.into(data)
        try:
            work = dist.broadcast(
                data, src=self._global_ranks[source_rank], group=self._group, async_op=True
            )
        except RuntimeError as error:
            raise PeerError(
                f"broadcast from rank {source_rank} of the KVPP group cannot start: {error}"
            ) from error
        assert work is not None, "this process is not a member of its own KVPP group"
        return _TorchPending(work, source_rank)


class _Arrived:
    def wait(self) -> None:
        return


class StreamOrdered:
    """A transport whose wait makes the current stream wait, and not the host (NCCL, HCCL).

    It is called where the broadcast starts, so that all that the current stream is given later
    runs after the broadcast.
    """

    def __init__(self, transport: GroupBroadcast) -> None:
        self._transport = transport
        self._arrived = _Arrived()

    def start(
        self, data: torch.Tensor, source_rank: int, gather: PageGather | None = None
    ) -> PendingBroadcast:
        self._transport.start(data, source_rank, gather).wait()
        return self._arrived


def create_group_broadcast(
    groups: tuple[tuple[int, ...], ...],
    backend: str,
    timeout_s: float,
    make_options: Callable[[timedelta], Any] | None = None,
) -> GroupBroadcast:
    """Create the process group of every KVPP group and return this process's transport.

    ``new_group`` is collective over the world: every process must create every group, in the
    same order, or start-up hangs.

    Args:
        groups: global ranks of every KVPP group of the world, the same tuple on every process.
        backend: ``torch.distributed`` backend.
        timeout_s: seconds after which a broadcast without progress fails.
        make_options: makes the backend's options of one group from its time limit.
    """
    mine: TorchBroadcast | None = None
    timeout = timedelta(seconds=timeout_s)
    for ranks in groups:
        options = make_options(timeout) if make_options else None
        group = dist.new_group(list(ranks), backend=backend, timeout=timeout, pg_options=options)
        if isinstance(group, dist.ProcessGroup) and dist.get_rank() in ranks:
            mine = TorchBroadcast(group, ranks)
    assert mine is not None, f"rank {dist.get_rank()} is in none of the KVPP groups {groups}"
    return StreamOrdered(mine) if backend in STREAM_BACKENDS else mine
