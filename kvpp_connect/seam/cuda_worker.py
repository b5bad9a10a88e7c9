"""The KVPP worker for stock vLLM on CUDA."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from kvpp_connect.errors import ConfigError
from kvpp_connect.platforms.cuda import nccl_version
from kvpp_connect.platforms.nccl import nccl_problem
from kvpp_connect.seam import cuda, cuda_graphs, ledger
from kvpp_connect.seam.device_ledger import CUDA_WORKER_LEDGER
from kvpp_connect.seam.worker import KvppWorkerMixin

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

_MEMORY_MAP = Path("/proc/self/maps")


class KvppGPUWorker(KvppWorkerMixin, Worker):
    """``Worker`` with KVPP."""

    # What Worker provides; declared for the type checker only.
    device: torch.device

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed through
        # Before vLLM makes its communicators, and NCCL launches anything.
        ledger.verify(CUDA_WORKER_LEDGER)
        cuda.settle_environment()
        cuda.keep_flashinfer_out()
        super().__init__(*args, **kwargs)
        cuda_graphs.check_resolved(self.vllm_config, sparse=cuda.is_sparse(self.vllm_config))

    def determine_available_memory(self) -> int:
        """Bytes for vLLM's planner: the blocks that really fit times its bytes per block."""
        problem = nccl_problem(nccl_version(), _MEMORY_MAP.read_text())
        if problem:
            raise ConfigError(f"enable_kvpp: {problem}")
        self._kvpp_runtime().warm_up(self.device)
        return super().determine_available_memory()

    def initialize_from_config(self, kv_cache_config: "KVCacheConfig") -> None:
        """Allocate this rank's placement instead of the planner's, then attach the engine."""
        cuda.check_layers(self.vllm_config.compilation_config.static_forward_context)
        super().initialize_from_config(kv_cache_config)
