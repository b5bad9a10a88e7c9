"""Loads a step's blocks layer by layer while the step runs: layer i + 1 comes while i computes.

Each layer waits for its own bytes, in the order of layers; drafts come first and are there before
the step begins. Under KVPP the broadcast engine waits here for what this rank owns, elsewhere each
layer's attention does. Seals cover whole objects, so what they say is known with the last layer: a
damaged object is noticed after the step has read it, and the step is computed again.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.ascend_store.backends.base import GetOutcome, StoreError
from kvpp_connect.connectors.ascend_store.counters import PoolFailure
from kvpp_connect.connectors.ascend_store.loader import Load, LoadTools
from kvpp_connect.connectors.ascend_store.objects import HEADER_BYTES, PartialFolds
from kvpp_connect.connectors.ascend_store.orders import LoadOrder
from kvpp_connect.connectors.ascend_store.shard_caches import ShardCaches
from kvpp_connect.connectors.ascend_store.shards import Shard, layer_of, object_key
from kvpp_connect.connectors.ascend_store.staging import row_array, row_buffers
from kvpp_connect.layout import RankPlacement

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerPart:
    """One decoder layer's caches inside the objects of a shard.

    ``[begin, end)`` are bytes of the object, the header included in the first part.
    """

    shard: Shard
    layers: frozenset[str]
    caches: tuple[torch.Tensor, ...]
    begin: int
    end: int

    @property
    def header_bytes(self) -> int:
        """Bytes in front of the first cache's page."""
        return HEADER_BYTES if self.begin == 0 else 0


def cut_layers(shards: Sequence[ShardCaches]) -> tuple[list[LayerPart], int]:
    """Cut shards into layers, in the order in which they are loaded.

    Returns:
        The parts, and the number of first ones that have to be there before the step: drafts.
    """
    drafts = [s for s in shards if s.shard.name.endswith("-d")]
    targets = [s for s in shards if not s.shard.name.endswith("-d")]
    first = [part for caches in drafts for part in _parts_of(caches)]
    return first + [part for caches in targets for part in _parts_of(caches)], len(first)


def _parts_of(shard: ShardCaches) -> list[LayerPart]:
    layers: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for component, cache in zip(shard.shard.components, shard.caches, strict=True):
        name = component.layer_name
        layers.setdefault(layer_of(name), []).append((name, cache))
    parts: list[LayerPart] = []
    begin, end = 0, HEADER_BYTES
    for caches in layers.values():
        end += sum(cache.shape[1] for _, cache in caches)
        parts.append(
            LayerPart(
                shard=shard.shard,
                layers=frozenset(name for name, _ in caches),
                caches=tuple(cache for _, cache in caches),
                begin=begin,
                end=end,
            )
        )
        begin = end
    return parts


@dataclass(slots=True, eq=False)
class _Batch:
    """Blocks ``[start, end)`` of one load, for one layer."""

    load: Load
    part: int
    start: int
    end: int


@dataclass(slots=True)
class _StepLoads:
    """Everything that one step loads."""

    loads: list[Load]
    folds: dict[tuple[int, str], PartialFolds]  # by load and shard
    left: list[int]  # batches by part
    ready: list[threading.Event]
    lock: threading.Lock = field(default_factory=threading.Lock)


