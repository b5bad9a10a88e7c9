"""What one rank counts of its transfers with the pool."""

import threading
from collections import defaultdict
from enum import Enum


class PoolFailure(Enum):
    """Why something did not come from or into the pool, as operators tell it apart."""

    LOOKUP = "lookup"  # the store did not answer a look-up
    UNREACHABLE = "unreachable"  # the store as a whole fails
    MISSING = "missing"  # looked up, and gone when it was loaded
    DAMAGED = "damaged"  # another size, or not what was stored under this key
    READ = "read"  # the store could not read an object
    LATE = "late"  # not in time
    FULL = "full"  # no room for an object
    WRITE = "write"  # the store could not write an object


class PoolCounters:
    """Sums since the last report, by metric name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: defaultdict[str, float] = defaultdict(float)

    def add(self, **amounts: float) -> None:
        """Add to counters ``pool_<name>``."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[f"pool_{name}"] += amount

    def failed(self, cause: PoolFailure, objects: int = 1) -> None:
        """Count objects that failed."""
        with self._lock:
            self._sums[f"pool_failures/{cause.value}"] += objects

    def take(self) -> dict[str, float]:
        """Sums since the last call; empty for no news."""
        with self._lock:
            sums, self._sums = self._sums, defaultdict(float)
        return {name: value for name, value in sums.items() if value}
