"""What one decode rank counts of its pulls."""

import threading
from collections import defaultdict
from enum import Enum


class FailureCause(Enum):
    """Why a pull failed, as operators tell failures apart."""

    UNREACHABLE = "unreachable"  # the producer does not answer, or does not let us in
    LEASE_LOST = "lease_lost"  # it keeps the blocks no more
    LAYOUT = "layout"  # its caches cannot be copied into ours
    READ = "read"  # the transfer engine could not read
    CANCELLED = "cancelled"  # nobody wants the request any more
    RESTARTED = "restarted"  # it is not the one that computed the prompt
    SHARE = "share"  # another rank of this engine did not get what it was to read for all
    OTHER = "other"


class PullStats:
    """One rank's pulls. Thread-safe.

    Args:
        counts_tokens: true on one rank of the engine, since every rank pulls the same tokens.
    """

    def __init__(self, *, counts_tokens: bool) -> None:
        self._counts_tokens = counts_tokens
        self._lock = threading.Lock()
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._queued = 0
        self._queued_told = 0

    def submitted(self) -> None:
        """A pull was ordered; it counts as queued until it succeeds or fails."""
        with self._lock:
            self._queued += 1

    def pulled(
        self, *, num_bytes: int, peer_bytes: int, tokens: int, pieces: int, seconds: float
    ) -> None:
        """Count one successful pull: bytes from the producer, and from ranks of this engine."""
        with self._lock:
            self._queued = max(0, self._queued - 1)
            self._sums["pulls"] += 1
            self._sums["pull_bytes"] += num_bytes
            self._sums["pull_peer_bytes"] += peer_bytes
            self._sums["pull_tokens"] += tokens if self._counts_tokens else 0
            self._sums["pull_pieces"] += pieces
            self._sums["pull_seconds"] += seconds

    def failed(self, cause: FailureCause = FailureCause.OTHER) -> None:
        """Count one failed pull."""
        with self._lock:
            self._queued = max(0, self._queued - 1)
            self._sums[f"pull_failures/{cause.value}"] += 1

    def take(self) -> dict[str, float]:
        """Sums since the last call, by metric name, and the queue's length; empty for no news.

        A rank tells its queue as long as there is one, since the engine shows the longest.
        """
        with self._lock:
            sums, self._sums = self._sums, defaultdict(float)
            if self._queued or self._queued_told:
                sums["pulls_queued"] = self._queued_told = self._queued
        return dict(sums)
