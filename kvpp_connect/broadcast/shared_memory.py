"""Broadcast between ranks that share a machine and have no accelerator.

Each rank has staging memory that its peers have mapped, a ring of chunks. The owner copies its
bytes in, chunk by chunk, or gathers them there, and counts the chunks; the peers copy a chunk out
while the owner fills the next one, and count what they have read. No chunk is filled again before
all of them have read it. Small broadcasts fit into the ring, so their owner waits for nobody.

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
from kvpp_connect.broadcast.pages import PageGather
from kvpp_connect.errors import PeerError

# A chunk is large enough to hide its bell, the ring small enough to stay in the caches.
CHUNK_BYTES = 512 * 1024
CHUNKS = 8
CHUNKS_PER_RING = CHUNKS // 2  # an owner that had to sleep goes on with half a ring

# An owner that has waited for another peer for too long is about to say so.
_GRACE_S = 1.0

# Counters in a rank's staging memory; those that different ranks write are in lines of their own.
_FILLED = 0  # by the owner: chunks, ever
_LABELS, _LABEL = 8, 4  # by the owner, for each chunk: broadcast's number and bytes, its own bytes
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
        self._last: _Sending | _Receiving | None = None
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

    def start(
        self, data: torch.Tensor, source_rank: int, gather: PageGather | None = None
    ) -> "_Sending | _Receiving":
        """See ``GroupBroadcast``. Completes the broadcast before, if nobody has waited for it."""
        if self._last is not None:
            self._last.wait()
        self.check()
        self._number += 1
        if source_rank == self._rank:
            self._last = _Sending(self, self._outbox, data, gather, self._number)
            self._last.advance(block=False)
        else:
            self._last = _Receiving(self, self._inboxes[source_rank], data, self._number)
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


class _Sending:
    """One broadcast on its owner: its bytes go into the ring, chunk by chunk."""

    __slots__ = ("_address", "_box", "_data", "_end", "_label", "_over", "_runs", "_transport")

    def __init__(
        self,
        transport: SharedMemoryBroadcast,
        box: "_Outbox",
        data: torch.Tensor,
        gather: PageGather | None,
        number: int,
    ) -> None:
        if gather is not None and not gather.fits(CHUNK_BYTES):
            gather.into(data)
            gather = None
        self._transport = transport
        self._box = box
        self._data = data  # kept alive
        self._address, self._end = _bounds(data)
        self._label = (number, self._end - self._address)
        self._runs = gather.runs(CHUNK_BYTES) if gather is not None else None
        self._over = False

    def wait(self) -> None:
        """See ``PendingBroadcast``."""
        if not self._over:
            self.advance(block=True)

    def advance(self, *, block: bool) -> None:
        """Fill chunks: all that are left, or as many as go without waiting.

        Raises:
            PeerError: as ``wait``.
        """
        transport, box = self._transport, self._box
        while not self._over:
            transport.check()
            try:
                if not box.has_room(block):
                    return
            except PeerError as error:
                transport.give_up(str(error))
                raise
            size = self._fill(box)
            box.publish(self._label, size)
            self._address += size
            self._over = self._address == self._end

    def _fill(self, box: "_Outbox") -> int:
        """Put the next bytes into the free chunk; returns how many."""
        run = next(self._runs, None) if self._runs is not None else None
        if run is not None:
            run.write_to(box.chunk)
            return run.size
        size = min(CHUNK_BYTES, self._end - self._address)
        ctypes.memmove(box.address, self._address, size)
        return size


class _Receiving:
    """One broadcast on a peer: its bytes come out of the owner's ring, chunk by chunk."""

    __slots__ = ("_address", "_box", "_data", "_end", "_label", "_over", "_transport")

    def __init__(
        self, transport: SharedMemoryBroadcast, box: "_Inbox", data: torch.Tensor, number: int
    ) -> None:
        self._transport = transport
        self._box = box
        self._data = data  # kept alive
        self._address, self._end = _bounds(data)
        self._label = (number, self._end - self._address)
        self._over = False

    def wait(self) -> None:
        """See ``PendingBroadcast``."""
        while not self._over:
            self._transport.check()
            try:
                self._address += self._box.take(self._address, self._end, self._label)
            except PeerError as error:
                self._transport.give_up(str(error))
                raise
            self._over = self._address == self._end


def _bounds(data: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte, and of the one after the last."""
    assert data.is_cpu, "peers cannot reach the memory of a device"
    assert data.is_contiguous(), "bytes lie one after the other"
    address = data.data_ptr()
    return address, address + data.numel()


class _Outbox:
    """This rank's staging memory: filled here, read by all peers."""

    def __init__(self, staging: Staging, links: Mapping[int, Link]) -> None:
        self._words = staging.words
        self._first_address = staging.address
        self._chunks = torch.frombuffer(staging.bytes, dtype=torch.uint8).split(CHUNK_BYTES)
        self._links = [(link, _TAKEN + peer * _LINE) for peer, link in links.items()]
        self._filled = 0  # chunks, ever
        self._room = CHUNKS  # chunks to fill before looking how far the peers are

    @property
    def chunk(self) -> torch.Tensor:
        """The free chunk that comes next."""
        return self._chunks[self._filled % CHUNKS]

    @property
    def address(self) -> int:
        """Where it begins."""
        return self._first_address + self._filled % CHUNKS * CHUNK_BYTES

    def has_room(self, block: bool) -> bool:
        """Whether there is a free chunk; with ``block``, once there is one."""
        if self._room:
            return True
        words, full = self._words, self._filled - CHUNKS
        if block:
            for link, taken in self._links:
                if words[taken] == full:
                    link.wait(lambda taken=taken: words[taken] > full)
        self._room = min(words[taken] for _, taken in self._links) - full
        return self._room > 0

    def publish(self, label: tuple[int, int], size: int) -> None:
        """Count the chunk, which has been filled with so many bytes, and tell the peers."""
        words, first = self._words, _LABELS + self._filled % CHUNKS * _LABEL
        words[first], words[first + 1] = label
        words[first + 2] = size
        self._filled += 1
        self._room -= 1
        words[_FILLED] = self._filled
        for link, _ in self._links:
            link.ring()


class _Inbox:
    """A peer's staging memory: filled there, read here."""

    def __init__(self, rank: int, link: Link) -> None:
        self._link = link
        self._words = link.staging.words
        self._first_address = link.staging.address
        self._counter = _TAKEN + rank * _LINE
        self._taken = 0  # chunks, ever

    def take(self, target: int, end: int, label: tuple[int, int]) -> int:
        """Wait for the next chunk and copy it to ``target``; returns its bytes.

        Raises:
            PeerError: the owner is gone, has given up, is silent, or sends something else.
        """
        words, taken = self._words, self._taken
        if words[_FILLED] == taken:
            self._link.wait(lambda: words[_FILLED] > taken, _GRACE_S)
        first = _LABELS + taken % CHUNKS * _LABEL
        arrived, size = (words[first], words[first + 1]), words[first + 2]
        if arrived != label:
            raise PeerError(
                f"{self._link.peer} is out of step: it sends {_describe(arrived)}, expected "
                f"{_describe(label)}"
            )
        assert size <= end - target, "an owner sends as many bytes as its label says"
        ctypes.memmove(target, self._first_address + taken % CHUNKS * CHUNK_BYTES, size)
        self._taken = words[self._counter] = taken + 1
        if self._taken % CHUNKS_PER_RING == 0:
            self._link.ring()
        return size


def _describe(label: tuple[int, int]) -> str:
    number, total = label
    return f"broadcast {number} of {total} bytes"
