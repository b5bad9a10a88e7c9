"""Whether layers ask for their caches in code that runs at every replay of a CUDA graph.

vLLM cuts graphs in three ways. ``torch.compile`` splits the model at ``splitting_ops``, which run
between captured pieces: the ops that access caches have to be among them. Inductor's partition
splits at the same list, but vLLM leaves the op that writes caches out of it there. Breakable graphs
split where the model's code says so while it is captured, which is behind the writes in some
models: there the hooks add breaks of their own (``hooks.py``).
"""

from typing import TYPE_CHECKING, Any

from kvpp_connect.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, VllmConfig

WRITES = "vllm::unified_mla_kv_cache_update"
READS = "vllm::unified_mla_attention_with_output"
INDEXES = "vllm::sparse_attn_indexer"
_LEAVE = "Remove splitting_ops from --compilation-config, or use --enforce-eager"


_FULL_BY_DEFAULT = 2  # optimization levels from this one on


def settle_default(vllm_config: "VllmConfig", *, compact: bool = True) -> None:
    """Leave attention out of graphs where the user left their mode open.

    Breakable ones go altogether where layers have to run in compact mode, which saves more.

    Args:
        compact: whether the user leaves compact mode possible.
    """
    from vllm.config import CUDAGraphMode

    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode is not None:
        return
    if breakable() and (compact or not vllm_config.use_v2_model_runner):
        compilation.cudagraph_mode = CUDAGraphMode.NONE
    elif vllm_config.optimization_level >= _FULL_BY_DEFAULT:
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE


def breakable() -> bool:
    """Whether this process uses breakable graphs; vLLM chooses them by the model, or the user.

    A vLLM without them uses none.
    """
    try:
        from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
    except ImportError:
        return False

    return is_breakable_cudagraph_enabled()


def problem(vllm_config: "VllmConfig | Any", *, sparse: bool) -> str:  # noqa: ANN401
    """What keeps layers from asking, or from writing; empty where nothing does.

    Args:
        vllm_config: before or after it has filled ``splitting_ops``.
        sparse: whether layers have indexers.
    """
    compilation: CompilationConfig | Any = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if mode is None or not mode.has_piecewise_cudagraphs():
        return ""
    if breakable():
        if vllm_config.use_v2_model_runner:
            return ""
        # It captures without metadata, and the kernel that writes is in the captured piece.
        return (
            f"cudagraph_mode is {mode.name} with breakable CUDA graphs, whose replays write no KV "
            "in model runner V1. Use --enforce-eager, or model runner V2 "
            "(VLLM_USE_V2_MODEL_RUNNER=1)"
        )
    passes, splits = compilation.pass_config, compilation.splitting_ops
    by_inductor = bool(compilation.use_inductor_graph_partition)
    if splits is None:
        if by_inductor:
            return (
                f"use_inductor_graph_partition keeps {WRITES} in graphs, where layers would not "
                "ask for their caches. Remove it from --compilation-config"
            )
        if passes.fuse_attn_quant:
            return (
                "pass_config.fuse_attn_quant needs whole graphs, which capture attention. Remove "
                "it from --compilation-config"
            )
        return ""
    missing = [op for op in (WRITES, READS, *([INDEXES] if sparse else [])) if op not in splits]
    if missing:
        return (
            f"cudagraph_mode is {mode.name} and splitting_ops lack {', '.join(missing)}, so that "
            f"layers would not ask for their caches. {_LEAVE}"
        )
    if by_inductor and passes.fuse_rope_kvcache_cat_mla:
        return (
            "pass_config.fuse_rope_kvcache_cat_mla writes caches inside graphs. Remove it from "
            "--compilation-config"
        )
    return ""


def check_resolved(vllm_config: "VllmConfig", *, sparse: bool) -> None:
    """The same in a worker, when vLLM has decided everything.

    Raises:
        ConfigError: vLLM has come to something that KVPP cannot run with.
    """
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    found = problem(vllm_config, sparse=sparse)
    if mode is not None and mode.has_full_cudagraphs():
        found = (
            f"vLLM has settled on cudagraph_mode {mode.name}, which captures attention. Use "
            """--compilation-config '{"cudagraph_mode": "PIECEWISE"}' or --enforce-eager"""
        )
    if found:
        raise ConfigError(f"enable_kvpp: {found}")
