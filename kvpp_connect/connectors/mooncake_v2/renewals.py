"""When to renew which leases, as a plan without threads, sockets or clocks.

Each lease is renewed three times within its length. Leases of one producer and length that are due
together go out in one question, and none is in two questions at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from kvpp_connect.connectors.mooncake_v2.metadata import RemotePrefill
from kvpp_connect.connectors.mooncake_v2.peers import PeerAddress
from kvpp_connect.connectors.mooncake_v2.wire import MAX_RENEWALS, LeaseRef, Renew

_PER_LEASE = 3
# How old a lease is when its request arrives is unknown, so the first renewal comes early; most
# requests are read before that and never ask.
_FIRST_AFTER_S = 1.0
_SHORTEST_INTERVAL_S = 0.05
_NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalBatch:
    """One question to one producer; ``timeout_s`` leaves time to ask again."""

    address: PeerAddress
    engine_id: str
    incarnation: str
    leases: tuple[LeaseRef, ...]
    timeout_s: float

    def question(self) -> Renew:
        """The question in words of the channel."""
        return Renew(
            incarnation=self.incarnation,
            generations=tuple(lease.generation for lease in self.leases),
        )


@dataclass(slots=True)
class _Kept:
    remote: RemotePrefill
    interval_s: float
    # Monotonic seconds; never while a question is under way.
    due: float


class RenewalPlan:
    """Leases that are kept. Not thread-safe; times are seconds of any one monotonic clock."""

    def __init__(self) -> None:
        self._kept: dict[tuple[PeerAddress, LeaseRef], _Kept] = {}

    def keep(self, remote: RemotePrefill, now: float) -> None:
        """Renew a lease from now on; a kept one stays as it is."""
        key = (remote.host, remote.port), remote.lease
        if key not in self._kept:
            interval_s = max(remote.lease_s / _PER_LEASE, _SHORTEST_INTERVAL_S)
            self._kept[key] = _Kept(remote, interval_s, now + min(_FIRST_AFTER_S, interval_s))

    def drop(self, address: PeerAddress, lease: LeaseRef) -> bool:
        """Renew a lease no more; answer whether it was kept."""
        return self._kept.pop((address, lease), None) is not None

    def take_due(self, now: float) -> list[RenewalBatch]:
        """Questions to ask now. Tell their outcome by ``asked``."""
        groups: dict[tuple[PeerAddress, str, float], list[_Kept]] = {}
        for (address, lease), kept in self._kept.items():
            # What is due soon joins the question of what is due.
            if kept.due <= now + kept.interval_s / 4:
                key = address, lease.incarnation, kept.interval_s
                groups.setdefault(key, []).append(kept)
        due = [group for group in groups.values() if min(kept.due for kept in group) <= now]
        for kept in chain.from_iterable(due):
            kept.due = _NEVER
        return [batch for group in due for batch in _batches(group)]

    def asked(self, batch: RenewalBatch, now: float, *, succeeded: bool) -> None:
        """A question was answered, or not."""
        for lease in batch.leases:
            kept = self._kept.get((batch.address, lease))
            if kept is not None:
                kept.due = now + kept.interval_s / (1 if succeeded else 4)

    def next_due(self) -> float:
        """When ``take_due`` has something; infinite for never."""
        return min((kept.due for kept in self._kept.values()), default=_NEVER)

    def __len__(self) -> int:
        return len(self._kept)


def _batches(group: list[_Kept]) -> Iterator[RenewalBatch]:
    remote = group[0].remote
    for first in range(0, len(group), MAX_RENEWALS):
        part = group[first : first + MAX_RENEWALS]
        yield RenewalBatch(
            address=(remote.host, remote.port),
            engine_id=remote.engine_id,
            incarnation=remote.lease.incarnation,
            leases=tuple(kept.remote.lease for kept in part),
            timeout_s=min(kept.interval_s for kept in part) / 2,
        )
