"""Finds out how much of a prompt the pool holds, without making the scheduler wait.

One thread asks the store. A prompt's answer is the number of its first blocks of which every shard
is there: decided in this one place for all ranks.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.ascend_store.backends.base import PoolStore, StoreError
from kvpp_connect.connectors.ascend_store.health import StoreHealth
from kvpp_connect.connectors.ascend_store.shards import object_key

logger = get_logger(__name__)


@dataclass(slots=True)
class Lookup:
    """One question. ``blocks`` is the answer: ``None`` until there is one, 0 where it failed."""

    scope: str
    hashes: tuple[bytes, ...]
    asked_at: float  # monotonic seconds
    answered_at: float = 0.0
    blocks: int | None = None
    cancelled: bool = False


@dataclass(slots=True)
class LookupCounts:
    """What was asked since the last report."""

    lookups: int = 0
    seconds: float = 0.0
    failures: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> dict[str, float]:
        """Sums by metric name, and begin anew."""
        with self.lock:
            counts = {
                "pool_lookups": self.lookups,
                "pool_lookup_seconds": self.seconds,
                "pool_failures/lookup": self.failures,
            }
            self.lookups, self.seconds, self.failures = 0, 0.0, 0
        return {name: value for name, value in counts.items() if value}


class LookupService:
    """Asks a store in a thread of its own."""

    def __init__(
        self,
        store: PoolStore,
        health: StoreHealth,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._health = health
        self._clock = clock
        self._shards: tuple[str, ...] = ()
        self._queue: queue.SimpleQueue[Lookup | str | None] = queue.SimpleQueue()
        self._counts = LookupCounts()
        self._thread = threading.Thread(target=self._run, name="kvpp-pool-lookup", daemon=True)
        self._thread.start()

    def ask_about(self, shards: Sequence[str]) -> None:
        """Set the names of all shards that make a block complete."""
        self._shards = tuple(shards)

    def ask(self, scope: str, hashes: Sequence[bytes]) -> Lookup:
        """Ask about a prompt's blocks; the answer appears in the result."""
        lookup = Lookup(scope, tuple(hashes), self._clock())
        if not self._health.may_use():
            lookup.blocks, lookup.answered_at = 0, lookup.asked_at
        else:
            self._queue.put(lookup)
        return lookup

    @property
    def is_good(self) -> bool:
        """Whether the store worked when it was last asked."""
        return self._health.is_good

    def forget(self, scope: str) -> None:
        """Remove all objects of a scope, as far as the store can."""
        self._queue.put(scope)

    def gave_up(self, lookup: Lookup) -> None:
        """Nobody waits any longer for an answer that did not come in time."""
        lookup.cancelled = True
        self._health.failed("no answer to a look-up in time")

    def take_counts(self) -> dict[str, float]:
        """Counters since the last call, by metric name."""
        return self._counts.take()

    def close(self) -> None:
        """Stop after the question that is being asked, and leave the store."""
        self._queue.put(None)
        self._thread.join(timeout=2)
        self._store.close()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, str):
                    removed = self._store.remove_prefix(f"{item}:")
                    logger.info("KV pool: removed %d objects of %s", removed, item)
                elif not item.cancelled:
                    self._look_up(item)
            except StoreError as error:
                self._failed(error)
            except Exception as error:
                logger.exception("KV pool: asking the store failed")
                self._failed(error)

    def _look_up(self, lookup: Lookup) -> None:
        begin = self._clock()
        blocks = 0
        try:
            blocks = count_complete(self._store, lookup.scope, self._shards, lookup.hashes)
            self._health.worked()
        finally:
            now = self._clock()
            with self._counts.lock:
                self._counts.lookups += 1
                self._counts.seconds += now - begin
            lookup.answered_at = now
            lookup.blocks = blocks

    def _failed(self, error: Exception) -> None:
        self._health.failed(error)
        with self._counts.lock:
            self._counts.failures += 1


def count_complete(
    store: PoolStore, scope: str, shards: Sequence[str], hashes: Sequence[bytes]
) -> int:
    """Number of first blocks of which every shard's object is there.

    One shard is asked for all blocks, the others for those that it has: most prompts end there.

    Raises:
        StoreError: the store does not answer.
    """
    if not shards or not hashes:
        return 0
    first, *others = shards
    found = _leading(store.exists([object_key(scope, first, block) for block in hashes]))
    if not found or not others:
        return found
    keys = [object_key(scope, shard, block) for block in hashes[:found] for shard in others]
    return _leading(store.exists(keys)) // len(others)


def _leading(present: Sequence[bool]) -> int:
    return next((i for i, there in enumerate(present) if not there), len(present))
