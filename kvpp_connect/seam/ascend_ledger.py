"""Every symbol of vllm-ascend, and of the vLLM under it, that the seam leans on there.

In two parts, since importing the worker applies vllm-ascend's patches for workers: the first one is
verified with the configuration, the second one in the worker.
"""

from kvpp_connect.seam.ledger import LEDGER, OPEN_DEFAULTS, Touchpoint

SUPPORTED_ASCEND = "vllm-ascend 0.26.0rc1 on vLLM 0.26"

# What stock vLLM and the older one under vllm-ascend have in common.
_COMMON = {
    "vllm.platforms.interface:Platform.check_and_update_config",
    "vllm.v1.core.kv_cache_utils:get_kv_cache_groups",
    "vllm.v1.core.kv_cache_utils:get_kv_cache_config_from_groups",
    "vllm.v1.kv_cache_interface:MLAAttentionSpec",
    "vllm.model_executor.models.utils:extract_layer_index",
    "vllm.distributed.parallel_state:get_tp_group",
    "vllm.distributed.parallel_state:get_pcp_group",
    "vllm.distributed.parallel_state:get_pp_group",
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks",
    "vllm.v1.core.block_pool:BlockPool.get_usage",
    "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache",
    "vllm.v1.core.block_pool:BlockPool.touch",
    "vllm.v1.core.block_pool:BlockPool.free_blocks",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.bind_gpu_block_pool",
}

