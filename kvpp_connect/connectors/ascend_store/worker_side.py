"""Worker side: one rank's loads and puts, and what it tells the scheduler side of them."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import torch

from kvpp_connect._log import get_logger
from kvpp_connect.broadcast.engine import BundleGate
from kvpp_connect.connectors.ascend_store.backends.base import Buffer, PoolStore
from kvpp_connect.connectors.ascend_store.copying import (
    BlockCopier,
    DeviceCopier,
    HostCopier,
    byte_blocks,
)
from kvpp_connect.connectors.ascend_store.counters import PoolCounters
from kvpp_connect.connectors.ascend_store.health import StoreHealth
from kvpp_connect.connectors.ascend_store.layerwise import LayerLoader, OwnedLayersGate
from kvpp_connect.connectors.ascend_store.loader import Load, Loader, LoadTools
from kvpp_connect.connectors.ascend_store.orders import PoolOrders, PoolReport
from kvpp_connect.connectors.ascend_store.putter import Putter
from kvpp_connect.connectors.ascend_store.shard_caches import ShardCaches
from kvpp_connect.connectors.ascend_store.shards import (
    HeldCaches,
    PoolComponent,
    Shard,
    StageShards,
    plan_stage,
)
from kvpp_connect.connectors.ascend_store.staging import Staging, allocate, count_slots
from kvpp_connect.connectors.caches import BlockShape, describe_caches
from kvpp_connect.errors import ConfigError
from kvpp_connect.layout import ComponentAddress, RankPlacement, TokenShard

if TYPE_CHECKING:
    from kvpp_connect.connectors.ascend_store.config import PoolConfig
    from kvpp_connect.platforms.device import Device

logger = get_logger(__name__)
_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank stands, and how it speaks with its group.

    Attributes:
        stage: pipeline stage.
        rank: rank in the KVPP group.
        gather: exchanges bytes inside the group, ordered by rank; collective.
        placement: the rank's placement under KVPP, or ``None`` where every rank holds all.
        tokens: which tokens of each block the rank keeps.
        set_gate: lets somebody hold broadcasts back.
    """

    stage: int
    rank: int
    gather: Callable[[bytes], list[bytes]]
    placement: RankPlacement | None
    tokens: TokenShard
    set_gate: Callable[[BundleGate], None] | None = None


@dataclass(slots=True, kw_only=True)
class PoolResults:
    """What to report to vLLM: requests whose load has ended, blocks that were not loaded."""

    received: set[str] = field(default_factory=set[str])
    invalid_block_ids: set[int] = field(default_factory=set[int])