class LayerLoader:
    """Loads of the step that runs. ``begin`` -> ``wait``s -> ``finish``."""

    def __init__(
        self,
        tools: LoadTools,
        shards: Sequence[ShardCaches],
        threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: shards: all whose caches this rank holds."""
        self._tools = tools
        self._clock = clock
        self._parts, self._drafts = cut_layers(shards)
        self._part_of = {name: i for i, part in enumerate(self._parts) for name in part.layers}
        # Where a layer has several caches, some are read before its attention is asked to wait.
        self._ahead = int(any(len(part.layers) > 1 for part in self._parts))
        self._rows = tools.staging.rows_for([part.end - part.begin for part in self._parts])
        self._threads = ThreadPoolExecutor(
            threads, thread_name_prefix="kvpp-pool-layers", initializer=tools.copier.enter_thread
        )
        self._step: _StepLoads | None = None

    def begin(self, orders: Sequence[LoadOrder], scope: str) -> None:
        """Begin a step's loads; what has to be there before it is, when this returns."""
        deadline = self._clock() + self._tools.timeout_s
        loads = [Load(order, scope, deadline) for order in orders]
        batches = self._cut(loads)
        step = _StepLoads(
            loads=loads,
            folds=self._make_folds(loads),
            left=[sum(batch.part == i for batch in batches) for i in range(len(self._parts))],
            ready=[threading.Event() for _ in self._parts],
        )
        for load in loads:
            load.begin([batch for batch in batches if batch.load is load])
        for event, left in zip(step.ready, step.left, strict=True):
            if not left:
                event.set()
        self._step = step
        for batch in batches:
            self._threads.submit(self._run, step, batch)
        for part in range(min(self._drafts + self._ahead, len(self._parts))):
            self._wait_for(part)

    def is_ready(self, layer_name: str) -> bool:
        """Whether a layer's caches may be read."""
        part = self._part_of.get(layer_name)
        return self._step is None or part is None or self._step.ready[part].is_set()

    def wait(self, layer_name: str) -> None:
        """Return when a layer's caches may be read: in time, whatever becomes of its bytes.

        Where caches of the next layer are read unasked, those as well.
        """
        part = self._part_of.get(layer_name)
        if self._step is None or part is None:
            return
        for i in range(part, min(part + self._ahead + 1, len(self._parts))):
            self._wait_for(i)

    def finish(self) -> list[Load]:
        """End the step's loads; answer them."""
        step, self._step = self._step, None
        if step is None:
            return []
        for load in step.loads:
            if not load.ended.wait(max(0.0, load.deadline - self._clock())):
                self._tools.give_up(load)
        if self._tools.verify:
            self._check(step)
        return step.loads

    def close(self) -> None:
        """Stop after the calls under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _cut(self, loads: Sequence[Load]) -> list[_Batch]:
        return [
            _Batch(load, part, start, min(start + self._rows, len(load.order.blocks)))
            for part in range(len(self._parts))
            for load in loads
            for start in range(0, len(load.order.blocks), self._rows)
        ]

    def _make_folds(self, loads: Sequence[Load]) -> dict[tuple[int, str], PartialFolds]:
        shards = {part.shard.name: part.shard for part in self._parts}
        return {
            (i, name): PartialFolds(len(load.order.blocks), shard.payload_bytes)
            for i, load in enumerate(loads)
            for name, shard in shards.items()
        }

    def _wait_for(self, part: int) -> None:
        step = self._step
        if step is None or step.ready[part].is_set():
            return
        deadline = max(load.deadline for load in step.loads)
        if not step.ready[part].wait(max(0.0, deadline - self._clock())):
            for load in step.loads:
                self._tools.give_up(load)
            for event in step.ready:
                event.set()

    def _run(self, step: _StepLoads, batch: _Batch) -> None:
        first_bad: int | None = batch.start
        try:
            if not batch.load.is_closed and batch.start < batch.load.first_bad:
                first_bad = self._load_batch(step, batch)
        except StoreError as error:
            self._tools.health.failed(error)
            self._tools.counters.failed(PoolFailure.UNREACHABLE, batch.end - batch.start)
        except Exception:
            logger.exception("KV pool: loading a layer failed")
            self._tools.counters.failed(PoolFailure.READ, batch.end - batch.start)
        finally:
            batch.load.end_batch(batch, first_bad)
            with step.lock:
                step.left[batch.part] -= 1
                if not step.left[batch.part]:
                    step.ready[batch.part].set()

    def _load_batch(self, step: _StepLoads, batch: _Batch) -> int | None:
        """Load a batch; answer the place of its first failed block."""
        tools, load, part = self._tools, batch.load, self._parts[batch.part]
        with tools.slot(load, batch.end - batch.start) as lease:
            if lease is None:
                return batch.start
            hashes = load.order.blocks.hashes[batch.start : batch.end]
            keys = [object_key(load.scope, part.shard.name, block) for block in hashes]
            rows = lease.slot.rows(len(keys), part.end - part.begin)
            begin = self._clock()
            outcomes = tools.store.get_ranges(keys, row_buffers(rows), part.begin)
            seconds = self._clock() - begin
            tools.health.worked()
            lease.is_clean = GetOutcome.FAILED not in outcomes
            good = tools.count_good(outcomes, keys, hashes)
            with load.lock:
                if good and not load.is_closed:
                    ids = load.order.blocks.block_ids[batch.start : batch.start + good]
                    tools.copier.scatter(rows[:good], part.caches, ids, part.header_bytes)
                    folds = step.folds[step.loads.index(load), part.shard.name]
                    folds.add(batch.start, row_array(rows[:good]), part.begin)
                    size = part.end - part.begin - part.header_bytes
                    tools.counters.add(
                        load_objects=good * (part.begin == 0),
                        load_bytes=good * size,
                        load_seconds=seconds,
                    )
        return None if good == len(keys) else batch.start + good

    def _check(self, step: _StepLoads) -> None:
        for i, load in enumerate(step.loads):
            for name in {part.shard.name for part in self._parts}:
                folds = step.folds[i, name]
                for place in range(load.first_bad):
                    key = object_key(load.scope, name, load.order.blocks.hashes[place])
                    if not folds.is_intact(place, key):
                        load.first_bad = place
                        self._tools.drop_damaged(key, load.order.blocks.hashes[place])
                        break


class OwnedLayersGate:
    """Holds the broadcasts of owned layers back until their caches are loaded."""

    def __init__(self, loader: LayerLoader, placement: RankPlacement) -> None:
        self._loader = loader
        self._names = [bundle.components[0].component.layer_name for bundle in placement.bundles]

    def is_open(self, ordinal: int) -> bool:
        """Whether the layer's caches may be read."""
        return self._loader.is_ready(self._names[ordinal])

    def wait(self, ordinal: int) -> None:
        """Return when they may be."""
        self._loader.wait(self._names[ordinal])
