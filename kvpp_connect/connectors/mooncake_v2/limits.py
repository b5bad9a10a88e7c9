"""Bounds on what peers can make a node do: questions per second, and log lines per second."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

_MAX_PEERS = 1024
_LOG_EVERY_S = 1.0


class RateLimit:
    """A token bucket per peer, as deep as one second's allowance. For one thread.

    The peers seen last are remembered; a forgotten one begins with a full bucket.
    """

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_s = per_s
        self._clock = clock
        # Tokens left, and when that was, by last use.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def admits(self, peer: str) -> bool:
        """Take a token of a peer's bucket; false where none is left."""
        now = self._clock()
        depth = max(1.0, self.per_s)
        tokens, since = self._buckets.get(peer, (depth, now))
        tokens = min(depth, tokens + (now - since) * self.per_s)
        admitted = tokens >= 1
        self._buckets[peer] = (tokens - admitted, now)
        self._buckets.move_to_end(peer)
        if len(self._buckets) > _MAX_PEERS:
            self._buckets.popitem(last=False)
        return admitted

    def __len__(self) -> int:
        return len(self._buckets)


class RareLog:
    """Logs at most one line a second and says how many it left out. For one thread."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._next_at = float("-inf")
        self._left_out = 0

    def warning(self, message: str, *args: object) -> None:
        """Log a warning, unless there was one within the last second."""
        now = self._clock()
        if now < self._next_at:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._logger.warning("%s%s", message % args, more)
        self._next_at, self._left_out = now + _LOG_EVERY_S, 0
