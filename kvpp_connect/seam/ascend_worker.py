"""The KVPP worker for a vllm-ascend that has no KVPP of its own."""

from typing import TYPE_CHECKING, Any

import torch
from vllm_ascend.worker.worker import NPUWorker  # pyright: ignore[reportMissingImports]

from kvpp_connect.layout import StageLayers
from kvpp_connect.platforms.base import PLATFORMS
from kvpp_connect.seam import ascend, ledger
from kvpp_connect.seam.ascend_caches import PlacedCaches, tensor_bytes, with_indexers
from kvpp_connect.seam.ascend_compact import AscendCompactForward
from kvpp_connect.seam.ascend_hooks import AscendLayerHooks
from kvpp_connect.seam.ascend_ledger import ASCEND_WORKER_LEDGER, SUPPORTED_ASCEND
from kvpp_connect.seam.drafts import draft_cache_names
from kvpp_connect.seam.specs import stage_from_specs
from kvpp_connect.seam.worker import KvppWorkerMixin

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_ALIGNMENT_BYTES = PLATFORMS[ascend.DEVICE_TYPE].alignment_bytes


class KvppNPUWorker(KvppWorkerMixin, NPUWorker):
    """``NPUWorker`` with KVPP."""

    # What NPUWorker provides; declared for the type checker only.
    device: torch.device

    _kvpp_hooks = AscendLayerHooks
    _kvpp_compact = AscendCompactForward

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed through
        ledger.verify(ASCEND_WORKER_LEDGER, SUPPORTED_ASCEND)
        super().__init__(*args, **kwargs)

    def _kvpp_stage(self, specs: "dict[str, KVCacheSpec]") -> StageLayers:
        tensors = tensor_bytes(self.model_runner, self.vllm_config, specs)
        drafts = with_indexers(draft_cache_names(self.model_runner), specs)
        return stage_from_specs(specs, drafts, tensors)

    def determine_available_memory(self) -> int:
        """Bytes for vLLM's planner: the blocks that really fit times its bytes per block."""
        runtime = self._kvpp_runtime()
        # HCCL makes a group's buffers with its first collective: now, before memory is measured.
        runtime.warm_up(self.device)
        memory_bytes: int = NPUWorker.determine_available_memory(self)
        # The allocation's own base is moved up to the alignment.
        return runtime.budget(memory_bytes - _ALIGNMENT_BYTES)

    def initialize_from_config(self, kv_cache_config: "KVCacheConfig") -> None:
        """Allocate this rank's placement instead of the runner's caches, then attach the engine."""
        runtime = self._kvpp_runtime()
        enforced = self.vllm_config.cache_config.num_gpu_blocks_override is not None
        caches = PlacedCaches(runtime.place(kv_cache_config, enforced), _ALIGNMENT_BYTES)
        caches.serve(self.model_runner)
        NPUWorker.initialize_from_config(self, kv_cache_config)
        layers = self.vllm_config.compilation_config.static_forward_context
        caches.check(layers)
        runtime.attach(caches.memory, layers, self.model_runner)
