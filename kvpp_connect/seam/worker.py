"""What KVPP adds to a vLLM worker, whatever its platform. Forwards to :class:`KvppRuntime`."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvpp_connect._log import get_logger
from kvpp_connect.config import parse_additional_config
from kvpp_connect.errors import ConfigError
from kvpp_connect.layout import StageLayers
from kvpp_connect.platforms.base import select_platform
from kvpp_connect.seam import ledger
from kvpp_connect.seam.drafts import draft_cache_names
from kvpp_connect.seam.groups import group_info
from kvpp_connect.seam.hooks import LayerHooks
from kvpp_connect.seam.runner_v2_ledger import RUNNER_V2_LEDGER
from kvpp_connect.seam.runtime import KvppRuntime, RunnerCompact
from kvpp_connect.seam.settings import check_connector, settle_mode
from kvpp_connect.seam.specs import planner_block_bytes, stage_from_specs
from kvpp_connect.seam.tensors import bound_allocation, placed

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
    from vllm.v1.worker.worker_base import CompilationTimes

logger = get_logger(__name__)


class KvppWorkerMixin:
    """Goes in front of a vLLM ``Worker`` class."""

    # What vLLM's Worker provides; declared for the type checker only.
    vllm_config: Any
    model_runner: Any
    _kvpp: KvppRuntime | None = None
    _kvpp_hooks: type[LayerHooks] = LayerHooks
    _kvpp_compact: type[RunnerCompact] | None = None  # what stock vLLM's runner needs

    def _kvpp_runtime(self) -> KvppRuntime:
        if self._kvpp is None:
            if getattr(self.vllm_config, "use_v2_model_runner", False):
                ledger.verify(RUNNER_V2_LEDGER)
            check_connector(self.vllm_config)
            config = parse_additional_config(self.vllm_config.additional_config)
            platform = select_platform(self.vllm_config.device_config.device_type)
            specs = self.get_kv_cache_spec()  # type: ignore[attr-defined]
            stage = self._kvpp_stage(specs)
            choice, scratch = settle_mode(self.vllm_config, config, stage)
            block_bytes = planner_block_bytes(self.vllm_config, specs)
            group = group_info()
            if choice.reason and group.pp_rank == group.rank_in_group == 0:
                logger.warning(
                    "KVPP full instead of compact, so that each step with history moves whole "
                    "caches: %s",
                    choice.reason,
                )
            settled = replace(config, mode=choice.mode)
            self._kvpp = KvppRuntime(
                settled,
                platform,
                stage,
                block_bytes,
                group,
                scratch,
                self._kvpp_hooks,
                self._kvpp_compact,
            )
        return self._kvpp

    def _kvpp_stage(self, specs: "dict[str, KVCacheSpec]") -> StageLayers:
        return stage_from_specs(specs, draft_cache_names(self.model_runner))

    def determine_available_memory(self) -> int:
        """Bytes for vLLM's planner: the blocks that really fit times its bytes per block."""
        memory_bytes: int = super().determine_available_memory()  # type: ignore[misc]
        return self._kvpp_runtime().budget(memory_bytes)

    def initialize_from_config(self, kv_cache_config: "KVCacheConfig") -> None:
        """Allocate this rank's placement instead of the planner's, then attach the engine."""
        runtime = self._kvpp_runtime()
        cache = self.vllm_config.cache_config
        layout = cache.get_resolved_kv_cache_layout()
        if layout.is_block_outermost:
            raise ConfigError(
                f"enable_kvpp: the KV cache layout is {layout.name}, which mixes layers inside a "
                "block; KVPP needs the layer outermost. Set VLLM_KV_CACHE_LAYOUT=LBNHC"
            )
        placement = runtime.place(kv_cache_config, cache.num_gpu_blocks_override is not None)
        super().initialize_from_config(placed(kv_cache_config, placement))  # type: ignore[misc]
        layers = self.vllm_config.compilation_config.static_forward_context
        runtime.attach(bound_allocation(placement, layers), layers, self.model_runner)

    def compile_or_warm_up_model(self) -> "CompilationTimes":
        """Warm up; model runner V2 does so with requests that it makes up, through this worker."""
        with self._kvpp_runtime().warming_up():
            return super().compile_or_warm_up_model()  # type: ignore[misc]

    def execute_model(
        self, scheduler_output: "SchedulerOutput"
    ) -> "ModelRunnerOutput | AsyncModelRunnerOutput | None":
        """Run a step inside the engine's forward."""
        with self._kvpp_runtime().forward(scheduler_output):
            return super().execute_model(scheduler_output)  # type: ignore[misc]
