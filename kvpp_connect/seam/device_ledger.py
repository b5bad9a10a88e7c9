"""What the seam leans on in stock vLLM on one kind of device only.

Apart from the common ledger, since looking at a symbol imports its module, and vLLM's worker for
CPUs replaces torch's streams and events by placeholders when it is imported: on a CUDA machine
that would be the end of all ordering between streams.
"""

from kvpp_connect.seam.ledger import LEDGER, OPEN_DEFAULTS, Touchpoint
from kvpp_connect.seam.runner_v2_ledger import RUNNER_V2_LEDGER

CPU_LEDGER: tuple[Touchpoint, ...] = (
    Touchpoint(
        target="vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory",
        parameters=("self",),
        why="overridden: reports the logical budget",
    ),
    Touchpoint(
        target="vllm.distributed.device_communicators.cpu_communicator:"
        "CpuCommunicator._all_group_ranks_share_shm_group_name",
        parameters=("self",),
        why="decides for the shared-memory communicator; seam.quirks says no on request",
    ),
)

CUDA_LEDGER: tuple[Touchpoint, ...] = (
    OPEN_DEFAULTS,
    Touchpoint(
        target="vllm.config.compilation:CompilationConfig",
        fields=(
            "mode",
            "cudagraph_mode",
            "splitting_ops",
            "use_inductor_graph_partition",
            "pass_config",
        ),
        why="tells whether layers ask for their caches in code that runs at every replay",
    ),
    Touchpoint(
        target="vllm.config.compilation:PassConfig",
        fields=("fuse_allreduce_rms", "fuse_attn_quant", "fuse_rope_kvcache_cat_mla"),
        why="fusions that reduce in a kernel of their own, or move cache writes into graphs",
    ),
    Touchpoint(
        target="vllm.config.parallel:ParallelConfig",
        fields=("disable_custom_all_reduce", "all2all_backend"),
        why="keeps the model's collectives on NCCL",
    ),
    Touchpoint(
        target="vllm.config.parallel:ParallelConfig.use_all2all",
        why="tells whether experts exchange tokens by the all2all backend",
    ),
    Touchpoint(
        target="vllm.compilation.breakable_cudagraph:eager_break_during_capture",
        parameters=("fn",),
        why="lets a layer ask for its cache at every replay of a breakable graph",
    ),
    Touchpoint(
        target="vllm.compilation.breakable_cudagraph:BreakableCUDAGraphCapture.is_active",
        parameters=("cls",),
        why="tells whether a breakable graph is being captured",
    ),
    Touchpoint(
        target="vllm.forward_context:get_forward_context",
        parameters=(),
        why="tells at a replay whether it is a dummy run",
    ),
    Touchpoint(
        target="vllm.model_executor.layers.attention.mla_attention:unified_mla_kv_cache_update",
        parameters=("kv_c_normed", "k_pe", "layer_name", "kv_cache_dtype", "k_scale"),
        why="the op that has to split the graph: it asks, then writes",
    ),
    Touchpoint(
        target="vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward",
        why="which layers run vLLM's own op sequence",
    ),
    Touchpoint(
        target="vllm.models.deepseek_v32.attention:DeepseekV32Attention.forward",
        parameters=("self", "positions", "hidden_states"),
        why="the one other sequence that asks, by the implementation, before it writes",
    ),
)

# In workers only: FlashInfer may take hold of a GPU when it is imported.
CUDA_WORKER_LEDGER: tuple[Touchpoint, ...] = (
    Touchpoint(
        target="vllm.distributed.device_communicators.flashinfer_all_reduce:"
        "_fi_ar_workspace_failed",
        why="set: no FlashInfer all-reduce, which models may fuse with a norm without asking",
    ),
    Touchpoint(
        target="vllm.distributed.device_communicators.flashinfer_all_reduce:"
        "_fi_ar_quant_workspace_failed",
        why="the same for those that quantise as well",
    ),
)

STOCK_LEDGER = (*LEDGER, *CPU_LEDGER, *CUDA_LEDGER, *CUDA_WORKER_LEDGER, *RUNNER_V2_LEDGER)