ASCEND_CONFIG_LEDGER: tuple[Touchpoint, ...] = (
    *(entry for entry in LEDGER if entry.target in _COMMON),
    Touchpoint(
        target="vllm.v1.core.sched.output:SchedulerOutput",
        fields=(
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "total_num_scheduled_tokens",
            "finished_req_ids",
        ),
        why="tells whether a forward has history; connectors: the requests of a step",
    ),
    Touchpoint(
        target="vllm.v1.core.sched.output:NewRequestData",
        fields=("req_id", "block_ids", "num_computed_tokens"),
        why="tells whether a new request has history; connectors: its blocks",
    ),
    Touchpoint(
        target="vllm.v1.core.sched.output:CachedRequestData",
        fields=("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
        why="tells whether a running request has history; connectors: its further blocks",
    ),
    Touchpoint(
        target="vllm.v1.kv_cache_interface:KVCacheTensor",
        fields=("size", "shared_by"),
        why="an allocation of its own for each layer, when the runner's sizes are measured",
    ),
    Touchpoint(
        target="vllm.v1.kv_cache_interface:KVCacheConfig",
        fields=("num_blocks", "kv_cache_tensors", "kv_cache_groups"),
        why="tells the number of blocks that the planner settled on",
    ),
    Touchpoint(
        target="vllm.v1.kv_cache_interface:KVCacheConfig.needs_kv_cache_zeroing",
        why="compact: zeroing goes by block ids, which layers in scratch do not have",
    ),
    Touchpoint(
        target="vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_finished",
        parameters=("self", "finished_req_ids"),
        why="connectors: reports the requests that were sent and received",
    ),
    Touchpoint(
        target="vllm.distributed.kv_transfer.kv_connector.v1.base:"
        "KVConnectorBase_V1.get_block_ids_with_load_errors",
        parameters=("self",),
        why="connectors: reports the blocks of failed receives",
    ),
    Touchpoint(
        target="vllm_ascend.platform:NPUPlatform.check_and_update_config",
        parameters=("cls", "vllm_config"),
        why="wrapped: chooses worker_cls, and all2all_backend with it",
    ),
    OPEN_DEFAULTS,
    Touchpoint(
        target="vllm.config.compilation:CompilationConfig",
        fields=("cudagraph_mode", "splitting_ops"),
        why="tells whether layers ask for their caches in code that runs at every replay",
    ),
    Touchpoint(
        target="vllm_ascend.ascend_config:get_ascend_config",
        parameters=(),
        why="tells whether caches are kept in host memory",
    ),
)

_FORWARD = (
    "self",
    "layer_name",
    "hidden_states",
    "kv_cache",
    "attn_metadata",
    "need_gather_q_kv",
    "output",
)

ASCEND_WORKER_LEDGER: tuple[Touchpoint, ...] = (
    Touchpoint(
        target="vllm_ascend.worker.worker:NPUWorker.determine_available_memory",
        parameters=("self",),
        why="overridden: reports the logical budget",
    ),
    Touchpoint(
        target="vllm_ascend.worker.worker:NPUWorker.get_kv_cache_spec",
        parameters=("self",),
        why="the layers and page sizes of this stage",
    ),
    Touchpoint(
        target="vllm_ascend.worker.worker:NPUWorker.initialize_from_config",
        parameters=("self", "kv_cache_config"),
        why="overridden: places the caches before anything is allocated",
    ),
    Touchpoint(
        target="vllm_ascend.worker.worker:NPUWorker.execute_model",
        parameters=("self", "scheduler_output"),
        why="overridden: begins and ends a forward of the broadcast engine",
    ),
    Touchpoint(
        target="vllm_ascend.worker.model_runner_v1:NPUModelRunner._allocate_kv_cache_tensors",
        parameters=("self", "kv_cache_config"),
        why="replaced: gives each layer its tensors out of the placement",
    ),
    Touchpoint(
        target="vllm_ascend.worker.model_runner_v1:NPUModelRunner._allocate_int8_cache_tensor",
        parameters=("self", "numel", "alignment"),
        why="what the runner's own allocation calls for each tensor, when sizes are measured",
    ),
    Touchpoint(
        target="vllm_ascend.worker.model_runner_v1:NPUModelRunner._build_attention_metadata",
        parameters=(
            "self",
            "num_tokens",
            "num_reqs",
            "max_query_len",
            "num_tokens_padded",
            "num_reqs_padded",
            "ubatch_slices",
            "logits_indices",
            "use_spec_decode",
            "for_cudagraph_capture",
            "num_scheduled_tokens",
            "num_scheduled_tokens_np",
            "cascade_attn_prefix_lens",
            "skip_gdn_state_update",
        ),
        why="wrapped in compact mode: the batch's blocks are known, its metadata is not yet built",
    ),
    Touchpoint(
        target="vllm_ascend.worker.block_table:BlockTable.get_cpu_tensor",
        parameters=("self",),
        why="compact: the blocks of the scheduled requests, in host memory",
    ),
    Touchpoint(
        target="vllm.v1.worker.utils:AttentionGroup",
        fields=("layer_names", "metadata_builders"),
        why="split in compact mode into owned layers and those in scratch",
    ),
    Touchpoint(
        target="vllm_ascend.attention.utils:AscendCommonAttentionMetadata",
        fields=("block_table_tensor", "slot_mapping"),
        why="renumbered for layers in scratch",
    ),
    *(
        Touchpoint(
            target=f"vllm_ascend.attention.{builder}.build",
            parameters=("self", "common_prefix_len", "common_attn_metadata", "fast_build", *more),
            why="wrapped on copies of the builders, for layers in scratch",
        )
        for builder, more in (
            ("mla_v1:AscendMLAMetadataBuilder", ()),
            ("sfa_v1:AscendSFAMetadataBuilder", ("kwargs",)),
            ("indexer:AscendSFAIndexerMetadataBuilder", ()),
        )
    ),
    Touchpoint(
        target="vllm_ascend.attention.mla_v1:AscendMLAImpl.forward",
        parameters=_FORWARD,
        why="called on every MLA layer before it writes or reads its caches: the place to wait",
    ),
    Touchpoint(
        target="vllm_ascend.attention.sfa_v1:AscendSFAImpl.forward",
        parameters=_FORWARD,
        why="the same for sparse layers, their indexer's cache included",
    ),
)

ASCEND_LEDGER = (*ASCEND_CONFIG_LEDGER, *ASCEND_WORKER_LEDGER)

# Of a vllm-ascend with a KVPP of its own, where the cache configuration does not carry its plan.
HOST_LEDGER = (
    Touchpoint(
        target="vllm_ascend.worker.kvpp_cache:get_kvpp_cache_specs",
        parameters=("kv_cache_config",),
        why="what the host's allocation hands to its planner",
    ),
    Touchpoint(
        target="vllm_ascend.core.kv_cache_placement:create_kvpp_cache_allocation_plan",
        parameters=("vllm_config", "worker_spec", "kvpp_rank"),
        why="the host's planner, where the cache configuration does not carry the plan",
    ),
)
