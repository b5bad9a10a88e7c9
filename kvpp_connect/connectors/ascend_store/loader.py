"""Loads blocks: objects from the store into staging, checked, and from there into the caches.

A load ends in time, whatever the store does: what has not arrived by then counts as failed, and
what arrives afterwards is dropped. Only a prefix of a request's blocks is of use, so a load's
result is the place of the first block that failed.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

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


class _LoadBatch(Protocol):
    @property
    def start(self) -> int: ...


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
        self._open: set[_LoadBatch] = set()
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the result stands; nothing may be written for this load any more."""
        return self._closed

    def begin(self, batches: Iterable[_LoadBatch]) -> None:
        """Say what there is to do."""
        self._open = set(batches)
        self._close_if_done()

    def end_batch(self, batch: _LoadBatch, first_bad: int | None) -> None:
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


@dataclass(slots=True)
class SlotLease:
    """A staging slot in use. ``is_clean``: nobody writes into it any more."""

    slot: Slot
    is_clean: bool = False


@dataclass(slots=True, kw_only=True)
class LoadTools:
    """What loads are made with, whole objects or layers of them. Thread-safe."""

    store: PoolStore
    copier: BlockCopier
    staging: Staging
    health: StoreHealth
    counters: PoolCounters
    timeout_s: float
    verify: bool
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _lost: set[bytes] = field(default_factory=set[bytes])

    @contextmanager
    def slot(self, load: Load, objects: int) -> Iterator[SlotLease | None]:
        """A staging slot for a batch; ``None`` where the store is left alone or none is free."""
        if not self.health.may_use():
            self.counters.failed(PoolFailure.UNREACHABLE, objects)
            yield None
            return
        slot = self.staging.take(max(0.0, load.deadline - self.clock()))
        if slot is None:
            self.counters.failed(PoolFailure.LATE, objects)
            yield None
            return
        lease = SlotLease(slot)
        try:
            yield lease
        finally:
            self.staging.give_back(slot, 0.0 if lease.is_clean else GIVEN_UP_READ_S)

    def give_up(self, load: Load, cause: PoolFailure = PoolFailure.LATE) -> None:
        """End a load now."""
        if left := load.close():
            self.counters.failed(cause, left)
            if cause is PoolFailure.LATE:
                self.health.failed(f"a load took longer than {self.timeout_s:g} s")

    def count_good(
        self, outcomes: Sequence[GetOutcome], keys: Sequence[str], hashes: Sequence[bytes]
    ) -> int:
        """Number of first objects that were read; what became of the others is counted."""
        for outcome, key, block in zip(outcomes, keys, hashes, strict=True):
            if outcome is GetOutcome.SHORT:
                self.drop_damaged(key, block)
            elif outcome is GetOutcome.MISSING:
                self.counters.failed(PoolFailure.MISSING)
                self._note_lost(block)
            elif outcome is GetOutcome.FAILED:
                self.counters.failed(PoolFailure.READ)
        return next(
            (i for i, outcome in enumerate(outcomes) if outcome is not GetOutcome.READ),
            len(outcomes),
        )

    def drop_damaged(self, key: str, block: bytes) -> None:
        """Remove an object that is not what was stored: else it is found, and fails, for ever."""
        logger.warning("KV pool: object %s is damaged, removing it", key)
        self.counters.failed(PoolFailure.DAMAGED)
        self._note_lost(block)
        try:
            self.store.remove_prefix(key)
        except StoreError as error:
            self.health.failed(error)

    def take_lost(self) -> set[bytes]:
        """Blocks that were not there, or damaged, since the last call."""
        with self._lock:
            lost, self._lost = self._lost, set()
        return lost

    def _note_lost(self, block: bytes) -> None:
        with self._lock:
            self._lost.add(block)


class Loader:
    """Loads whole objects with a few threads."""

    def __init__(self, tools: LoadTools, shards: Sequence[ShardCaches], threads: int = 2) -> None:
        """Args: shards: all whose caches this rank holds."""
        self._tools = tools
        self._shards = shards
        self._rows = tools.staging.rows_for([caches.object_bytes for caches in shards])
        self._threads = ThreadPoolExecutor(
            threads, thread_name_prefix="kvpp-pool-load", initializer=tools.copier.enter_thread
        )

    def begin(self, order: LoadOrder, scope: str) -> Load:
        """Begin a load; see :class:`Load` for its end."""
        load = Load(order, scope, self._tools.clock() + self._tools.timeout_s)
        batches = cut_batches(self._shards, len(order.blocks), self._rows)
        load.begin(batches)
        for batch in batches:
            self._threads.submit(self._run, load, batch)
        return load

    def is_due(self, load: Load) -> bool:
        """Whether a load has ended, if need be because its time is over."""
        if not load.is_closed and self._tools.clock() >= load.deadline:
            self._tools.give_up(load)
        return load.is_closed

    def wait(self, load: Load) -> None:
        """Wait for a load's end, which comes in time."""
        if not load.ended.wait(max(0.0, load.deadline - self._tools.clock())):
            self._tools.give_up(load)

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
            self._tools.health.failed(error)
            self._tools.counters.failed(PoolFailure.UNREACHABLE, batch.end - batch.start)
        except Exception:
            logger.exception("KV pool: loading failed")
            self._tools.counters.failed(PoolFailure.READ, batch.end - batch.start)
        finally:
            load.end_batch(batch, first_bad)

    def _load_batch(self, load: Load, batch: Batch) -> int | None:
        """Load a batch; answer the place of its first failed block."""
        tools, caches, blocks = self._tools, batch.caches, load.order.blocks
        with tools.slot(load, batch.end - batch.start) as lease:
            if lease is None:
                return batch.start
            hashes = blocks.hashes[batch.start : batch.end]
            keys = [object_key(load.scope, caches.shard.name, block) for block in hashes]
            rows = lease.slot.rows(len(keys), caches.object_bytes)
            begin = tools.clock()
            outcomes = tools.store.get(keys, row_buffers(rows))
            seconds = tools.clock() - begin
            tools.health.worked()
            lease.is_clean = GetOutcome.FAILED not in outcomes
            good = tools.count_good(outcomes, keys, hashes)
            if tools.verify:
                good = self._count_intact(rows[:good], keys, hashes)
            with load.lock:
                if good and not load.is_closed:
                    ids = blocks.block_ids[batch.start : batch.start + good]
                    tools.copier.scatter(rows[:good], caches.caches, ids)
                    tools.counters.add(
                        load_objects=good,
                        load_bytes=good * caches.shard.payload_bytes,
                        load_seconds=seconds,
                    )
        return None if good == len(keys) else batch.start + good

    def _count_intact(
        self, rows: torch.Tensor, keys: Sequence[str], hashes: Sequence[bytes]
    ) -> int:
        for i, row in enumerate(row_array(rows)):
            if not is_intact(row, keys[i]):
                self._tools.drop_damaged(keys[i], hashes[i])
                return i
        return len(rows)
