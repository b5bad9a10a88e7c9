"""vllm-ascend as a host: which situation this is, and what KVPP cannot run with there.

Either vllm-ascend has a KVPP of its own: then its runtime serves the layers, and connectors take
ownership from its plan (``ascend_plan``). Or it has none, in releases up to 0.26: then ours drives
it (``ascend_worker``). Nothing here imports vllm-ascend before it is asked a question about it.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvpp_connect._log import get_logger
from kvpp_connect.config import KvppConfig
from kvpp_connect.errors import ConfigError
from kvpp_connect.seam import cuda_graphs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig

logger = get_logger(__name__)

PACKAGE = "vllm_ascend"
DEVICE_TYPE = "npu"
_OWN_KVPP = f"{PACKAGE}.core.kv_cache_placement"
_SPLITTING_OP = "vllm::mla_forward"
EXPANSION = "HCCL_OP_EXPANSION_MODE"


def installed() -> bool:
    """Whether vllm-ascend's plugins run in this environment, on whatever device."""
    return find_spec(PACKAGE) is not None


def has_own_kvpp() -> bool:
    """Whether the installed vllm-ascend serves ``enable_kvpp`` itself."""
    return installed() and find_spec(_OWN_KVPP) is not None


def leave_to_host(config: KvppConfig) -> None:
    """Check that nothing is asked of our runtime where vllm-ascend's own serves the layers.

    Raises:
        ConfigError: options of ours are set.
    """
    if config != KvppConfig(enabled=True):
        raise ConfigError(
            "additional_config.kvpp has options of kvpp-connect's runtime, but this vllm-ascend "
            "has a KVPP of its own, which does not read them. Remove them"
        )


def settle_defaults(vllm_config: "VllmConfig") -> None:
    """Fill what the user left open, where our runtime serves the layers."""
    if not has_own_kvpp():
        cuda_graphs.settle_default(vllm_config)


def settle(vllm_config: "VllmConfig") -> None:
    """Say which situation this is, and what became of the graphs."""
    mode = vllm_config.compilation_config.cudagraph_mode
    logger.info(
        "KVPP: this vllm-ascend has none of its own; kvpp-connect serves the layers, "
        "cudagraph_mode %s",
        mode.name if mode else "NONE",
    )


def expansion_problem(environment: Mapping[str, str]) -> str:
    """What HCCL would do beside broadcasts; empty where nothing is wrong.

    With AIV, collectives are kernels that wait on vector cores for other NPUs. Those of several
    groups that run at once take each other's cores, in another order on another NPU, and hang.
    """
    mode = environment.get(EXPANSION, "")
    if "AIV" not in mode.upper():
        return ""
    return (
        f"{EXPANSION} is {mode!r}: collectives of the model and broadcasts would wait for each "
        "other's vector cores, and hang. Unset it"
    )


def problems(vllm_config: "VllmConfig") -> "Iterator[str]":
    """All settings of vllm-ascend that our runtime cannot run with there."""
    if getattr(vllm_config, "use_v2_model_runner", False):
        yield (
            "model runner V2 of vllm-ascend allocates its caches elsewhere. Set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if expansion := expansion_problem(os.environ):
        yield expansion
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if mode is not None and mode.name != "NONE":
        splits: list[str] = list(compilation.splitting_ops or ())
        if _SPLITTING_OP not in splits:
            yield (
                f"cudagraph_mode is {mode.name} and {_SPLITTING_OP} is not among splitting_ops, so "
                "layers would not ask for their caches. Use --enforce-eager, or leave "
                "splitting_ops to vllm-ascend"
            )
    config = import_module(f"{PACKAGE}.ascend_config").get_ascend_config()
    offload = getattr(config, "sparse_kv_offload_config", None)  # not in 0.23
    if offload is not None and offload.enabled:
        yield (
            "additional_config.sparse_kv_offload_config keeps caches in host memory. Turn it off"
        )


def compact_obstacles(vllm_config: "VllmConfig") -> "Iterator[str]":
    """All settings of vllm-ascend that compact mode cannot run with."""
    # The scheduler asks as well, in whose process vllm-ascend has not read its settings.
    given = vllm_config.additional_config
    if isinstance(given, dict) and given.get("c8_enable_reshape_optim"):
        yield (
            "additional_config.c8_enable_reshape_optim sorts slots into buffers that all layers "
            "share, and the slots of layers in scratch are others. Turn it off"
        )
