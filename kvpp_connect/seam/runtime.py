"""The KVPP side of one worker process: plan, budget, tensor placement, engine, layer hooks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvpp_connect._log import get_logger
from kvpp_connect.broadcast.collective import GroupBroadcast
from kvpp_connect.broadcast.engine import BundleGate, PrefetchEngine
from kvpp_connect.broadcast.payload import CompactPayload, FullPayload
from kvpp_connect.broadcast.transports import create_transport
from kvpp_connect.config import KvppConfig
from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import (
    GroupLayout,
    RankPlacement,
    ScratchSize,
    StageLayers,
    capacity_by_bytes,
    group_blocks,
    layout_digest,
    place_rank,
    plan_budget,
    plan_group,
)
from kvpp_connect.platforms.base import Platform
from kvpp_connect.seam.groups import GroupInfo, gather_in_group, world_groups
from kvpp_connect.seam.hooks import LayerHooks
from kvpp_connect.seam.older_vllm import has_sync_loads
from kvpp_connect.seam.tensors import narrow_to_scratch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from kvpp_connect.seam.compact import CompactForward

logger = get_logger(__name__)

_active_placement: RankPlacement | None = None
_gate: BundleGate | None = None


def active_placement() -> RankPlacement | None:
    """Placement of this worker process; ``None`` with KVPP off. For the connectors."""
    return _active_placement


def set_bundle_gate(gate: BundleGate) -> None:
    """Let somebody hold broadcasts back who loads caches while forwards run. For the connectors.

    To be called before the engine is made, when vLLM registers the caches with connectors.
    """
    global _gate  # one worker, one gate per process
    _gate = gate


def has_history(scheduler_output: "SchedulerOutput") -> bool:
    """Whether a scheduled request already has computed tokens.

    Read from the global batch, which is the same on all ranks of the group; a decision from
    anything local would let collectives hang.
    """
    if scheduler_output.total_num_scheduled_tokens == 0:
        return False
    new = scheduler_output.scheduled_new_reqs
    cached = scheduler_output.scheduled_cached_reqs
    return any(request.num_computed_tokens > 0 for request in new) or any(
        tokens > 0 for tokens in cached.num_computed_tokens
    )


class RunnerCompact(Protocol):
    """Compact mode in one kind of model runner."""

    def __init__(
        self,
        placement: RankPlacement,
        payload: CompactPayload,
        engine: PrefetchEngine,
        runner: Any,  # noqa: ANN401 - the kind of runner
    ) -> None: ...

    def open(self, *, history: bool, start: bool = True) -> None:
        """A step of real requests begins; arms the engine once the batch's blocks are known."""
        ...

    def close(self) -> None:
        """The step is over."""
        ...

    def warming_up(self) -> AbstractContextManager[None]:
        """Surround steps that vLLM makes up without its scheduler."""
        ...


