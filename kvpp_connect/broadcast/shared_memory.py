"""Broadcast between ranks that share a machine and have no accelerator.

Each rank has staging memory that its peers have mapped, a ring of chunks. The owner copies its
bytes in, chunk by chunk, and says so to every peer; the peers copy a chunk out while the owner
copies the next one in. Now and then they say how far they are, and no chunk is filled again before
all of them have read it. Small broadcasts fit into the ring, so their owner waits for nobody.

The owner is done when its last chunk is in the ring: its own bytes are not read any more. Chunks
that peers have not fetched yet stay there, and the owner may be ahead of them by as much as the
ring holds. Who waits, waits in the kernel for a message. No thread: copies run in ``start`` and
``wait``. Not thread-safe.

After an error the transport is dead, and says so to its peers.
"""

import ctypes
import struct
from collections.abc import Mapping

import torch

from kvpp_connect.broadcast.links import DONE, READY, Link, Staging
from kvpp_connect.broadcast.meeting import Gather, connect_group
from kvpp_connect.errors import PeerError

# A chunk is large enough to hide its message, the ring small enough to stay in the caches.
CHUNK_BYTES = 512 * 1024
CHUNKS = 8
CHUNKS_PER_DONE = CHUNKS // 2  # an owner that had to sleep goes on with half a ring

# An owner that has waited for another peer for too long is about to say so.
_GRACE_S = 1.0

# Of a chunk that is ready: number and bytes of its broadcast.
_LABEL = struct.Struct("<QQ")


class SharedMemoryBroadcast:
    """``GroupBroadcast`` through shared memory."""

    def __init__(self, rank: int, staging: Staging, links: Mapping[int, Link]) -> None:
        """Take over what ``connect_group`` returned.

        Args:
            rank: this process's rank in the group.
            staging: this rank's memory, ``CHUNKS * CHUNK_BYTES``.
            links: the links by the peers' ranks.
        """
        self._rank = rank
        self._links = links
        self._outbox = _Outbox(staging, links)
        self._inboxes = {peer: _Inbox(link) for peer, link in links.items()}
        self._number = 0
        self._last: _Transfer | None = None
        self._failure = ""

    @classmethod
    def connect(cls, rank: int, gather: Gather, timeout_s: float) -> "SharedMemoryBroadcast":
        """Meet the other ranks of the group. Collective.

        Args:
            rank: this process's rank in the group.
            gather: exchanges bytes inside the group; the answer is ordered by rank.
            timeout_s: seconds after which a broadcast without progress fails.

        Raises:
            NotOneMachineError: on all ranks, if they do not share a machine.
            PeerError: a rank died.
        """
        return cls(rank, *connect_group(rank, gather, CHUNKS * CHUNK_BYTES, timeout_s))

    def start(self, data: torch.Tensor, source_rank: int) -> "_Transfer":
        """See ``GroupBroadcast``. Completes the broadcast before, if nobody has waited for it."""
        if self._last is not None:
            self._last.wait()
        self.check()
        self._number += 1
        label = _LABEL.pack(self._number, data.numel())
        if source_rank == self._rank:
            self._last = _Transfer(self, self._outbox, data, label)
            self._last.advance(block=False)
        else:
            self._last = _Transfer(self, self._inboxes[source_rank], data, label)
        return self._last

    def check(self) -> None:
        """Raise what went wrong, if something did."""
        if self._failure:
            raise PeerError(self._failure)

    def give_up(self, reason: str) -> None:
        """End all broadcasts, here and on the peers."""
        if not self._failure:
            self._failure = reason
            for link in self._links.values():
                link.close(reason)

    def close(self) -> None:
        """Hang up; may be called again. The peers notice when they wait for this rank."""
        self._failure = self._failure or "the transport is closed"
        for link in self._links.values():
            link.close()


class _Transfer:
    """One broadcast on one rank: its bytes go through a box, chunk by chunk."""

    def __init__(
        self,
        transport: SharedMemoryBroadcast,
        box: "_Outbox | _Inbox",
        data: torch.Tensor,
        label: bytes,
    ) -> None:
        assert data.is_cpu, "peers cannot reach the memory of a device"
        assert data.is_contiguous(), "bytes lie one after the other"
        self._transport = transport
        self._box = box
        self._data = data  # kept alive
        self._label = label
        self._address = data.data_ptr()
        self._end = self._address + data.numel()
        self._over = False

    def wait(self) -> None:
        """See ``PendingBroadcast``."""
        self.advance(block=True)

    def advance(self, *, block: bool) -> None:
        """Move chunks: all that are left, or as many as go without waiting.

        Raises:
            PeerError: as ``wait``.
        """
        while not self._over:
            size = min(CHUNK_BYTES, self._end - self._address)
            self._transport.check()
            try:
                if not self._box.move(self._address, size, self._label, block):
                    return
            except PeerError as error:
                self._transport.give_up(str(error))
                raise
            self._address += size
            self._over = self._address == self._end


class _Outbox:
    """This rank's staging memory: filled here, read by all peers."""

    def __init__(self, staging: Staging, links: Mapping[int, Link]) -> None:
        self._staging = staging
        self._links = tuple(links.values())
        self._filled = 0  # chunks, ever
        self._freed = [0] * len(links)  # chunks that each peer is known to have read, ever

    def move(self, source: int, size: int, label: bytes, block: bool) -> bool:
        """Copy a chunk in and tell the peers; false if there is no room and ``block`` is off."""
        if self._filled - min(self._freed) == CHUNKS and not self._make_room(block):
            return False
        address = self._staging.address + self._filled % CHUNKS * CHUNK_BYTES
        ctypes.memmove(address, source, size)
        self._filled += 1
        for link in self._links:
            link.send(READY, label)
        return True

    def _make_room(self, block: bool) -> bool:
        for peer, link in enumerate(self._links):
            while self._filled - self._freed[peer] == CHUNKS:
                if block:
                    link.receive(DONE)
                elif link.poll(DONE) is None:
                    return False
                self._freed[peer] += CHUNKS_PER_DONE
        return True


class _Inbox:
    """A peer's staging memory: filled there, read here."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._taken = 0  # chunks, ever

    def move(self, target: int, size: int, label: bytes, block: bool) -> bool:
        """Wait for the next chunk, copy it out, and tell the owner now and then."""
        assert block, "bytes are fetched when somebody waits for them"
        arrived = self._link.receive(READY, _GRACE_S)
        if arrived != label:
            raise PeerError(
                f"{self._link.peer} is out of step: it sends {_describe(arrived)}, expected "
                f"{_describe(label)}"
            )
        address = self._link.staging.address + self._taken % CHUNKS * CHUNK_BYTES
        ctypes.memmove(target, address, size)
        self._taken += 1
        if self._taken % CHUNKS_PER_DONE == 0:
            self._link.answer(DONE)
        return True


def _describe(label: bytes) -> str:
    number, total = _LABEL.unpack(label)
    return f"broadcast {number} of {total} bytes"
