"""Broadcast between ranks that share a machine and have no accelerator.

Each rank has staging memory that its peers have mapped, a ring of chunks. The owner copies its
bytes in, chunk by chunk, and counts them; the peers copy a chunk out while the owner copies the
next one in, and count what they have read. No chunk is filled again before all of them have read
it. Small broadcasts fit into the ring, so their owner waits for nobody.

The owner is done when its last chunk is in the ring: its own bytes are not read any more. Chunks
that peers have not fetched yet stay there, and the owner may be ahead of them by as much as the
ring holds. No thread: copies run in ``start`` and ``wait``. Not thread-safe.

A counter is written after the bytes that it counts. That other ranks see the two in this order is
what x86-64 promises for plain stores; on other processors this transport is not used.

After an error the transport is dead, and says so to its peers.
"""

import ctypes
from collections.abc import Mapping

import torch

from kvpp_connect.broadcast.links import Link, Staging
from kvpp_connect.broadcast.meeting import Gather, connect_group
from kvpp_connect.errors import PeerError

# A chunk is large enough to hide its bell, the ring small enough to stay in the caches.
CHUNK_BYTES = 512 * 1024
CHUNKS = 8
CHUNKS_PER_RING = CHUNKS // 2  # an owner that had to sleep goes on with half a ring

# An owner that has waited for another peer for too long is about to say so.
_GRACE_S = 1.0

# Counters in a rank's staging memory; those that different ranks write are in lines of their own.
_FILLED = 0  # by the owner: chunks, ever
_LABELS = 8  # by the owner, for each chunk of the ring: number and bytes of its broadcast
_TAKEN, _LINE = 64, 8  # by each peer, a line for each rank: chunks that it has read, ever


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
        self._inboxes = {peer: _Inbox(rank, link) for peer, link in links.items()}
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
        mine = source_rank == self._rank
        box = self._outbox if mine else self._inboxes[source_rank]
        self._last = _Transfer(self, box, data, self._number)
        if mine:
            self._last.advance(block=False)
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

    __slots__ = ("_address", "_box", "_data", "_end", "_label", "_over", "_transport")

    def __init__(
        self,
        transport: SharedMemoryBroadcast,
        box: "_Outbox | _Inbox",
        data: torch.Tensor,
        number: int,
    ) -> None:
        assert data.is_cpu, "peers cannot reach the memory of a device"
        assert data.is_contiguous(), "bytes lie one after the other"
        size = data.numel()
        self._transport = transport
        self._box = box
        self._data = data  # kept alive
        self._label = (number, size)
        self._address = data.data_ptr()
        self._end = self._address + size
        self._over = False

    def wait(self) -> None:
        """See ``PendingBroadcast``."""
        if not self._over:
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
        self._words = staging.words
        self._slots = [staging.address + chunk * CHUNK_BYTES for chunk in range(CHUNKS)]
        self._links = [(link, _TAKEN + peer * _LINE) for peer, link in links.items()]
        self._filled = 0  # chunks, ever
        self._room = CHUNKS  # chunks to fill before looking how far the peers are

    def move(self, source: int, size: int, label: tuple[int, int], block: bool) -> bool:
        """Copy a chunk in and tell the peers; false if there is no room and ``block`` is off."""
        if not self._room and not self._make_room(block):
            return False
        words, slot = self._words, self._filled % CHUNKS
        ctypes.memmove(self._slots[slot], source, size)
        words[_LABELS + 2 * slot], words[_LABELS + 2 * slot + 1] = label
        self._filled += 1
        self._room -= 1
        words[_FILLED] = self._filled
        for link, _ in self._links:
            link.ring()
        return True

    def _make_room(self, block: bool) -> bool:
        words, full = self._words, self._filled - CHUNKS
        if block:
            for link, taken in self._links:
                if words[taken] == full:
                    link.wait(lambda taken=taken: words[taken] > full)
        self._room = min(words[taken] for _, taken in self._links) - full
        return self._room > 0


class _Inbox:
    """A peer's staging memory: filled there, read here."""

    def __init__(self, rank: int, link: Link) -> None:
        staging = link.staging
        self._link = link
        self._words = staging.words
        self._slots = [staging.address + chunk * CHUNK_BYTES for chunk in range(CHUNKS)]
        self._counter = _TAKEN + rank * _LINE
        self._taken = 0  # chunks, ever

    def move(self, target: int, size: int, label: tuple[int, int], block: bool) -> bool:
        """Wait for the next chunk, copy it out, and tell the owner."""
        assert block, "bytes are fetched when somebody waits for them"
        words, taken = self._words, self._taken
        if words[_FILLED] == taken:
            self._link.wait(lambda: words[_FILLED] > taken, _GRACE_S)
        slot = taken % CHUNKS
        arrived = words[_LABELS + 2 * slot], words[_LABELS + 2 * slot + 1]
        if arrived != label:
            raise PeerError(
                f"{self._link.peer} is out of step: it sends {_describe(arrived)}, expected "
                f"{_describe(label)}"
            )
        ctypes.memmove(target, self._slots[slot], size)
        self._taken = words[self._counter] = taken + 1
        if self._taken % CHUNKS_PER_RING == 0:
            self._link.ring()
        return True


def _describe(label: tuple[int, int]) -> str:
    number, total = label
    return f"broadcast {number} of {total} bytes"
