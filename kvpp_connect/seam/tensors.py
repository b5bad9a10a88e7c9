"""How a vLLM says where caches lie: the one place that knows the shapes of ``KVCacheTensor``.

Up to 0.26 a ``KVCacheTensor`` is an allocation, with the layers that share it (``shared_by``);
from 0.32 it places layers in one allocation for all, with strides and an offset (``layers``).
"""

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

from kvpp_connect.errors import SeamError
from kvpp_connect.layout import RankPlacement

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec


def allocated_bytes(config: KVCacheConfig) -> int:
    """Bytes of all that a plan of vLLM's allocates."""
    sizes = [tensor.size for tensor in config.kv_cache_tensors]
    return sum(sizes) if _is_an_allocation() else sizes[0]


def one_block_each(
    groups: "list[KVCacheGroupSpec]", specs: "dict[str, KVCacheSpec]"
) -> KVCacheConfig:
    """A plan with one block, an allocation for every layer and nothing shared; up to 0.26."""
    make: Any = KVCacheTensor
    tensors = [make(size=spec.page_size_bytes, shared_by=[name]) for name, spec in specs.items()]
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=tensors, kv_cache_groups=groups)


def placed(config: KVCacheConfig, placement: RankPlacement) -> KVCacheConfig:
    """vLLM's plan with this rank's placement instead of its own; from 0.32."""
    tensors = [
        KVCacheTensor(
            size=placement.total_bytes,
            layers=[place.component.layer_name],
            layer_stride=place.component.page_bytes * placement.num_blocks,
            block_stride=place.component.page_bytes,
            offset=place.offset,
        )
        for place in placement.components
    ]
    return replace(config, kv_cache_tensors=tensors, kv_tp_replicas=1)


def bound_allocation(placement: RankPlacement, layers: dict[str, Any]) -> torch.Tensor:
    """The allocation behind the layers' caches as bytes.

    Raises:
        SeamError: vLLM has bound a cache elsewhere than planned.
    """
    first = layers[placement.components[0].component.layer_name].kv_cache
    storage = first.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=first.device)
    memory.set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload] - torch's stub
    caches = {
        p.component.layer_name: layers[p.component.layer_name].kv_cache
        for p in placement.components
    }
    check_bound(placement, memory, caches)
    return memory


def check_bound(
    placement: RankPlacement, memory: torch.Tensor, caches: dict[str, torch.Tensor]
) -> None:
    """Hold what vLLM has bound against the placement.

    Args:
        memory: the rank's allocation as bytes.
        caches: the bound tensors by the placement's names.

    Raises:
        SeamError: a cache lies elsewhere than planned.
    """
    for place in placement.components:
        name = place.component.layer_name
        cache = caches[name]
        offset = cache.data_ptr() - memory.data_ptr()
        storage = cache.untyped_storage().data_ptr()
        if offset != place.offset or storage != memory.untyped_storage().data_ptr():
            raise SeamError(
                f"KVPP: vLLM bound the cache of {name} at byte {offset}, planned {place.offset}"
            )


def narrow_to_scratch(placement: RankPlacement, layers: dict[str, Any]) -> None:
    """Cut the views of layers in scratch to the slot's blocks: beyond them lie other caches.

    Args:
        layers: vLLM's layers by name, each with one tensor bound to it or with several.
    """
    blocks = placement.scratch_blocks
    for place in placement.components:
        name, _, number = place.component.layer_name.partition("/")
        if place.persistent or number:
            continue
        bound = layers[name].kv_cache
        layers[name].kv_cache = (
            tuple(cache[:blocks] for cache in bound) if isinstance(bound, tuple) else bound[:blocks]
        )


def _is_an_allocation() -> bool:
    return "shared_by" in {field.name for field in fields(KVCacheTensor)}
