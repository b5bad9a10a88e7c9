"""Loads blocks: objects from the store into staging, checked, and from there into the caches.

A load ends in time, whatever the store does: what has not arrived by then counts as failed, and
what arrives afterwards is dropped. Only a prefix of a request's blocks is of use, so a load's
result is the place of the first block that failed.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.ascend_store.backends.base import (
    GetOutcome,
    PoolStore,
    StoreError,
)
from kvpp_connect.connectors.ascend_store.copying import BlockCopier
from kvpp_connect.connectors.ascend_store.counters import PoolCounters, PoolFailure
from kvpp_connect.connectors.ascend_store.health import StoreHealth
from kvpp_connect.connectors.ascend_store.objects import is_intact
from kvpp_connect.connectors.ascend_store.orders import LoadOrder
from kvpp_connect.connectors.ascend_store.shard_caches import Batch, ShardCaches, cut_batches
from kvpp_connect.connectors.ascend_store.shards import object_key
from kvpp_connect.connectors.ascend_store.staging import Slot, Staging, row_array, row_buffers

logger = get_logger(__name__)

GIVEN_UP_READ_S = 30.0
"""Seconds for which a store may write the target of a read that it reported as failed. Mooncake
over TCP goes on for up to 20 (connectors/mooncake_engine.py)."""

_CAUSES = {
    GetOutcome.MISSING: PoolFailure.MISSING,
    GetOutcome.SHORT: PoolFailure.DAMAGED,
    GetOutcome.FAILED: PoolFailure.READ,
}


class Load:
    """One order under way on this rank."""

    def __init__(self, order: LoadOrder, scope: str, deadline: float) -> None:
        """Args: deadline: in monotonic seconds."""
        self.order = order
        self.scope = scope
        self.deadline = deadline
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.first_bad = len(order.blocks)
        self._open: set[Batch] = set()
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the result stands; nothing may be written for this load any more."""
        return self._closed

    def begin(self, batches: Sequence[Batch]) -> None:
        """Say what there is to do."""
        self._open = set(batches)
        self._close_if_done()

    def end_batch(self, batch: Batch, first_bad: int | None) -> None:
        """A batch is through; ``first_bad`` is the place of its first failed block."""
        with self.lock:
            if self._closed:
                return
            if first_bad is not None:
                self.first_bad = min(self.first_bad, first_bad)
            self._open.discard(batch)
            self._close_if_done()

    def close(self) -> int:
        """End now; batches that are not through count as failed. Answer how many those are."""
        with self.lock:
            left = len(self._open)
            starts = [batch.start for batch in self._open]
            self.first_bad = min([self.first_bad, *starts])
            self._open.clear()
            self._close_if_done()
        return left

    def _close_if_done(self) -> None:
        if not self._open:
            self._closed = True
            self.ended.set()


