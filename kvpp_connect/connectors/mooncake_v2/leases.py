"""The producer's book of hand-overs: which finished requests still hold blocks, and for whom.

A lease begins when a request finishes, may be renewed by its reader, and ends once: by release or
by expiry, whichever comes first. The end is final: who renews or releases later is told how the
lease ended.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpp_connect.connectors.mooncake_v2.wire import LeaseRef, LeaseState


@dataclass(slots=True)
class _Lease:
    # Written by the control channel's thread, read by the scheduler's.
    ref: LeaseRef
    state: LeaseState
    # Monotonic seconds: while held, of the expiry; afterwards, until which the end is remembered.
    deadline: float
    # Monotonic seconds beyond which nobody can renew it.
    last_deadline: float


class LeaseBook:
    """Leases of one incarnation of a producer. Thread-safe.

    Args:
        lease_s: seconds from the grant, or from a renewal, to the expiry.
        max_lease_s: seconds from the grant after which a lease ends however often it is renewed, so
            that a reader that hangs cannot keep blocks for ever.
    """

    def __init__(
        self,
        incarnation: str,
        lease_s: float,
        max_lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._max_lease_s = max_lease_s
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[int, _Lease] = {}
        # No deadline is earlier than this.
        self._nothing_due_until = float("inf")
        self._ended: list[str] = []
        self._live = 0
        self._next_generation = 0
        self._counts: Counter[str] = Counter()

    def grant(self, request_id: str) -> LeaseRef:
        """Begin a lease on the blocks of a request that has just finished."""
        with self._lock:
            self._next_generation += 1
            ref = LeaseRef(
                incarnation=self._incarnation,
                request_id=request_id,
                generation=self._next_generation,
            )
            now = self._clock()
            last_deadline = now + self._max_lease_s
            deadline = min(now + self._lease_s, last_deadline)
            self._leases[ref.generation] = _Lease(ref, LeaseState.HELD, deadline, last_deadline)
            self._nothing_due_until = min(self._nothing_due_until, deadline)
            self._live += 1
            self._counts["granted"] += 1
            return ref

    def renew(self, incarnation: str, generations: Sequence[int]) -> tuple[LeaseState, ...]:
        """Extend leases that hold; answer the state of each."""
        with self._lock:
            self._expire()
            if incarnation != self._incarnation:
                return (LeaseState.UNKNOWN,) * len(generations)
            return tuple(self._renew(self._leases.get(number)) for number in generations)

    def confirm(self, ref: LeaseRef) -> LeaseState:
        """Tell whether a lease holds at this moment."""
        with self._lock:
            self._expire()
            lease = self._find(ref)
            return lease.state if lease else LeaseState.UNKNOWN

    def extend(self, ref: LeaseRef) -> tuple[LeaseState, float]:
        """Renew one lease; answer its state, and for how many seconds it holds from now on."""
        with self._lock:
            self._expire()
            lease = self._find(ref)
            if lease is None or self._renew(lease) is not LeaseState.HELD:
                return lease.state if lease else LeaseState.UNKNOWN, 0.0
            return LeaseState.HELD, lease.deadline - self._clock()

    def release(self, ref: LeaseRef) -> LeaseState:
        """End a lease; asking again gives the same answer."""
        with self._lock:
            self._expire()
            lease = self._find(ref)
            if lease is None:
                return LeaseState.UNKNOWN
            if lease.state is LeaseState.HELD:
                self._end(lease, LeaseState.RELEASED)
            return lease.state

    def take_ended(self) -> list[str]:
        """Ids of requests whose lease ended since the last call; each lease's id is given once."""
        with self._lock:
            self._expire()
            ended, self._ended = self._ended, []
            return ended

    def live(self) -> int:
        """Number of leases that hold."""
        with self._lock:
            return self._live

    def take_counts(self) -> dict[str, int]:
        """Leases granted, renewed, released and expired since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            return dict(counts)

    def _find(self, ref: LeaseRef) -> _Lease | None:
        lease = self._leases.get(ref.generation)
        return lease if lease is not None and lease.ref == ref else None

    def _renew(self, lease: _Lease | None) -> LeaseState:
        if lease is None:
            return LeaseState.UNKNOWN
        if lease.state is LeaseState.HELD:
            lease.deadline = min(self._clock() + self._lease_s, lease.last_deadline)
            self._counts["renewed"] += 1
        return lease.state

    def _expire(self) -> None:
        now = self._clock()
        if now < self._nothing_due_until:
            return
        for generation, lease in list(self._leases.items()):
            if lease.deadline > now:
                continue
            if lease.state is LeaseState.HELD:
                self._end(lease, LeaseState.EXPIRED)
            else:
                del self._leases[generation]
        self._nothing_due_until = min(
            (lease.deadline for lease in self._leases.values()), default=float("inf")
        )

    def _end(self, lease: _Lease, state: LeaseState) -> None:
        lease.state = state
        # Remember the end for late and repeated questions, then forget it.
        lease.deadline = self._clock() + self._lease_s
        self._nothing_due_until = min(self._nothing_due_until, lease.deadline)
        self._ended.append(lease.ref.request_id)
        self._live -= 1
        self._counts[state.value] += 1
