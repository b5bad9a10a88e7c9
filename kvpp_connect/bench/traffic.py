"""Which bytes the engine broadcasts in a step, counted and compared with the plan.

A model of six layers without a model: the engine runs its forwards over a real transport, the
payloads give it what to send, and a batch of requests says which blocks are active. Some blocks are
shared by all requests, as a common prefix is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from kvpp_connect.broadcast.active import ActiveBlocks
from kvpp_connect.broadcast.collective import GroupBroadcast
from kvpp_connect.broadcast.engine import PrefetchEngine
from kvpp_connect.broadcast.payload import CompactPayload, FullPayload
from kvpp_connect.layout import (
    CacheComponent,
    FullScratch,
    GroupLayout,
    RunningScratch,
    place_rank,
    plan_group,
    stage_layers,
)
from kvpp_connect.planning.broadcasts import step_traffic
from kvpp_connect.platforms.cpu import CpuDevice
from kvpp_connect.platforms.local import LocalDevice

Mode = Literal["full", "compact"]
LAYERS = 6
BLOCK_BYTES = 36_864  # 16 tokens of 512 + 64 float32 values
BLOCKS = 256
REQUESTS = (1, 2, 4, 8, 16, 32)
BLOCKS_PER_REQUEST = 6
SHARED_BLOCKS = 2  # of each request's


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """One forward with history on one rank."""

    mode: Mode
    requests: int
    active_blocks: int  # distinct ones
    broadcasts: int
    moved_bytes: int  # sent or received, by the engine's counters
    planned_bytes: int

    @property
    def failures(self) -> tuple[str, ...]:
        """What is not as planned."""
        where = f"{self.mode}, {self.requests} requests"
        found: list[str] = []
        if self.broadcasts != LAYERS:
            found.append(f"{where}: {self.broadcasts} broadcasts for {LAYERS} layers")
        if self.moved_bytes != self.planned_bytes:
            found.append(f"{where}: moved {self.moved_bytes} bytes, planned {self.planned_bytes}")
        return tuple(found)


def measure_step_bytes(
    transport: GroupBroadcast, place: LocalDevice | None = None
) -> tuple[StepBytes, ...]:
    """Run one forward for each mode and number of requests. Collective.

    Args:
        place: of this rank's caches; default: the CPU.
    """
    return tuple(
        _step(mode, requests, transport, place)
        for mode in ("full", "compact")
        for requests in REQUESTS
    )


@dataclass(frozen=True, slots=True)
class StepEngine:
    """The engine of one rank, ready for forwards of one batch."""

    engine: PrefetchEngine
    layout: GroupLayout

    def run(self, work: Callable[[], None] = lambda: None) -> None:
        """One forward; ``work`` is done before each layer asks for its cache and after."""
        self.engine.arm()
        for ordinal in range(len(self.layout.stage.targets)):
            work()
            self.engine.acquire(ordinal)
            work()
            self.engine.release(ordinal)
        self.engine.finish()


def make_engine(
    mode: Mode,
    table: torch.Tensor,
    blocks: int,
    layers: int,
    transport: GroupBroadcast,
    place: LocalDevice | None = None,
) -> StepEngine:
    """Build this rank's layout, memory and engine.

    Args:
        table: ids of the batch's blocks, shape ``(requests, blocks of each)``.
        blocks: of each layer.
        place: of this rank's caches; default: the CPU.
    """
    where = place.memory if place else torch.device("cpu")
    device = place.platform.create_device() if place else CpuDevice()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    targets = {
        index: [CacheComponent(layer_name=f"layers.{index}", page_bytes=BLOCK_BYTES)]
        for index in range(layers)
    }
    scratch = FullScratch() if mode == "full" else RunningScratch(least=blocks, most=blocks)
    layout = plan_group(stage_layers(targets=targets, drafts=[]), ranks, 64, scratch)
    placement = place_rank(layout, rank, blocks)
    memory = torch.zeros(placement.total_bytes, dtype=torch.uint8, device=where)
    if mode == "full":
        payload = FullPayload(placement, memory)
    else:
        payload = CompactPayload(placement, memory)
        payload.use(ActiveBlocks(table, torch.full((len(table),), table.shape[1]), blocks, where))
    return StepEngine(PrefetchEngine(placement, payload, transport, device), layout)


def _step(
    mode: Mode, requests: int, transport: GroupBroadcast, place: LocalDevice | None
) -> StepBytes:
    table = _block_table(requests)
    made = make_engine(mode, table, BLOCKS, LAYERS, transport, place)
    made.run()
    if place:
        place.finish()
    counters = made.engine.counters
    active = len(set(table.flatten().tolist()))
    planned = step_traffic(mode, (made.layout,), all_blocks=BLOCKS, active_blocks=active)
    return StepBytes(
        mode=mode,
        requests=requests,
        active_blocks=active,
        broadcasts=counters.broadcasts,
        moved_bytes=counters.sent_bytes + counters.received_bytes,
        planned_bytes=planned.step_bytes,
    )


def _block_table(requests: int) -> torch.Tensor:
    """Block ids, shape ``(requests, BLOCKS_PER_REQUEST)``: the shared ones first."""
    own = BLOCKS_PER_REQUEST - SHARED_BLOCKS
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(requests))
    shared = order[:SHARED_BLOCKS].expand(requests, SHARED_BLOCKS)
    return torch.cat([shared, order[SHARED_BLOCKS:][: requests * own].view(requests, own)], dim=1)
