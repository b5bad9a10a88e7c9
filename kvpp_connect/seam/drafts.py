"""The caches of the speculative proposer, by the names under which it has loaded them."""

from typing import TYPE_CHECKING

from kvpp_connect.errors import LayoutError

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def draft_cache_names(runner: "GPUModelRunner") -> frozenset[str]:
    """Cache names of the loaded proposer; empty without one, or where it keeps no cache.

    Raises:
        LayoutError: a draft layer shares a target layer's cache.
    """
    sharing = sorted(getattr(runner, "shared_kv_cache_layers", None) or {})
    if sharing:
        raise LayoutError(
            f"KVPP: layer {sharing[0]} shares the cache of "
            f"{runner.shared_kv_cache_layers[sharing[0]]}, which most ranks hold in scratch only "
            "while that layer runs. Remove --speculative-config, or turn enable_kvpp off"
        )
    drafter = getattr(runner, "drafter", None)
    return frozenset(getattr(drafter, "_draft_attn_layer_names", ()))
