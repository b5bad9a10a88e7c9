"""What all stores do around their native clients: check memory, and keep calls off a closed client.

Native clients crash the process when they are called after their close, and over TCP take memory
that was never registered, which other transports refuse.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvpp_connect.connectors.ascend_store.backends.base import Buffer, StoreError

_CLOSE_WAIT_S = 10.0


class ClientGuard:
    """Gate in front of one native client. Safe to use from several threads."""

    def __init__(self, store: str) -> None:
        """Open the gate; ``store`` names the client in messages."""
        self._store = store
        self._changed = threading.Condition()
        self._running = 0
        self._closed = False
        self._memory: tuple[Buffer, ...] = ()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Hold the client open during a call.

        Raises:
            StoreError: the client is closed.
        """
        with self._changed:
            if self._closed:
                raise StoreError(f"{self._store} is closed")
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def shut(self, wait_s: float = _CLOSE_WAIT_S) -> bool:
        """Refuse further calls, and wait ``wait_s`` seconds at most for those that run.

        Returns:
            Whether the native client is to be closed: no call uses it, and nobody closed it.
        """
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            return self._changed.wait_for(lambda: self._running == 0, wait_s)

    def registered(self, memory: Buffer) -> None:
        """Remember that the client knows ``memory``."""
        self._memory = (*self._memory, memory)

    def check(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> None:
        """Hold a call's arguments against each other and against the registered memory."""
        assert len(keys) == len(buffers), f"{len(keys)} keys for {len(buffers)} buffers"
        for buffer in buffers:
            inside = any(
                known.address <= buffer.address
                and buffer.address + buffer.size <= known.address + known.size
                for known in self._memory
            )
            assert inside, f"{buffer} is not within the memory registered with {self._store}"
            assert buffer.size > 0, f"{buffer} is empty"
