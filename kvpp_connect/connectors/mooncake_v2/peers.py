"""Connections to peers, each with a thread of its own, so a dead peer delays nobody else's work.

A connection is opened by the first job for its peer and closed by its thread when none came for a
while. Jobs for one peer run one after the other.
"""

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

PeerAddress = tuple[str, int]
"""Host and control port."""


class Connection(Protocol):
    """What a pool holds of a peer. Opened, used and closed by the peer's thread."""

    def close(self) -> None:
        """Free everything."""
        ...


_C = TypeVar("_C", bound=Connection)
_T = TypeVar("_T")

_Job = tuple[Callable[[Any], Any], "Future[Any]"]


@dataclass(slots=True, eq=False)
class _Peer:
    address: PeerAddress
    # ``None`` ends the thread.
    jobs: "queue.SimpleQueue[_Job | None]" = field(default_factory=queue.SimpleQueue)
    # Jobs queued or running; guarded by the pool's lock.
    pending: int = 0
    thread: threading.Thread = field(default_factory=threading.Thread)


class PeerPool(Generic[_C]):
    """Runs jobs on connections to peers. Thread-safe.

    Args:
        open_connection: makes the connection to a host and port, in the peer's thread.
        name: prefix of the threads' names.
        idle_s: seconds without a job after which a connection is closed.
        max_peers: connections beyond which idle ones are closed at once, the least recently used
            first. Busy ones are never closed, so more peers than this can be served at a time.
    """

    def __init__(
        self,
        open_connection: Callable[[str, int], _C],
        *,
        name: str,
        idle_s: float = 180.0,
        max_peers: int = 64,
    ) -> None:
        self._open = open_connection
        self._name = name
        self._idle_s = idle_s
        self._max_peers = max_peers
        self._lock = threading.Lock()
        self._closed = False
        # By last use, the most recent last.
        self._peers: OrderedDict[PeerAddress, _Peer] = OrderedDict()

    def submit(self, address: PeerAddress, job: Callable[[_C], _T]) -> "Future[_T]":
        """Queue a job for a peer; returns at once.

        The future carries the job's outcome, or what opening the connection raised; it is cancelled
        if the pool is closed.
        """
        future: Future[_T] = Future()
        with self._lock:
            if self._closed:
                future.cancel()
                return future
            peer = self._peers.get(address) or self._start(address)
            self._peers.move_to_end(address)
            peer.pending += 1
            peer.jobs.put((job, future))
        return future

    def open_peers(self) -> int:
        """Number of connections."""
        with self._lock:
            return len(self._peers)

    def close(self, *, finish_queued: bool, timeout_s: float) -> None:
        """Take no more jobs and end the threads.

        Args:
            finish_queued: run what is queued first, else cancel it. A running job always ends.
            timeout_s: seconds to wait for the threads, in all.
        """
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
        for peer in peers:
            while not finish_queued:
                try:
                    entry = peer.jobs.get_nowait()
                except queue.Empty:
                    break
                if entry is not None:
                    entry[1].cancel()
            peer.jobs.put(None)
        deadline = time.monotonic() + timeout_s
        for peer in peers:
            peer.thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self, address: PeerAddress) -> _Peer:
        self._make_room()
        peer = _Peer(address)
        name = f"{self._name}-{address[0]}:{address[1]}"
        peer.thread = threading.Thread(target=self._work, args=(peer,), name=name, daemon=True)
        peer.thread.start()
        self._peers[address] = peer
        return peer

    def _make_room(self) -> None:
        idle = [peer for peer in self._peers.values() if not peer.pending]
        for peer in idle[: max(0, len(self._peers) + 1 - self._max_peers)]:
            del self._peers[peer.address]
            peer.jobs.put(None)

    def _work(self, peer: _Peer) -> None:
        connection: _C | None = None
        while (entry := self._next(peer)) is not None:
            job, future = entry
            if future.set_running_or_notify_cancel():
                try:
                    connection = connection or self._open(*peer.address)
                    future.set_result(job(connection))
                except BaseException as error:  # noqa: BLE001 - the future carries it
                    future.set_exception(error)
            with self._lock:
                peer.pending -= 1
        if connection is not None:
            connection.close()

    def _next(self, peer: _Peer) -> _Job | None:
        """The peer's next job, or ``None`` where its thread is to end."""
        while True:
            try:
                return peer.jobs.get(timeout=self._idle_s)
            except queue.Empty:
                with self._lock:
                    # A job may have come between the time-out and the lock.
                    if not peer.pending:
                        if self._peers.get(peer.address) is peer:
                            del self._peers[peer.address]
                        return None
