"""Gives leases back to producers in the background, with bounded retries."""

import queue
import threading

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.mooncake_v2 import wire
from kvpp_connect.connectors.mooncake_v2.control import ControlClient
from kvpp_connect.connectors.mooncake_v2.metadata import RemotePrefill
from kvpp_connect.errors import PeerError

logger = get_logger(__name__)

_ATTEMPTS = 4
_FIRST_PAUSE_S = 0.25


class LeaseReleaser:
    """A thread that tells producers "done". Without an answer the producer's lease runs out."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[RemotePrefill | None] = queue.SimpleQueue()
        self._clients: dict[tuple[str, int], ControlClient] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpp-release", daemon=True)
        self._thread.start()

    def release(self, remote: RemotePrefill) -> None:
        """Queue the release of a lease; returns at once."""
        self._queue.put(remote)

    def close(self) -> None:
        """Send what is queued, once each, and stop."""
        self._closed.set()
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            while (remote := self._queue.get()) is not None:
                self._release(remote)
        finally:
            for client in self._clients.values():
                client.close()

    def _release(self, remote: RemotePrefill) -> None:
        pause_s = _FIRST_PAUSE_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                answer = self._client(remote).ask(wire.Release(remote.lease))
            except PeerError as error:
                if attempt < _ATTEMPTS and not self._closed.wait(pause_s):
                    pause_s *= 2
                    continue
                logger.warning(
                    "request %s: its blocks on engine %s are freed by the lease's expiry only: %s",
                    remote.lease.request_id,
                    remote.engine_id,
                    error,
                )
            else:
                logger.debug("lease of %s: %s", remote.lease.request_id, answer)
            return

    def _client(self, remote: RemotePrefill) -> ControlClient:
        key = (remote.host, remote.port)
        if key not in self._clients:
            self._clients[key] = ControlClient(*key, timeout_s=self._timeout_s)
        return self._clients[key]
