"""What one decode rank counts of its pulls."""

import threading
from collections import defaultdict


class PullStats:
    """One rank's pulls. Thread-safe.

    Args:
        counts_tokens: true on one rank of the engine, since every rank pulls the same tokens.
    """

    def __init__(self, *, counts_tokens: bool) -> None:
        self._counts_tokens = counts_tokens
        self._lock = threading.Lock()
        self._sums: defaultdict[str, float] = defaultdict(float)

    def pulled(
        self, *, num_bytes: int, peer_bytes: int, tokens: int, pieces: int, seconds: float
    ) -> None:
        """Count one successful pull: bytes from the producer, and from ranks of this engine."""
        with self._lock:
            self._sums["pulls"] += 1
            self._sums["pull_bytes"] += num_bytes
            self._sums["pull_peer_bytes"] += peer_bytes
            self._sums["pull_tokens"] += tokens if self._counts_tokens else 0
            self._sums["pull_pieces"] += pieces
            self._sums["pull_seconds"] += seconds

    def failed(self) -> None:
        """Count one failed pull."""
        with self._lock:
            self._sums["pull_failures"] += 1

    def take(self) -> dict[str, float]:
        """Sums since the last call, by metric name; empty if nothing happened."""
        with self._lock:
            sums, self._sums = self._sums, defaultdict(float)
        return dict(sums)
