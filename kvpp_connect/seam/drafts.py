"""The caches of the speculative proposer, by the names under which it has loaded them."""

from typing import Any

from kvpp_connect.errors import LayoutError


def draft_cache_names(runner: Any) -> frozenset[str]:  # noqa: ANN401 - one of vLLM's runners
    """Cache names of the loaded proposer; empty without one, or where it keeps no cache.

    Raises:
        LayoutError: a draft layer shares a target layer's cache.
    """
    shared = _shared_caches(runner)
    if shared:
        layer, target = min(shared.items())
        raise LayoutError(
            f"KVPP: layer {layer} shares the cache of {target}, which most ranks hold in scratch "
            "only while that layer runs. Remove --speculative-config, or turn enable_kvpp off"
        )
    v1 = getattr(getattr(runner, "drafter", None), "_draft_attn_layer_names", ())
    v2 = getattr(getattr(runner, "speculator", None), "draft_attn_layer_names", ())
    return frozenset(v1) | frozenset(v2)


def _shared_caches(runner: Any) -> dict[str, str]:  # noqa: ANN401
    """Target layer by the layer that uses its cache."""
    if not hasattr(runner, "speculator"):
        return getattr(runner, "shared_kv_cache_layers", None) or {}
    from vllm.v1.worker.gpu.attn_utils import get_shared_kv_cache_layers

    return get_shared_kv_cache_layers(runner.vllm_config)
