"""What this rank holds: its caches in words, and registered with a transfer engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvpp_connect.connectors.mooncake_engine import TransferEngine
from kvpp_connect.errors import ConfigError, LayoutError
from kvpp_connect.layout import ComponentAddress, RankPlacement

if TYPE_CHECKING:
    from kvpp_connect.seam.api import KVCacheConfig, VllmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Blocks as the scheduler counts them.

    ``block_tokens`` are what one rank keeps in a block. Under decode context parallelism runs of
    ``interleave_tokens`` tokens go to ``token_shards`` ranks in turn; 0 and 1 without.
    """

    num_blocks: int
    block_tokens: int
    interleave_tokens: int = 0
    token_shards: int = 1


def block_shape(
    connector: str, kv_cache_config: "KVCacheConfig", vllm_config: "VllmConfig"
) -> BlockShape:
    """Blocks of an engine.

    Args:
        connector: who asks, for the message.

    Raises:
        ConfigError: the model has several groups of caches.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"{connector}: the model has {len(groups)} KV cache groups, this version of "
            "kvpp-connect supports one"
        )
    spec, parallel = groups[0].kv_cache_spec, vllm_config.parallel_config
    shards = parallel.decode_context_parallel_size if spec.dcp_sharded else 1
    return BlockShape(
        num_blocks=kv_cache_config.num_blocks,
        block_tokens=spec.block_size,
        interleave_tokens=parallel.cp_kv_cache_interleave_size if shards > 1 else 0,
        token_shards=shards,
    )


def describe_caches(
    kv_caches: Mapping[str, torch.Tensor],
    shape: BlockShape,
    placement: RankPlacement | None,
) -> tuple[ComponentAddress, ...]:
    """Describe the caches that this rank really holds, in the order of their names.

    Args:
        kv_caches: cache tensors by layer name, shape ``(blocks, 1, tokens, width)`` where a block
            of the scheduler may be several of the kernel's.
        placement: this rank's placement under KVPP, or ``None`` where every rank holds all.

    Raises:
        LayoutError: a tensor's shape does not fit.
    """
    return tuple(
        _address(name, kv_caches[name], shape)
        for name in sorted(kv_caches)
        if placement is None or name in placement.persistent_layers
    )


def register_storage(engine: TransferEngine, kv_caches: Mapping[str, torch.Tensor]) -> int:
    """Register the allocations behind the caches, each once; answer their number."""
    storages = {
        cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes()
        for cache in kv_caches.values()
    }
    for address, length_bytes in storages.items():
        engine.register(address, length_bytes)
    return len(storages)


def _address(name: str, cache: torch.Tensor, shape: BlockShape) -> ComponentAddress:
    kernel_blocks, remainder = divmod(cache.shape[0], shape.num_blocks)
    if remainder or kernel_blocks < 1:
        raise LayoutError(
            f"cache of {name} has {cache.shape[0]} blocks, expected a multiple of "
            f"{shape.num_blocks}"
        )
    item = cache.element_size()
    page_bytes = cache[0].numel() * item * kernel_blocks
    stride_bytes = cache.stride(0) * item * kernel_blocks
    dense = cache[0].is_contiguous()
    if not dense or (kernel_blocks > 1 and page_bytes != stride_bytes):
        raise LayoutError(f"a block of {name} is not one contiguous range of bytes")
    return ComponentAddress(
        layer_name=name,
        address=cache.data_ptr(),
        page_bytes=page_bytes,
        block_stride_bytes=stride_bytes,
        token_bytes=_token_bytes(cache, page_bytes, kernel_blocks, shape.block_tokens),
        dtype=str(cache.dtype).removeprefix("torch."),
    )


def _token_bytes(
    cache: torch.Tensor, page_bytes: int, kernel_blocks: int, block_tokens: int
) -> int:
    """Bytes of one token where tokens certainly lie one after the other, else 0.

    Packed caches are bytes to torch, and some keep all values of a block before all its scales.
    """
    in_rows = cache.dim() == 4 and cache.shape[1] == 1 and cache.dtype.is_floating_point
    rows = cache.shape[2] * kernel_blocks if in_rows else 0
    return page_bytes // rows if rows == block_tokens else 0
