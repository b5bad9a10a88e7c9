"""Keeps leases on producers while their requests need them, and gives them back, all in background.

Each producer has a thread for renewals and one for releases, so one that does not answer delays
nobody else's leases. Retries are bounded; what they cannot reach runs out by itself.
"""

import heapq
import threading
import time
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.mooncake_v2 import wire
from kvpp_connect.connectors.mooncake_v2.control import ControlClient
from kvpp_connect.connectors.mooncake_v2.metadata import RemotePrefill
from kvpp_connect.connectors.mooncake_v2.peers import PeerPool
from kvpp_connect.connectors.mooncake_v2.renewals import RenewalBatch, RenewalPlan
from kvpp_connect.connectors.mooncake_v2.secret import ControlKeys
from kvpp_connect.errors import PeerError

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = get_logger(__name__)

_ATTEMPTS = 4
_FIRST_PAUSE_S = 0.25
_FINAL = (wire.LeaseState.RELEASED, wire.LeaseState.EXPIRED, wire.LeaseState.UNKNOWN)


class LeaseReleaser:
    """Renews leases until it tells their producers "done". Thread-safe.

    Without an answer the producer's lease runs out by itself.
    """

    def __init__(self, timeout_s: float, keys: ControlKeys | None = None) -> None:
        self._timeout_s = timeout_s

        def connect(host: str, port: int) -> ControlClient:
            return ControlClient(host, port, timeout_s, keys)

        self._releases = PeerPool(connect, name="kvpp-release")
        self._renewals = PeerPool(connect, name="kvpp-renew")
        self._closed = threading.Event()
        # Guards what follows; notified when it may hold something earlier.
        self._changed = threading.Condition()
        self._plan = RenewalPlan()
        self._delayed: list[tuple[float, int, RemotePrefill]] = []
        self._numbers = count()
        self._counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._watch, name="kvpp-leases", daemon=True)
        self._thread.start()

    def keep(self, remote: RemotePrefill) -> None:
        """Renew a lease from now until it is released; returns at once."""
        with self._changed:
            self._plan.keep(remote, time.monotonic())
            self._changed.notify()

    def release(self, remote: RemotePrefill, delay_s: float = 0.0) -> None:
        """Release a lease soon, or renew it for so long and release it then; returns at once."""
        if delay_s <= 0:
            with self._changed:
                self._plan.drop((remote.host, remote.port), remote.lease)
            # Nobody renews it any more, so by then it has run out on a producer that lives.
            until = time.monotonic() + remote.lease_s
            self._releases.submit(
                (remote.host, remote.port), lambda client: self._release(client, remote, until)
            )
            return
        with self._changed:
            self._plan.keep(remote, time.monotonic())
            entry = (time.monotonic() + delay_s, next(self._numbers), remote)
            heapq.heappush(self._delayed, entry)
            self._changed.notify()

    def take_counts(self) -> dict[str, int]:
        """Leases that were found ended while they were kept, and releases that did not get through.

        Names are ``lost`` and ``unreleased``; since the last call.
        """
        with self._changed:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def close(self) -> None:
        """Send what is queued, once each, and stop. Waits for one time-out at most.

        Delayed releases are dropped: those leases run out by themselves.
        """
        with self._changed:
            self._closed.set()
            self._changed.notify()
        self._thread.join()
        self._renewals.close(finish_queued=False, timeout_s=1.0)
        self._releases.close(finish_queued=True, timeout_s=self._timeout_s + 1.0)

    def _watch(self) -> None:
        with self._changed:
            while not self._closed.is_set():
                try:
                    pause_s = self._carry_out_due()
                except Exception:  # the thread's boundary: other leases must be renewed still
                    logger.exception("renewing leases failed; going on")
                    pause_s = _FIRST_PAUSE_S
                self._changed.wait(pause_s)

    def _carry_out_due(self) -> float:
        """Begin what is due; answer the seconds until something else is."""
        now = time.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            self.release(heapq.heappop(self._delayed)[2])
        for batch in self._plan.take_due(now):
            self._ask(batch)
        next_at = self._plan.next_due()
        if self._delayed:
            next_at = min(next_at, self._delayed[0][0])
        return min(next_at - now, threading.TIMEOUT_MAX)

    def _ask(self, batch: RenewalBatch) -> None:
        future = self._renewals.submit(batch.address, lambda client: _renew(client, batch))
        future.add_done_callback(lambda done: self._asked(batch, done))

    def _asked(self, batch: RenewalBatch, done: "Future[tuple[wire.LeaseState, ...]]") -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            logger.warning(
                "renewing %d lease(s) of engine %s at %s:%d failed: %s",
                len(batch.leases),
                batch.engine_id,
                *batch.address,
                error,
            )
        states = done.result() if error is None else ()
        ended = [pair for pair in zip(batch.leases, states, strict=False) if pair[1] in _FINAL]
        with self._changed:
            self._plan.asked(batch, time.monotonic(), succeeded=error is None)
            # What was released meanwhile is not lost.
            lost = [pair for pair in ended if self._plan.drop(batch.address, pair[0])]
            if lost:
                self._counts["lost"] += len(lost)
            self._changed.notify()
        for lease, state in lost:
            logger.warning(
                "request %s: its lease on engine %s at %s:%d ended early (%s)",
                lease.request_id,
                batch.engine_id,
                *batch.address,
                state.value,
            )

    def _release(self, client: ControlClient, remote: RemotePrefill, until: float) -> None:
        pause_s, error = _FIRST_PAUSE_S, PeerError("it did not answer for as long as the lease")
        for _ in range(_ATTEMPTS):
            if time.monotonic() > until:
                break
            try:
                answer = client.ask(wire.Release(remote.lease))
            except PeerError as failure:
                error = failure
                if self._closed.wait(pause_s):
                    break
                pause_s *= 2
            else:
                logger.debug("lease of %s: %s", remote.lease.request_id, answer)
                return
        logger.warning(
            "request %s: its blocks on engine %s at %s:%d are freed by the lease's expiry only: %s",
            remote.lease.request_id,
            remote.engine_id,
            remote.host,
            remote.port,
            error,
        )
        with self._changed:
            self._counts["unreleased"] += 1


def _renew(client: ControlClient, batch: RenewalBatch) -> tuple[wire.LeaseState, ...]:
    answer = client.ask(batch.question(), timeout_s=batch.timeout_s)
    if not isinstance(answer, wire.RenewAnswer) or len(answer.states) != len(batch.leases):
        raise PeerError(f"asked to renew {len(batch.leases)} leases, got {type(answer).__name__}")
    return answer.states
