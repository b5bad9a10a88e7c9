"""CUDA as a host: what the seam settles in a configuration there, and what KVPP cannot run with.

Broadcasts run beside the model. Its collectives may then only be NCCL's, whose launches NCCL keeps
in order (see ``platforms/nccl.py``): kernels of other libraries that wait for other GPUs have no
order towards a broadcast, and hang now and then. vLLM chooses such kernels by default, so what the
user left open is settled here, and what the user asked for is refused with the way out.
"""

import functools
import importlib
import os
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from kvpp_connect._log import get_logger
from kvpp_connect.config import parse_additional_config
from kvpp_connect.errors import ConfigError, SeamError
from kvpp_connect.platforms.nccl import LAUNCH_ORDER
from kvpp_connect.seam import cuda_graphs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

DEVICE_TYPE = "cuda"

# Values that leave the model's collectives to NCCL, and what else they would be. vLLM reads them in
# each worker, NCCL reads its own when it launches its first kernel.
ENVIRONMENT = {
    LAUNCH_ORDER: ("1", "NCCL starts kernels of several streams in no fixed order"),
    "VLLM_ALLREDUCE_USE_SYMM_MEM": ("0", "all-reduce over torch's symmetric memory"),
    "VLLM_ALLREDUCE_USE_FLASHINFER": ("0", "FlashInfer's all-reduce"),
    "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": ("0", "FlashInfer's all-reduce over PCIe"),
    "VLLM_USE_NCCL_SYMM_MEM": ("0", "all-reduce over NCCL's symmetric memory"),
}
_NCCL_ALL2ALL = "allgather_reducescatter"
_FLASHINFER = "vllm.distributed.device_communicators.flashinfer_all_reduce"


def settle_defaults(vllm_config: "VllmConfig") -> None:
    """Fill what the user left open, before vLLM does: later the two look the same."""
    config = parse_additional_config(vllm_config.additional_config)
    cuda_graphs.settle_default(vllm_config, compact=config.mode != "full")
    passes = vllm_config.compilation_config.pass_config
    if passes.fuse_allreduce_rms is None:
        passes.fuse_allreduce_rms = False


def problems(vllm_config: "VllmConfig") -> Iterator[str]:
    """All settings that KVPP cannot run with on CUDA."""
    from vllm.platforms import current_platform

    if current_platform.is_rocm():
        yield "ROCm is not supported by this version of kvpp-connect. Turn enable_kvpp off"
    yield from environment_problems(os.environ)
    if vllm_config.compilation_config.pass_config.fuse_allreduce_rms:
        yield (
            "pass_config.fuse_allreduce_rms reduces in a kernel of FlashInfer's, which hangs "
            "beside broadcasts. Remove it from --compilation-config"
        )
    parallel = vllm_config.parallel_config
    if parallel.use_all2all and parallel.all2all_backend != _NCCL_ALL2ALL:
        yield (
            f"all2all_backend {parallel.all2all_backend!r} exchanges tokens in kernels that wait "
            f"for other GPUs, and hang beside broadcasts. Use --all2all-backend {_NCCL_ALL2ALL}"
        )
    graphs = cuda_graphs.problem(vllm_config, sparse=is_sparse(vllm_config))
    if graphs:
        yield graphs


def environment_problems(environment: MutableMapping[str, str]) -> Iterator[str]:
    """Variables that the user set to what cannot work."""
    for name, (wanted, otherwise) in ENVIRONMENT.items():
        if environment.get(name, wanted) != wanted:
            yield (
                f"{name} is {environment[name]!r}: {otherwise} hangs beside broadcasts. Unset it, "
                f"or set it to {wanted}"
            )


def settle(vllm_config: "VllmConfig") -> None:
    """Keep the model's collectives on NCCL, and say so once."""
    vllm_config.parallel_config.disable_custom_all_reduce = True
    settle_environment()
    mode = vllm_config.compilation_config.cudagraph_mode
    if cuda_graphs.breakable() and not mode and not vllm_config.model_config.enforce_eager:
        _say_once(
            "KVPP: no CUDA graphs, since this model's are breakable, in which compact mode cannot "
            "run; kvpp.mode full keeps them in model runner V2, and moves whole caches"
        )
    _say_once(
        f"KVPP: the model's collectives stay on NCCL ({LAUNCH_ORDER}=1; custom, FlashInfer and "
        f"symmetric-memory all-reduce off), cudagraph_mode {mode.name if mode else 'NONE'}"
    )


def settle_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what is open; in each worker as well, which an engine's environment may not reach.

    Raises:
        ConfigError: the user set something else.
    """
    for problem in environment_problems(environment):
        raise ConfigError(f"enable_kvpp: {problem}")
    for name, (wanted, _) in ENVIRONMENT.items():
        environment[name] = wanted


def keep_flashinfer_out() -> None:
    """Let no FlashInfer all-reduce come about in this process.

    Models written for GPUs fuse it with a norm whatever the settings say, and fall back to NCCL
    where its workspace cannot be made.
    """
    module: Any = importlib.import_module(_FLASHINFER)
    module._fi_ar_workspace_failed = True  # noqa: SLF001 - in the ledger
    module._fi_ar_quant_workspace_failed = True  # noqa: SLF001 - in the ledger


def check_layers(layers: dict[str, Any]) -> None:
    """Refuse MLA layers that access their caches in a way that nobody has read yet.

    Raises:
        SeamError: names the layer and its class.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.models.deepseek_v32.attention import DeepseekV32Attention

    known = (MLAAttention.forward, DeepseekV32Attention.forward)
    for name, layer in layers.items():
        if isinstance(layer, MLAAttention) and type(layer).forward not in known:
            raise SeamError(
                f"KVPP: layer {name} is a {type(layer).__module__}.{type(layer).__name__}, whose "
                "own forward may access the cache unasked; this version of kvpp-connect does not "
                "know it. Turn enable_kvpp off"
            )


def is_sparse(vllm_config: "VllmConfig") -> bool:
    """Whether layers have indexers, with caches of their own."""
    return hasattr(vllm_config.model_config.hf_config, "index_topk")


@functools.cache
def _say_once(text: str) -> None:
    logger.info("%s", text)
