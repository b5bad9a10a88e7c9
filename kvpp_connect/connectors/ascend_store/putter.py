"""Stores blocks: from the caches into staging, sealed, and from there into the store.

What is in the store already is neither copied nor written again. A job lets go of its blocks as
soon as they are copied, and in time whatever the store does.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.ascend_store.backends.base import (
    PoolStore,
    PutOutcome,
    StoreError,
)
from kvpp_connect.connectors.ascend_store.copying import BlockCopier
from kvpp_connect.connectors.ascend_store.counters import PoolCounters, PoolFailure
from kvpp_connect.connectors.ascend_store.health import StoreHealth
from kvpp_connect.connectors.ascend_store.objects import seal
from kvpp_connect.connectors.ascend_store.orders import PutOrder, PutReport
from kvpp_connect.connectors.ascend_store.shard_caches import Batch, ShardCaches, cut_batches
from kvpp_connect.connectors.ascend_store.shards import object_key
from kvpp_connect.connectors.ascend_store.staging import Staging, row_array, row_buffers
from kvpp_connect.platforms.device import StreamEvent

logger = get_logger(__name__)

_CAUSES = {PutOutcome.FULL: PoolFailure.FULL, PutOutcome.FAILED: PoolFailure.WRITE}


class _Job:
    """One order under way on this rank."""

    def __init__(
        self, order: PutOrder, scope: str, batches: Sequence[Batch], deadline: float
    ) -> None:
        self.order = order
        self.scope = scope
        self.deadline = deadline
        self.lock = threading.Lock()
        self._uncopied = set(batches)
        self._unended = set(batches)
        self._failed: set[int] = set()
        self._told_copied = False
        self.is_closed = False

    def copied(self, batch: Batch) -> None:
        """A batch needs its blocks no more."""
        with self.lock:
            self._uncopied.discard(batch)

    def end_batch(self, batch: Batch, failed: Sequence[int]) -> None:
        """A batch is through; ``failed`` are places of blocks."""
        with self.lock:
            self._uncopied.discard(batch)
            if self.is_closed:
                return
            self._unended.discard(batch)
            self._failed.update(failed)

    def close(self) -> int:
        """End now; what is not through counts as failed. Answer how many batches those are."""
        with self.lock:  # not while blocks are being copied
            left = len(self._unended)
            for batch in self._unended:
                self._failed.update(range(batch.start, batch.end))
            self._uncopied.clear()
            self._unended.clear()
            self.is_closed = True
        return left

    def news(self) -> PutReport | None:
        """What to tell since the last call."""
        with self.lock:
            copied = not self._uncopied and not self._told_copied
            ended = not self._unended
            self._told_copied |= copied
            if not copied and not ended:
                return None
            return PutReport(
                copied=int(copied), ended=int(ended), failed=set(self._failed) if ended else set()
            )


class Putter:
    """Carries puts out with a few threads."""

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
        threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: shards: those that this rank writes."""
        self._store = store
        self._shards = shards
        self._copier = copier
        self._staging = staging
        self._health = health
        self._counters = counters
        self._timeout_s = timeout_s
        self._clock = clock
        self._rows = staging.rows_for([caches.object_bytes for caches in shards])
        self._threads = ThreadPoolExecutor(
            threads, thread_name_prefix="kvpp-pool-put", initializer=copier.enter_thread
        )
        self._jobs: list[_Job] = []

    def begin(self, order: PutOrder, scope: str) -> None:
        """Begin to store blocks that the work given to the model until now leaves complete."""
        batches = cut_batches(self._shards, len(order.blocks), self._rows)
        job = _Job(order, scope, batches, self._clock() + self._timeout_s)
        self._jobs.append(job)
        after = self._copier.mark()
        for batch in batches:
            self._threads.submit(self._run, job, batch, after)

    def take_reports(self) -> dict[int, PutReport]:
        """What to tell the scheduler side since the last call, by job."""
        reports: dict[int, PutReport] = {}
        left: list[_Job] = []
        for job in self._jobs:
            if self._clock() >= job.deadline and (batches := job.close()):
                self._counters.failed(PoolFailure.LATE, batches)
                self._health.failed(f"a put took longer than {self._timeout_s:g} s")
            report = job.news()
            if report is not None:
                reports[job.order.job] = report
            if report is None or not report.ended:
                left.append(job)
        self._jobs = left
        return reports

    def close(self) -> None:
        """Stop after the calls under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, job: _Job, batch: Batch, after: StreamEvent | None) -> None:
        failed: Sequence[int] = range(batch.start, batch.end)
        try:
            failed = self._put_batch(job, batch, after)
        except StoreError as error:
            self._health.failed(error)
            self._counters.failed(PoolFailure.UNREACHABLE, batch.end - batch.start)
        except Exception:
            logger.exception("KV pool: storing failed")
            self._counters.failed(PoolFailure.WRITE, batch.end - batch.start)
        finally:
            job.end_batch(batch, failed)

    def _put_batch(self, job: _Job, batch: Batch, after: StreamEvent | None) -> Sequence[int]:
        """Store a batch; answer the places of the blocks that failed."""
        everything = range(batch.start, batch.end)
        if job.is_closed:
            return everything
        if not self._health.may_use():
            self._counters.failed(PoolFailure.UNREACHABLE, len(everything))
            return everything
        name = batch.caches.shard.name
        hashes = job.order.blocks.hashes
        keys = {place: object_key(job.scope, name, hashes[place]) for place in everything}
        present = self._store.exists(list(keys.values()))
        places = [place for place, there in zip(keys, present, strict=True) if not there]
        self._counters.add(present_objects=len(keys) - len(places))
        if not places:
            self._health.worked()
            return ()
        return self._put(job, batch, places, [keys[place] for place in places], after)

    def _put(
        self,
        job: _Job,
        batch: Batch,
        places: Sequence[int],
        keys: Sequence[str],
        after: StreamEvent | None,
    ) -> Sequence[int]:
        slot = self._staging.take(max(0.0, job.deadline - self._clock()))
        if slot is None:
            self._counters.failed(PoolFailure.LATE, len(places))
            return places
        try:
            rows = slot.rows(len(places), batch.caches.object_bytes)
            with job.lock:
                if job.is_closed:
                    return places
                ids = [job.order.blocks.block_ids[place] for place in places]
                self._copier.gather(batch.caches.caches, ids, rows, after)
            job.copied(batch)
            seal(row_array(rows), keys)
            begin = self._clock()
            outcomes = self._store.put(keys, row_buffers(rows))
            self._health.worked()
            self._count(outcomes, batch.caches.shard.payload_bytes, self._clock() - begin)
        finally:
            self._staging.give_back(slot)
        return [
            place for place, outcome in zip(places, outcomes, strict=True) if outcome in _CAUSES
        ]

    def _count(self, outcomes: Sequence[PutOutcome], payload_bytes: int, seconds: float) -> None:
        stored = sum(outcome is PutOutcome.STORED for outcome in outcomes)
        present = sum(outcome is PutOutcome.PRESENT for outcome in outcomes)
        self._counters.add(
            put_objects=stored,
            put_bytes=stored * payload_bytes,
            put_seconds=seconds,
            present_objects=present,
        )
        for outcome in outcomes:
            if outcome in _CAUSES:
                self._counters.failed(_CAUSES[outcome])
