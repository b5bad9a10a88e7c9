"""Gives leases back to producers in the background, with bounded retries.

Each producer has a thread of its own, so one that does not answer delays nobody else's leases.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.mooncake_v2 import wire
from kvpp_connect.connectors.mooncake_v2.control import ControlClient
from kvpp_connect.connectors.mooncake_v2.metadata import RemotePrefill
from kvpp_connect.errors import PeerError

logger = get_logger(__name__)

_ATTEMPTS = 4
_FIRST_PAUSE_S = 0.25


class LeaseReleaser:
    """Tells producers "done". Without an answer the producer's lease runs out by itself."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._closed = threading.Event()
        self._timers: set[threading.Timer] = set()

    def release(self, remote: RemotePrefill, delay_s: float = 0.0) -> None:
        """Release a lease soon, or after a delay; returns at once."""
        if delay_s > 0:
            timer = threading.Timer(delay_s, self._release_late, (remote,))
            timer.daemon = True
            self._timers = {t for t in self._timers if t.is_alive()} | {timer}
            timer.start()
            return
        key = (remote.host, remote.port)
        if key not in self._peers:
            self._peers[key] = _Peer(*key, self._timeout_s)
        peer = self._peers[key]
        peer.thread.submit(self._release, peer.client, remote)

    def close(self) -> None:
        """Send what is queued, once each, and stop. Waits for peers that answer.

        Delayed releases are dropped: those leases run out by themselves.
        """
        self._closed.set()
        for timer in self._timers:
            timer.cancel()
        for peer in self._peers.values():
            peer.thread.shutdown(wait=True)
            peer.client.close()

    def _release_late(self, remote: RemotePrefill) -> None:
        if not self._closed.is_set():
            self.release(remote)

    def _release(self, client: ControlClient, remote: RemotePrefill) -> None:
        pause_s = _FIRST_PAUSE_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                answer = client.ask(wire.Release(remote.lease))
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


class _Peer:
    """One producer: its control channel and the thread that uses it."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self.client = ControlClient(host, port, timeout_s)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"kvpp-release-{host}:{port}")
