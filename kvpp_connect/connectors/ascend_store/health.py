"""Leaves a store alone for a while after it failed, so that serving does not wait for it again."""

import threading
import time
from collections.abc import Callable

from kvpp_connect._log import get_logger

logger = get_logger(__name__)
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class StoreHealth:
    """Whether to use the store. Thread-safe.

    After a failure the store is not used for a second, after each further one twice as long, up to
    half a minute. Then one caller at a time may try it; what it says decides.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Args: name: the store in messages."""
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._until = 0.0

    @property
    def is_good(self) -> bool:
        """Whether the store worked when it was last used."""
        return self._pause_s == 0

    def may_use(self) -> bool:
        """Whether to use the store at this moment; a caller that does tells how it went."""
        with self._lock:
            if self._pause_s == 0:
                return True
            now = self._clock()
            if now < self._until:
                return False
            self._until = now + self._pause_s  # the others wait for this caller's trial
            return True

    def worked(self) -> None:
        """The store answered."""
        with self._lock:
            recovered, self._pause_s = self._pause_s > 0, 0.0
        if recovered:
            logger.info("KV pool: %s answers again", self._name)

    def failed(self, reason: object) -> None:
        """The store did not answer, or not in time."""
        with self._lock:
            first = self._pause_s == 0
            self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
            self._until = self._clock() + self._pause_s
        if first:
            logger.warning(
                "KV pool: %s fails (%s); prompts are computed, and nothing is stored, until it "
                "answers again",
                self._name,
                reason,
            )
