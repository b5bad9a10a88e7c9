"""What KVPP does not support, said before any memory is allocated.

Each check names the setting and the way out.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvpp_connect.config import KvppConfig
from kvpp_connect.errors import ConfigError
from kvpp_connect.layout import (
    FullScratch,
    ScratchSize,
    StageLayers,
    running_obstacle,
    running_scratch,
)
from kvpp_connect.platforms.base import select_platform
from kvpp_connect.seam import cuda_graphs, multi
from kvpp_connect.seam.variants import variant

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# For synchronous and for asynchronous scheduling.
KVPP_SCHEDULERS = (
    "kvpp_connect.seam.scheduler.KvppScheduler",
    "kvpp_connect.seam.scheduler.KvppAsyncScheduler",
)
_DRAFTS_ON_TARGET_CACHES = ("extract_hidden_states", "custom_class")
_DRAFTS_OF_THEIR_OWN_MODEL = ("eagle", "eagle3", "draft_model", "dflash")


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """The mode that an engine runs in; ``reason`` says why ``auto`` did not become compact."""

    mode: Literal["full", "compact"]
    reason: str = ""


def choose_mode(vllm_config: "VllmConfig", config: KvppConfig) -> ModeChoice:
    """Settle ``kvpp.mode``: the same answer in every process of an engine.

    Raises:
        ConfigError: compact was asked for and cannot be had.
    """
    if config.mode == "full":
        return ModeChoice("full")
    obstacle = next(filter(None, (check(vllm_config, config) for check in _COMPACT_CHECKS)), None)
    if obstacle is None:
        return ModeChoice("compact")
    if config.mode == "compact":
        raise ConfigError(f"enable_kvpp: kvpp.mode compact is not possible: {obstacle}")
    return ModeChoice("full", obstacle)


def _compact_needs_its_scheduler(vllm_config: "VllmConfig", config: KvppConfig) -> str | None:
    del config
    chosen = vllm_config.scheduler_config.scheduler_cls
    if chosen in (None, *KVPP_SCHEDULERS):
        return None
    return (
        f"scheduler_cls is {chosen!r}, compact needs its own; remove --scheduler-cls, or the "
        "setting that selects it"
    )


def _compact_needs_a_length(vllm_config: "VllmConfig", config: KvppConfig) -> str | None:
    if vllm_config.model_config.original_max_model_len != -1 or config.running_tokens is not None:
        return None
    return (
        "--max-model-len auto is not known when scratch is sized; set kvpp.running_tokens, or a "
        "number for --max-model-len"
    )


def _compact_needs_its_own_blocks(vllm_config: "VllmConfig", config: KvppConfig) -> str | None:
    del config
    if not getattr(vllm_config.speculative_config, "enable_adaptive_verification", False):
        return None
    return (
        "adaptive draft verification is timed with made-up block tables that go beyond scratch; "
        "set enable_adaptive_verification to false in --speculative-config"
    )


def _compact_needs_its_host(vllm_config: "VllmConfig", config: KvppConfig) -> str | None:
    del config
    host = variant(vllm_config.device_config.device_type)
    return next(iter(host.compact_obstacles(vllm_config)), None)


def _compact_needs_slots_at_replay(vllm_config: "VllmConfig", config: KvppConfig) -> str | None:
    del config
    mode = vllm_config.compilation_config.cudagraph_mode
    if not mode or not cuda_graphs.breakable():
        return None
    return (
        "breakable CUDA graphs write caches by the slots that they were captured with; "
        "VLLM_USE_BREAKABLE_CUDAGRAPH=0 or --enforce-eager turns them off"
    )


_COMPACT_CHECKS = (
    _compact_needs_its_host,
    _compact_needs_slots_at_replay,
    _compact_needs_its_scheduler,
    _compact_needs_a_length,
    _compact_needs_its_own_blocks,
)


def scratch_size(vllm_config: "VllmConfig", config: KvppConfig) -> ScratchSize:
    """Size of scratch, the same in workers and scheduler.

    Raises:
        ConfigError: a request of maximum length does not fit into the running tokens.
    """
    if choose_mode(vllm_config, config).mode == "full":
        return FullScratch()
    model = vllm_config.model_config
    return running_scratch(
        block_tokens=vllm_config.cache_config.block_size,
        max_model_tokens=model.max_model_len,
        max_requests=vllm_config.scheduler_config.max_num_seqs,
        running_tokens=config.running_tokens,
    )


def settle_mode(
    vllm_config: "VllmConfig", config: KvppConfig, stage: StageLayers
) -> tuple[ModeChoice, ScratchSize]:
    """The mode and scratch of one stage's workers, who know their layers.

    The scheduler does not: it goes on holding requests to the blocks of compact's scratch.

    Raises:
        ConfigError: compact was asked for and cannot be had, or KVPP does not run on the device.
    """
    choice = choose_mode(vllm_config, config)
    platform = select_platform(vllm_config.device_config.device_type)
    obstacle = running_obstacle(stage, platform.block_numbers)
    if choice.mode == "full" or not obstacle:
        return choice, scratch_size(vllm_config, config)
    if config.mode == "compact":
        raise ConfigError(f"enable_kvpp: kvpp.mode compact is not possible: {obstacle}")
    kept = "running requests are held to compact's share of the blocks, kvpp.mode full lifts that"
    return ModeChoice("full", f"{obstacle}; {kept}"), FullScratch()


def check_supported(vllm_config: "VllmConfig") -> None:
    """Refuse the first setting that KVPP cannot run with.

    Raises:
        ConfigError: names the setting, its value and what to change.
    """
    for problem in problems(vllm_config):
        raise ConfigError(problem)


def problems(vllm_config: "VllmConfig") -> Iterator[str]:
    """All settings that KVPP cannot run with; a server stops at the first."""
    found = (problem for check in _CHECKS if (problem := check(vllm_config)) is not None)
    host = variant(vllm_config.device_config.device_type).problems(vllm_config)
    for problem in itertools.chain(found, host):
        yield f"enable_kvpp: {problem}"


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
    return group_problem(parallel.tensor_parallel_size * parallel.prefill_context_parallel_size)


def group_problem(ranks: int) -> str | None:
    """What is wrong with a KVPP group of so many ranks."""
    if ranks > 1:
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


def _fixed_speculation(config: "VllmConfig") -> str | None:
    speculation = config.speculative_config
    if speculation is None:
        return None
    if speculation.uses_dynamic_speculative_decoding():
        return (
            "num_speculative_tokens_per_batch_size changes the number of drafted tokens with the "
            "batch. Set num_speculative_tokens alone in --speculative-config"
        )
    if speculation.method in _DRAFTS_ON_TARGET_CACHES:
        return (
            f"speculative method {speculation.method!r} may read or fill caches of target layers, "
            "which most ranks hold in scratch only while the layer runs. Use another method, or "
            "remove --speculative-config"
        )
    draft = getattr(speculation, "draft_model_config", None)
    if speculation.method in _DRAFTS_OF_THEIR_OWN_MODEL and draft is not None and not draft.use_mla:
        return (
            f"the draft model of method {speculation.method!r} does not use MLA, and KVPP places "
            "MLA caches only. Use a draft with MLA (such as mtp), or remove --speculative-config"
        )
    return None


def _no_dual_batch(config: "VllmConfig") -> str | None:
    if config.parallel_config.enable_dbo:
        return "enable_dbo runs two half batches through each layer. Remove --enable-dbo"
    parts = getattr(config.parallel_config, "ubatch_size", 0)
    if parts > 1:
        return f"ubatch_size is {parts}, which runs each layer that often. Remove --ubatch-size"
    return None


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


def _no_kv_offloading(config: "VllmConfig") -> str | None:
    # vLLM puts a connector of its own into the configuration for it, when the checks are over.
    if getattr(config.cache_config, "kv_offloading_size", None) is None:
        return None
    return (
        "kv_offloading_size brings a connector that does not know that most ranks hold scratch "
        "instead of a layer's cache. Remove --kv-offloading-size, or use AscendStoreConnector"
    )


def check_connector(vllm_config: "VllmConfig") -> None:
    """Refuse a connector that does not know KVPP, in a configuration that is final.

    Raises:
        ConfigError: names the connector.
    """
    if problem := _known_connector(vllm_config):
        raise ConfigError(f"enable_kvpp: {problem}")


def _known_connector(config: "VllmConfig") -> str | None:
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return None
    name, path = transfer.kv_connector, transfer.kv_connector_module_path or ""
    chosen: tuple[multi.Named, ...] = (multi.Named(name, path),)
    if multi.is_multi(name, path):
        try:
            chosen = multi.named_children(multi.children(transfer.kv_connector_extra_config))
        except ConfigError as error:
            return str(error)
    stranger = next((connector for connector in chosen if not connector.is_ours), None)
    if stranger is None:
        return None
    of = f" of {stranger.path!r}" if stranger.path else ""
    place = f" ({stranger.where})" if stranger.where else ""
    way_out = "Remove it" if stranger.where else "Use one of these"
    return (
        f"connector {stranger.name!r}{of}{place} does not know that most ranks hold scratch "
        f"instead of a layer's cache and would ship garbage. {way_out} "
        f"({', '.join(multi.SUPPORTED_CONNECTORS)} with kv_connector_module_path "
        f"{multi.CONNECTOR_MODULE!r}), or turn enable_kvpp off"
    )


_CHECKS: tuple[Callable[["VllmConfig"], str | None], ...] = (
    _needs_mla,
    _needs_a_group,
    _no_decode_context_parallel,
    _fixed_speculation,
    _no_dual_batch,
    _no_full_graphs,
    _no_hisparse,
    _no_elastic_ep,
    _no_kv_offloading,
    _known_connector,
)