class Loader:
    """Carries loads out with a few threads."""

    def __init__(
        self,
        *,
        store: PoolStore,
        shards: Sequence[ShardCaches],
        copier: BlockCopier,
        staging: Staging,
        health: StoreHealth,
        counters: PoolCounters,
        timeout_s: float,
        verify: bool,
        threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: shards: all whose caches this rank holds."""
        self._store = store
        self._shards = shards
        self._copier = copier
        self._staging = staging
        self._health = health
        self._counters = counters
        self._timeout_s = timeout_s
        self._verify = verify
        self._clock = clock
        self._rows = staging.rows_for([caches.object_bytes for caches in shards])
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvpp-pool-load")
        self._lock = threading.Lock()
        self._lost: set[bytes] = set()

    def begin(self, order: LoadOrder, scope: str) -> Load:
        """Begin a load; see :class:`Load` for its end."""
        load = Load(order, scope, self._clock() + self._timeout_s)
        batches = cut_batches(self._shards, len(order.blocks), self._rows)
        load.begin(batches)
        for batch in batches:
            self._threads.submit(self._run, load, batch)
        return load

    def is_due(self, load: Load) -> bool:
        """Whether a load has ended, if need be because its time is over."""
        if not load.is_closed and self._clock() >= load.deadline:
            self.give_up(load)
        return load.is_closed

    def give_up(self, load: Load, cause: PoolFailure = PoolFailure.LATE) -> None:
        """End a load now."""
        if left := load.close():
            self._counters.failed(cause, left)
            if cause is PoolFailure.LATE:
                self._health.failed(f"a load took longer than {self._timeout_s:g} s")

    def wait(self, load: Load) -> None:
        """Wait for a load's end, which comes in time."""
        if not load.ended.wait(max(0.0, load.deadline - self._clock())):
            self.give_up(load)

    def take_lost(self) -> set[bytes]:
        """Blocks that were not there, or damaged, since the last call."""
        with self._lock:
            lost, self._lost = self._lost, set()
        return lost

    def close(self) -> None:
        """Stop after the calls under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, load: Load, batch: Batch) -> None:
        first_bad: int | None = batch.start
        try:
            # Blocks behind one that failed are of no use.
            if not load.is_closed and batch.start < load.first_bad:
                first_bad = self._load_batch(load, batch)
        except StoreError as error:
            self._health.failed(error)
            self._counters.failed(PoolFailure.UNREACHABLE, batch.end - batch.start)
        except Exception:
            logger.exception("KV pool: loading failed")
            self._counters.failed(PoolFailure.READ, batch.end - batch.start)
        finally:
            load.end_batch(batch, first_bad)

    def _load_batch(self, load: Load, batch: Batch) -> int | None:
        """Load a batch; answer the place of its first failed block."""
        if not self._health.may_use():
            self._counters.failed(PoolFailure.UNREACHABLE, batch.end - batch.start)
            return batch.start
        slot = self._staging.take(max(0.0, load.deadline - self._clock()))
        if slot is None:
            self._counters.failed(PoolFailure.LATE, batch.end - batch.start)
            return batch.start
        held_s = GIVEN_UP_READ_S
        try:
            outcomes, good = self._fetch(load, batch, slot)
            if GetOutcome.FAILED not in outcomes:
                held_s = 0.0
        finally:
            self._staging.give_back(slot, held_s)
        return None if good == len(outcomes) else batch.start + good

    def _fetch(self, load: Load, batch: Batch, slot: Slot) -> tuple[list[GetOutcome], int]:
        """Read objects and copy the good ones; answer what became of each, and how many."""
        caches, blocks = batch.caches, load.order.blocks
        hashes = blocks.hashes[batch.start : batch.end]
        keys = [object_key(load.scope, caches.shard.name, block) for block in hashes]
        rows = slot.rows(len(keys), caches.object_bytes)
        begin = self._clock()
        outcomes = self._store.get(keys, row_buffers(rows))
        seconds = self._clock() - begin
        self._health.worked()
        if self._verify:
            outcomes = self._check(rows, keys, outcomes)
        good = next(
            (i for i, outcome in enumerate(outcomes) if outcome is not GetOutcome.READ), len(keys)
        )
        self._note_failures(outcomes, hashes)
        with load.lock:
            if good and not load.is_closed:
                ids = blocks.block_ids[batch.start : batch.start + good]
                self._copier.scatter(rows[:good], caches.caches, ids)
                self._counters.add(
                    load_objects=good,
                    load_bytes=good * caches.shard.payload_bytes,
                    load_seconds=seconds,
                )
        return outcomes, good

    def _check(
        self, rows: torch.Tensor, keys: Sequence[str], outcomes: Sequence[GetOutcome]
    ) -> list[GetOutcome]:
        checked = list(outcomes)
        table = row_array(rows)
        for i, outcome in enumerate(outcomes):
            if outcome is GetOutcome.READ and not is_intact(table[i], keys[i]):
                checked[i] = GetOutcome.SHORT
        for i, outcome in enumerate(checked):
            if outcome is GetOutcome.SHORT:
                # It would be found, and fail, again and again.
                logger.warning("KV pool: object %s is damaged, removing it", keys[i])
                self._store.remove_prefix(keys[i])
        return checked

    def _note_failures(self, outcomes: Sequence[GetOutcome], hashes: Sequence[bytes]) -> None:
        for outcome, block in zip(outcomes, hashes, strict=True):
            if outcome is GetOutcome.READ:
                continue
            self._counters.failed(_CAUSES[outcome])
            if outcome is not GetOutcome.FAILED:
                with self._lock:
                    self._lost.add(block)
