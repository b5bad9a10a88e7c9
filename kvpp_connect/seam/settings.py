"""What KVPP does not support, said before any memory is allocated.

Each check names the setting and the way out.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvpp_connect.config import KvppConfig
from kvpp_connect.errors import ConfigError
from kvpp_connect.layout import FullScratch, ScratchSize, running_scratch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUPPORTED_CONNECTORS = ("MooncakeConnectorV2",)
CONNECTOR_MODULE = "kvpp_connect.connectors"


def scratch_size(vllm_config: "VllmConfig", config: KvppConfig) -> ScratchSize:
    """Size of scratch, the same in workers and scheduler.

    Raises:
        ConfigError: a request of maximum length does not fit into the running tokens.
    """
    if config.mode == "full":
        return FullScratch()
    model = vllm_config.model_config
    if model.original_max_model_len == -1 and config.running_tokens is None:
        raise ConfigError(
            "enable_kvpp: --max-model-len auto is not known when scratch is sized. Set "
            "additional_config.kvpp.running_tokens, or a number for --max-model-len"
        )
    return running_scratch(
        block_tokens=vllm_config.cache_config.block_size,
        max_model_tokens=model.max_model_len,
        max_requests=vllm_config.scheduler_config.max_num_seqs,
        running_tokens=config.running_tokens,
    )


def check_supported(vllm_config: "VllmConfig") -> None:
    """Refuse the first setting that KVPP cannot run with.

    Raises:
        ConfigError: names the setting, its value and what to change.
    """
    for check in _CHECKS:
        problem = check(vllm_config)
        if problem is not None:
            raise ConfigError(f"enable_kvpp: {problem}")


def _needs_mla(config: "VllmConfig") -> str | None:
    model = config.model_config
    if model is None:
        return "there is no model_config to check; KVPP needs a model with MLA"
    if model.is_hybrid:
        return (
            f"model {model.model!r} is hybrid (attention and state-space layers); KVPP supports "
            "models with MLA only. Turn enable_kvpp off"
        )
    if not model.use_mla:
        return (
            f"model {model.model!r} does not use MLA (or VLLM_MLA_DISABLE is set); every rank "
            "already holds its own KV heads. Turn enable_kvpp off"
        )
    return None


def _needs_a_group(config: "VllmConfig") -> str | None:
    parallel = config.parallel_config
    size = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    if size > 1:
        return None
    return (
        "the KVPP group (tensor parallel x prefill context parallel) has 1 rank, there is nobody "
        "to share layers with. Use --tensor-parallel-size 2 or more, or turn enable_kvpp off"
    )


def _no_decode_context_parallel(config: "VllmConfig") -> str | None:
    size = config.parallel_config.decode_context_parallel_size
    if size <= 1:
        return None
    return (
        f"decode_context_parallel_size is {size}; it splits each layer's cache by tokens, KVPP "
        "gives whole layers to ranks. Use --decode-context-parallel-size 1, or turn enable_kvpp off"
    )


def _no_pipeline(config: "VllmConfig") -> str | None:
    size = config.parallel_config.pipeline_parallel_size
    if size <= 1:
        return None
    return (
        f"pipeline_parallel_size is {size}, which this version of kvpp-connect does not support "
        "yet. Use --pipeline-parallel-size 1"
    )


def _no_speculation(config: "VllmConfig") -> str | None:
    if config.speculative_config is None:
        return None
    return (
        "speculative_config is set, and this version of kvpp-connect does not support draft "
        "caches yet. Remove --speculative-config"
    )


def _no_dual_batch(config: "VllmConfig") -> str | None:
    if not config.parallel_config.enable_dbo:
        return None
    return "enable_dbo runs two half batches through each layer. Remove --enable-dbo"


def _no_full_graphs(config: "VllmConfig") -> str | None:
    mode = config.compilation_config.cudagraph_mode
    if mode is None or not mode.has_full_cudagraphs():
        return None
    return (
        f"cudagraph_mode {mode.name} captures attention, where KVPP has to wait for the layer's "
        """cache. Use --compilation-config '{"cudagraph_mode": "PIECEWISE"}' or --enforce-eager"""
    )


def _no_hisparse(config: "VllmConfig") -> str | None:
    if getattr(config.attention_config, "hisparse_config", None) is None:
        return None
    return "HiSparse places the cache itself. Remove the HiSparse configuration"


def _no_elastic_ep(config: "VllmConfig") -> str | None:
    if not getattr(config.parallel_config, "enable_elastic_ep", False):
        return None
    return "enable_elastic_ep changes the ranks of a running engine. Remove --enable-elastic-ep"


def _known_connector(config: "VllmConfig") -> str | None:
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return None
    name, path = transfer.kv_connector, transfer.kv_connector_module_path
    ours = path is None or path == CONNECTOR_MODULE or path.startswith(CONNECTOR_MODULE + ".")
    if name in SUPPORTED_CONNECTORS and ours:
        return None
    return (
        f"connector {name!r}{f' of {path!r}' if path else ''} does not know that most ranks hold "
        "scratch instead of a layer's cache and would ship garbage. Use one of "
        f"{', '.join(SUPPORTED_CONNECTORS)} with kv_connector_module_path {CONNECTOR_MODULE!r}, "
        "or turn enable_kvpp off"
    )


_CHECKS: tuple[Callable[["VllmConfig"], str | None], ...] = (
    _needs_mla,
    _needs_a_group,
    _no_decode_context_parallel,
    _no_pipeline,
    _no_speculation,
    _no_dual_batch,
    _no_full_graphs,
    _no_hisparse,
    _no_elastic_ep,
    _known_connector,
)
