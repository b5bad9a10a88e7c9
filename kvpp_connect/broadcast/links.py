"""What a rank has of each peer on the same machine: a connection, and memory to read from.

A link is a Unix socket. Receiving from it blocks in the kernel, the death of the peer ends it at
once, a silent peer runs into the time limit, and each of these is an error that names the peer. A
rank that gives up says why, so that all of its peers name the rank that failed first. Only short
messages travel here; bytes of the cache go through the mapped memory.

A message is one byte that says what it is about, and a label. Both sides may be owners, so
messages about either one's memory cross; each kind is received in its own order.
"""

import contextlib
import ctypes
import mmap
import socket
import struct
import time
from collections import deque

from kvpp_connect.errors import PeerError

READY = b"R"  # a chunk of the sender's memory is filled
DONE = b"D"  # the sender has read chunks of the receiver's memory
_GIVEN_UP = b"X"  # the sender's last message; the label is the reason
_MESSAGE_BYTES = 512


class Staging:
    """Bytes of one rank that its peers have mapped."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Map memory; the descriptor may be closed afterwards."""
        self._map = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


class Link:
    """The connection to one peer. Not thread-safe."""

    def __init__(
        self, rank: int, connection: socket.socket, staging: Staging, limit_s: float
    ) -> None:
        """Take over a connected socket.

        Args:
            rank: the peer's rank in the group.
            staging: the peer's memory.
            limit_s: seconds for which the peer may be silent.
        """
        self.staging = staging
        self.peer = f"rank {rank} of the KVPP group"
        self._limit_s = limit_s
        self._socket = connection
        self._waiting: dict[bytes, deque[bytes]] = {READY: deque(), DONE: deque()}
        limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
        connection.settimeout(None)  # the kernel counts: one call less for each message
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, kind: bytes, label: bytes) -> None:
        """Send one message.

        Raises:
            PeerError: the peer is gone, has given up, or reads nothing for too long.
        """
        try:
            self._socket.send(kind + label)
        except BlockingIOError:
            raise self._silent() from None
        except OSError:
            while self._take(0):  # up to the peer's reason, or the end of what it has sent
                pass
            raise self._silent() from None

    def answer(self, kind: bytes) -> None:
        """Send one message to a peer that may have left, having said all that it has to say."""
        with contextlib.suppress(OSError):
            self._socket.send(kind)

    def receive(self, kind: bytes, grace_s: float = 0.0) -> bytes:
        """Wait for the next message of a kind; returns its label.

        Args:
            grace_s: once the peer has been silent for too long, time in which it may still say
                that it gives up.

        Raises:
            PeerError: the peer is gone, has given up, or is silent for too long.
        """
        label = self._next(kind, 0)
        if label is None:
            time.sleep(grace_s)
            label = self._next(kind, socket.MSG_DONTWAIT)
        if label is None:
            raise self._silent()
        return label

    def poll(self, kind: bytes) -> bytes | None:
        """The label of the next message of a kind, if there is one.

        Raises:
            PeerError: the peer is gone or has given up.
        """
        return self._next(kind, socket.MSG_DONTWAIT)

    def close(self, reason: str = "") -> None:
        """Hang up. The peer learns the reason, if there is one, after all that was sent before."""
        if reason:
            with contextlib.suppress(OSError):
                message = _GIVEN_UP + reason.encode(errors="replace")[: _MESSAGE_BYTES - 1]
                self._socket.send(message, socket.MSG_DONTWAIT)
        self._socket.close()

    def _next(self, kind: bytes, flags: int) -> bytes | None:
        """The label of the next message of a kind; nothing if none comes while the flags wait."""
        if self._waiting[kind]:
            return self._waiting[kind].popleft()
        while message := self._take(flags):
            if message[:1] == kind:
                return message[1:]
            self._waiting[message[:1]].append(message[1:])
        return None

    def _take(self, flags: int) -> bytes:
        """The next message of any kind; empty if none comes while the flags wait."""
        try:
            message = self._read(flags)
        except BlockingIOError:
            return b""
        if not message:
            raise PeerError(f"{self.peer} is gone")
        if message[:1] == _GIVEN_UP:
            raise PeerError(message[1:].decode(errors="replace"))
        return message

    def _read(self, flags: int) -> bytes:
        try:
            return self._socket.recv(_MESSAGE_BYTES, flags)
        except ConnectionResetError:
            # Said once, where the peer left messages of ours unread. Its own can still be read.
            return self._socket.recv(_MESSAGE_BYTES, flags)

    def _silent(self) -> PeerError:
        return PeerError(f"{self.peer} has been silent for {self._limit_s:g} s")