class KvppRuntime:
    """KVPP in one worker. Life cycle: ``budget`` -> ``place`` -> ``attach`` -> ``forward``s."""

    def __init__(
        self,
        config: KvppConfig,
        platform: Platform,
        stage: StageLayers,
        planner_block_bytes: int,
        group: GroupInfo,
        scratch: ScratchSize,
        hooks_class: type[LayerHooks] = LayerHooks,
        compact_class: type[RunnerCompact] | None = None,
    ) -> None:
        self._config = config
        self._platform = platform
        self._group = group
        self._planner_bytes = planner_block_bytes
        self._hooks_class = hooks_class
        self._compact_class = compact_class
        self._transport: GroupBroadcast | None = None
        self._layout = plan_group(
            stage, group.group_size, platform.alignment_bytes, scratch, platform.block_numbers
        )
        self._memory_bytes: int | None = None
        self._placement: RankPlacement | None = None
        self._engine: PrefetchEngine | None = None
        self._hooks: LayerHooks | None = None
        self._compact: RunnerCompact | None = None
        check_same_plan(self._layout, group)

    def budget(self, memory_bytes: int) -> int:
        """Turn this rank's KV memory into the bytes to report to vLLM's planner."""
        budget = plan_budget(
            self._layout, self._group.rank_in_group, memory_bytes, self._planner_bytes
        )
        self._memory_bytes = memory_bytes
        if self._group.rank_in_group == 0:
            self._announce(memory_bytes, budget.plain_blocks)
        return budget.logical_bytes

    def _announce(self, memory_bytes: int, plain_blocks: int) -> None:
        layout = self._layout
        blocks = group_blocks(layout, memory_bytes)
        scratch_blocks = layout.scratch.blocks(blocks)
        note = ""
        if blocks < plain_blocks:
            note = "; LESS than without KVPP: too few layers for the scratch"
        logger.info(
            "KVPP %s: stage %d, %d target layers over %d ranks, owned per rank %s, %d draft "
            "cache(s) on each, %d blocks fit where plain vLLM has %d (x%.2f, formula x%.2f), "
            "scratch slots of %d blocks%s",
            self._config.mode,
            self._group.pp_rank,
            len(layout.stage.targets),
            layout.group_size,
            [layout.owners.count(rank) for rank in range(self._group.group_size)],
            len(layout.stage.drafts),
            blocks,
            plain_blocks,
            blocks / max(plain_blocks, 1),
            capacity_by_bytes([layout], scratch_blocks / blocks),
            scratch_blocks,
            note,
        )

    def place(self, cache_config: "KVCacheConfig", enforced_blocks: bool) -> RankPlacement:
        """Place this rank's caches, for the number of blocks that the planner settled on.

        Args:
            enforced_blocks: the user set the block count (``num_gpu_blocks_override``), so it
                need not fit the measured memory.

        Raises:
            LayoutError: several cache groups, or more blocks than the memory holds.
        """
        global _active_placement  # one worker, one placement per process
        if len(cache_config.kv_cache_groups) != 1:
            raise LayoutError(
                f"KVPP: vLLM planned {len(cache_config.kv_cache_groups)} KV cache groups, this "
                "version of kvpp-connect supports one. Turn enable_kvpp off"
            )
        blocks = cache_config.num_blocks
        placement = place_rank(self._layout, self._group.rank_in_group, blocks)
        memory = self._memory_bytes
        if memory is not None and placement.total_bytes > memory and not enforced_blocks:
            raise LayoutError(
                f"KVPP rank {placement.rank}: {blocks} blocks need {placement.total_bytes} bytes, "
                f"{memory} are there; vLLM's planner does not divide by {self._planner_bytes} "
                "bytes per block as expected"
            )
        self._placement = _active_placement = placement
        return placement

    def connect(self) -> GroupBroadcast:
        """Make this process's transport, once. Collective over the world."""
        if self._transport is None:
            self._transport = create_transport(
                self._config.transport,
                self._platform,
                world_groups(self._group.group_size),
                gather_in_group,
                self._config.broadcast_timeout_s,
            )
        return self._transport

    def warm_up(self, device: torch.device) -> None:
        """Use the transport once; it keeps buffers on the device from then on.

        To be called before memory is measured, where broadcasts go through a device's collective.
        Collective over the world.
        """
        first = torch.zeros(1, dtype=torch.int8, device=device)
        self.connect().start(first, source_rank=0).wait()

    def attach(
        self, memory: torch.Tensor, layers: "dict[str, Any]", runner: "GPUModelRunner"
    ) -> None:
        """Create the engine over the allocation and hook the layers.

        Args:
            memory: the rank's allocation as bytes.
            layers: vLLM's layers by name, with their caches bound.
        """
        placement = self._placement
        assert placement is not None, "attach comes after place"
        transport, device = self.connect(), self._platform.create_device()
        if self._config.mode == "compact":
            payload = CompactPayload(placement, memory)
            self._engine = PrefetchEngine(placement, payload, transport, device, _gate)
            narrow_to_scratch(placement, layers)
            make_compact = self._compact_class or stock_compact(runner)
            self._compact = make_compact(placement, payload, self._engine, runner)
        else:
            payload = FullPayload(placement, memory)
            self._engine = PrefetchEngine(placement, payload, transport, device, _gate)
        self._hooks = self._hooks_class(placement, layers, self._engine)

    def warming_up(self) -> AbstractContextManager[None]:
        """Surround what vLLM does before the first request."""
        return self._compact.warming_up() if self._compact is not None else nullcontext()

    @contextmanager
    def forward(self, scheduler_output: "SchedulerOutput") -> Iterator[None]:
        """Surround the model runner's step: broadcasts if it has history.

        Raises:
            BroadcastError: a broadcast failed, or a layer did not take its turn.
        """
        engine, hooks = self._engine, self._hooks
        assert engine is not None, "a forward comes after attach"
        assert hooks is not None, "a forward comes after attach"
        history = has_history(scheduler_output)
        if self._layout.slots_change_shape and scheduler_output.total_num_scheduled_tokens > 0:
            # Else a layer may read, behind its tokens, bytes of another layer as numbers that
            # they are not, such as NaN.
            history = True
        # What connectors load for this forward is not there yet: vLLM asks for it further down.
        loads = has_sync_loads(scheduler_output)
        if self._compact is not None:
            # Armed from inside the runner, as soon as it knows the batch's blocks.
            self._compact.open(history=history, start=not loads)
        elif history:
            engine.arm(start=not loads)
        try:
            yield
        except BaseException as error:
            if history:
                engine.abandon(f"the forward failed: {error}")
            raise
        finally:
            if self._compact is not None:
                self._compact.close()
        if history:
            hooks.finish()


def check_same_plan(layout: GroupLayout, group: GroupInfo) -> None:
    """Compare the plans of a group's ranks. Collective over the group.

    Raises:
        LayoutError: two of them differ.
    """
    digests = gather_in_group(layout_digest(layout).encode())
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise LayoutError(
                f"KVPP rank {group.rank_in_group}: ranks 0 and {rank} of the group plan different "
                f"layouts ({digests[0][:12].decode()} and {digest[:12].decode()}); all ranks "
                "need the same model, vLLM and kvpp-connect"
            )


def stock_compact(runner: Any) -> "type[CompactForward]":  # noqa: ANN401 - vLLM's
    """Compact mode in a model runner of stock vLLM."""
    if runner.vllm_config.use_v2_model_runner:
        from kvpp_connect.seam.compact_v2 import CompactForwardV2

        return CompactForwardV2
    from kvpp_connect.seam.compact_v1 import CompactForwardV1

    return CompactForwardV1
