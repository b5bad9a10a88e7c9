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
    from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig

WRITES = "vllm::unified_mla_kv_cache_update"
READS = "vllm::unified_mla_attention_with_output"
INDEXES = "vllm::sparse_attn_indexer"
_LEAVE = "Remove splitting_ops from --compilation-config, or use --enforce-eager"


def piecewise() -> "CUDAGraphMode":
    """The mode that leaves attention out of graphs."""
    from vllm.config import CUDAGraphMode

    return CUDAGraphMode.PIECEWISE


def breakable() -> bool:
    """Whether this process uses breakable graphs; vLLM chooses them by the model, or the user.

    A vLLM without them uses none.
    """
    try:
        from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
    except ImportError:
        return False

    return is_breakable_cudagraph_enabled()


def problem(compilation: "CompilationConfig | Any", *, sparse: bool) -> str:  # noqa: ANN401
    """What keeps layers from asking; empty where nothing does.

    Args:
        compilation: vLLM's, before or after it has filled ``splitting_ops``.
        sparse: whether layers have indexers.
    """
    mode = compilation.cudagraph_mode
    if mode is None or not mode.has_piecewise_cudagraphs() or breakable():
        return ""
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
    found = problem(compilation, sparse=sparse)
    if mode is not None and mode.has_full_cudagraphs():
        found = (
            f"vLLM has settled on cudagraph_mode {mode.name}, which captures attention. Use "
            """--compilation-config '{"cudagraph_mode": "PIECEWISE"}' or --enforce-eager"""
        )
    if found:
        raise ConfigError(f"enable_kvpp: {found}")
