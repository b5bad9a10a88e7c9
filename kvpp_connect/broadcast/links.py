"""What a rank has of each peer on the same machine: memory in common, a bell, and a connection.

Ranks tell each other how far they are by counters in their memory. Who needs more than a counter
says looks at it for a moment, then sleeps until its bell (an eventfd) is rung: a counter is written
before the bell is rung, and read again after the bell was heard, so no ring is lost. The connection
is a Unix socket on which nothing is said but the last words of a rank that gives up. It wakes the
sleeper as well, when there are such words and when the peer is dead. A peer that lives and does
nothing runs into the time limit. Each of these is an error that names the peer; a rank that gives
up says why, so that all of its peers name the rank that failed first.
"""

import contextlib
import ctypes
import math
import mmap
import os
import select
import socket
import time
from collections.abc import Callable

from kvpp_connect.errors import PeerError

# Time for which a rank looks at a counter: more than another rank needs for a chunk, less than it
# costs to put a core to sleep and to wake it up.
SPIN_S = 50e-6

COUNTERS_BYTES = 64 * 1024  # a cache line for each rank of a machine
_WORD_BYTES = 8
_MESSAGE_BYTES = 512


class Staging:
    """Memory of one rank that its peers have mapped: counters, then bytes.

    ``words`` are the counters, ``bytes`` what follows, beginning at ``address``.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        """Map memory; the descriptor may be closed afterwards.

        Args:
            size: of the bytes.
        """
        whole = COUNTERS_BYTES + size
        self._map = mmap.mmap(descriptor, whole, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.words = memoryview(self._map)[:COUNTERS_BYTES].cast("Q")
        self.bytes = memoryview(self._map)[COUNTERS_BYTES:]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + COUNTERS_BYTES


class Bell:
    """What a rank sleeps by. Anybody who has its descriptor can ring it."""

    def __init__(self, descriptor: int) -> None:
        """Take over an eventfd; closes it in the end."""
        self.descriptor = descriptor

    @classmethod
    def make(cls) -> "Bell":
        """A bell that nobody has rung."""
        return cls(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def ring(self) -> None:
        """Wake the rank that sleeps by it, or the next time it wants to sleep."""
        os.eventfd_write(self.descriptor, 1)

    def quiet(self) -> None:
        """Forget the rings so far."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Give the descriptor back; may be called again."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Link:
    """The connection to one peer. Not thread-safe."""

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        staging: Staging,
        bells: tuple[Bell, Bell],
        limit_s: float,
        spin_s: float = 0.0,
    ) -> None:
        """Take over a connected socket, and the peer's bell.

        Args:
            rank: the peer's rank in the group.
            staging: the peer's memory.
            bells: this rank's, which all of its links share, and the peer's.
            limit_s: seconds for which the peer may be silent.
            spin_s: seconds for which to look before sleeping; 0 where ranks outnumber cores, or
                the one that looks keeps the other one from working.
        """
        self.staging = staging
        self.peer = f"rank {rank} of the KVPP group"
        self._socket = connection
        self._bell, self._peer_bell = bells
        self._limit_s = limit_s
        self._spin_s = spin_s
        self._last_words = ""
        connection.setblocking(False)
        self._sleeper = select.poll()
        for descriptor in (self._bell.descriptor, connection.fileno()):
            self._sleeper.register(descriptor, select.POLLIN)

    def ring(self) -> None:
        """Tell the peer that a counter has changed, whether it sleeps, works or is dead."""
        self._peer_bell.ring()

    def wait(self, arrived: Callable[[], bool], grace_s: float = 0.0) -> None:
        """Return when ``arrived``, which reads counters that the peer writes, says true.

        Args:
            grace_s: once the peer has been silent for too long, time in which it may still say
                that it gives up.

        Raises:
            PeerError: the peer is gone, has given up, or is silent for too long.
        """
        now = time.monotonic()
        enough, deadline = now + self._spin_s, now + self._limit_s
        while now < enough:
            if arrived():
                return
            now = time.monotonic()
        while not arrived():
            if not self._sleep(deadline):
                time.sleep(grace_s)
            self._hear()
            if arrived():
                return
            if self._last_words:
                raise PeerError(self._last_words)
            if time.monotonic() >= deadline:
                raise PeerError(f"{self.peer} has been silent for {self._limit_s:g} s")

    def close(self, reason: str = "") -> None:
        """Hang up, as all links of a rank do together. The peer learns the reason, if there is one.

        May be called again.
        """
        if reason:
            with contextlib.suppress(OSError):
                self._socket.send(reason.encode(errors="replace")[:_MESSAGE_BYTES])
        self._socket.close()
        self._bell.close()
        self._peer_bell.close()

    def _sleep(self, deadline: float) -> bool:
        """Until somebody rings, the peer speaks or dies; false if the deadline passes."""
        remaining_ms = math.ceil(max(deadline - time.monotonic(), 0) * 1000)
        awake = bool(self._sleeper.poll(remaining_ms))
        self._bell.quiet()
        return awake

    def _hear(self) -> None:
        """Keep why the peer is no more, if it is."""
        if not self._last_words:
            with contextlib.suppress(BlockingIOError):
                words = self._read().decode(errors="replace")
                self._last_words = words or f"{self.peer} is gone"

    def _read(self) -> bytes:
        try:
            return self._socket.recv(_MESSAGE_BYTES)
        except ConnectionResetError:
            # Said once, where the peer left last words of ours unread. Its own can still be read.
            return self._socket.recv(_MESSAGE_BYTES)
