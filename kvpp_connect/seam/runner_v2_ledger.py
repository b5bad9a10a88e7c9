"""Every symbol of vLLM's model runner V2 that the seam leans on, beyond those of all runners.

Verified in the worker that has such a runner: vLLM for CPU changes torch before it imports this
one, and elsewhere nothing else does.
"""

from kvpp_connect.seam.ledger import Touchpoint

RUNNER_V2_LEDGER: tuple[Touchpoint, ...] = (
    Touchpoint(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn",
        parameters=("self", "input_batch"),
        why="compact: the first place that knows the batch's blocks; dummy runs do without it",
    ),
    Touchpoint(
        target="vllm.v1.worker.gpu.model_runner:build_slot_mappings_by_layer",
        parameters=("slot_mappings", "kv_cache_config"),
        why="compact: slots by layer name; wrapped where the runner looks it up",
    ),
    Touchpoint(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner._init_kv_zero_meta",
        parameters=("self",),
        why="compact: keeps the zeroing of new blocks out of scratch",
    ),
    Touchpoint(
        target="vllm.v1.worker.gpu.block_table:BlockTables.append_block_ids",
        parameters=("self", "req_index", "new_block_ids", "overwrite"),
        why="compact: every block id that a request gets, in host memory",
    ),
    Touchpoint(
        target="vllm.v1.worker.gpu.input_batch:InputBatch",
        fields=("num_reqs", "idx_mapping_np", "seq_lens_cpu_upper_bound"),
        why="compact: the batch's requests, and their tokens as far as the host knows them",
    ),
    Touchpoint(
        target="vllm.v1.worker.gpu.pcp_manager:PCPManager.global_batch",
        why="compact: the whole batch under prefill context parallelism, the same on all ranks",
    ),
    Touchpoint(
        target="vllm.v1.worker.gpu.attn_utils:get_shared_kv_cache_layers",
        parameters=("vllm_config",),
        why="drafts: finds layers that share a target layer's cache",
    ),
    Touchpoint(
        target="vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.load_model",
        parameters=("self", "target_model"),
        why="drafts: names the draft's caches (draft_attn_layer_names) when it loads them",
    ),
)