class WorkerSide:
    """One rank's worker side. Driven by the thread that runs the model."""

    def __init__(
        self,
        *,
        config: "PoolConfig",
        shape: BlockShape,
        open_store: Callable[[], PoolStore],
        make_device: "Callable[[], Device] | None" = None,
    ) -> None:
        """Prepare; nothing is opened before the caches are there.

        Args:
            open_store: connects to the store.
            make_device: the accelerator under the caches; ``None`` on a CPU.
        """
        self._config = config
        self._shape = shape
        self._open_store = open_store
        self._make_device = make_device
        self._counters = PoolCounters()
        self._store: PoolStore | None = None
        self._tools: LoadTools | None = None
        self._loader: Loader | None = None
        self._layers: LayerLoader | None = None
        self._putter: Putter | None = None
        self._loads: dict[str, Load] = {}
        self._invalid: set[int] = set()
        self._untold_stage: StageShards | None = None

    def register(self, kv_caches: Mapping[str, torch.Tensor], place: RankPlace) -> None:
        """Agree with the group on the shards, connect to the store, and get ready.

        Raises:
            LayoutError: the group's caches do not form shards.
            ConfigError: the store cannot be reached, or staging is too small.
        """
        addresses = describe_caches(kv_caches, self._shape, place.placement)
        held = _held(place, addresses)
        stage = plan_stage(place.stage, _meet(held, place.gather))
        views = {
            address.layer_name: byte_blocks(
                kv_caches[address.layer_name], address, self._shape.num_blocks
            )
            for address in addresses
        }
        self._store = self._open_store()
        if self._config.load_mode == "layerwise" and not self._store.supports_ranges:
            raise ConfigError(
                f"AscendStoreConnector: use_layerwise reads parts of objects, which backend "
                f"{self._config.backend} cannot. Remove it, or use backend mooncake"
            )
        self._start(stage, held, views)
        if self._layers and place.placement and place.set_gate:
            place.set_gate(OwnedLayersGate(self._layers, place.placement))
        # One rank of each stage describes it to the scheduler side.
        self._untold_stage = stage if place.rank == 0 else None
        writes = stage.written_by(place.rank)
        logger.info(
            "AscendStoreConnector worker pp%d/rank%d: stores %s (%d bytes a block) through %s, "
            "loads %s",
            place.stage,
            place.rank,
            ", ".join(shard.name for shard in writes) or "nothing",
            sum(shard.payload_bytes for shard in writes),
            self._config.backend,
            ", ".join(shard.name for shard in stage.held_by(held)),
        )

    def _start(
        self, stage: StageShards, held: HeldCaches, views: Mapping[str, torch.Tensor]
    ) -> None:
        assert self._store is not None, "the store is open"
        size = self._config.staging_bytes
        memory = allocate(2 * size, pinned=self._make_device is not None)
        self._store.register(Buffer(memory.data_ptr(), memory.numel()))
        health = StoreHealth(f"{self._config.backend} (rank {held.rank})")
        copier = self._copier(views)

        def caches_of(shards: tuple[Shard, ...]) -> list[ShardCaches]:
            return [
                ShardCaches(shard=s, caches=tuple(views[c.layer_name] for c in s.components))
                for s in shards
            ]

        loads, puts = caches_of(stage.held_by(held)), caches_of(stage.written_by(held.rank))
        threads = _thread_count()
        self._tools = LoadTools(
            store=self._store,
            copier=copier,
            staging=_staging(memory[:size], loads),
            health=health,
            counters=self._counters,
            timeout_s=self._config.load_timeout_s,
            verify=self._config.verify,
        )
        if self._config.load_mode == "layerwise":
            self._layers = LayerLoader(self._tools, loads, threads)
        else:
            self._loader = Loader(self._tools, loads, threads)
        self._putter = Putter(
            store=self._store,
            shards=puts,
            copier=copier,
            staging=_staging(memory[size:], puts),
            health=health,
            counters=self._counters,
            timeout_s=self._config.load_timeout_s,
            threads=threads,
        )

    def _copier(self, views: Mapping[str, torch.Tensor]) -> BlockCopier:
        if self._make_device is None:
            return HostCopier()
        return DeviceCopier(self._make_device(), next(iter(views.values())).device)

    def start_loads(self, orders: PoolOrders) -> None:
        """Begin the step's loads.

        Those that the forward reads have ended when this returns, unless each layer waits for its
        own.
        """
        if self._layers is not None and orders.loads:
            self._layers.begin(orders.loads, orders.scope)
            return
        if self._loader is None or not (orders.loads or orders.cancelled):
            return
        for request_id in orders.cancelled:
            if load := self._loads.get(request_id):
                load.close()
        begun = [self._loader.begin(order, orders.scope) for order in orders.loads]
        for load in begun:
            if load.order.in_step:
                self._loader.wait(load)
                self._note_invalid(load)
            else:
                self._loads[load.order.request_id] = load

    def wait_for_layer(self, layer_name: str) -> None:
        """Return when a layer's caches may be read."""
        if self._layers is not None:
            self._layers.wait(layer_name)

    def start_puts(self, orders: PoolOrders) -> None:
        """Begin the step's puts, after its forward."""
        if not orders.puts:
            return
        assert self._putter is not None, "vLLM registers the caches before the first step"
        for order in orders.puts:
            self._putter.begin(order, orders.scope)

    def take_results(self) -> PoolResults:
        """What ended since the last call."""
        for load in self._layers.finish() if self._layers is not None else ():
            self._note_invalid(load)
        loader = self._loader
        # Asked once: a load may end at any moment, and must not be received without its failures.
        received = {
            request_id
            for request_id, load in self._loads.items()
            if loader is not None and loader.is_due(load)
        }
        for request_id in received:
            self._note_invalid(self._loads.pop(request_id))
        invalid, self._invalid = self._invalid, set()
        return PoolResults(received=received, invalid_block_ids=invalid)

    def take_report(self) -> PoolReport | None:
        """What the scheduler side has to know; ``None`` for no news."""
        report = PoolReport()
        if self._untold_stage is not None:
            report.stages.append(self._untold_stage)
            self._untold_stage = None
        if self._putter is not None:
            report.puts = self._putter.take_reports()
        if self._tools is not None:
            report.lost = self._tools.take_lost()
        return report or None

    def take_counts(self) -> dict[str, float]:
        """Counters since the last call, by metric name."""
        return self._counters.take()

    def close(self) -> None:
        """Stop, and leave the store. Idempotent."""
        for part in (self._loader, self._layers, self._putter, self._store):
            if part is not None:
                part.close()

    def _note_invalid(self, load: Load) -> None:
        self._invalid.update(load.order.blocks.block_ids[load.first_bad :])


def _staging(memory: torch.Tensor, shards: list[ShardCaches]) -> Staging:
    return Staging(memory, count_slots(memory.numel(), [s.object_bytes for s in shards]))


def _thread_count() -> int:
    """Threads for puts, and as many for loads.

    While one is in a call of the store another one copies and seals. With a core or two it would
    only take time from the transfer itself, and from Mooncake's call, which polls.
    """
    return _THREADS if len(os.sched_getaffinity(0)) > _THREADS else 1


def _held(place: RankPlace, addresses: tuple[ComponentAddress, ...]) -> HeldCaches:
    return HeldCaches(
        rank=place.rank,
        components=tuple(
            PoolComponent(layer_name=a.layer_name, page_bytes=a.page_bytes, dtype=a.dtype)
            for a in addresses
        ),
        tokens=place.tokens,
    )


def _meet(mine: HeldCaches, gather: Callable[[bytes], list[bytes]]) -> list[HeldCaches]:
    decoder = msgspec.msgpack.Decoder(HeldCaches)
    return [decoder.decode(row) for row in gather(msgspec.msgpack.encode(mine))]
