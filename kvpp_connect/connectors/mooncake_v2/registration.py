"""Worker side: what this rank holds, registered with the transfer engine and put into words."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch

from kvpp_connect.connectors.mooncake_engine import TransferEngine
from kvpp_connect.connectors.mooncake_v2.transfer_plan import LocalCaches
from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import ComponentAddress, RankManifest, RankPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Blocks as the scheduler counts them."""

    num_blocks: int
    block_tokens: int


class StagePublication(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of one KVPP group publish, as it travels to the scheduler side."""

    num_blocks: int
    block_tokens: int
    cache_dtype: str
    ranks: tuple[RankManifest, ...]


def describe_caches(
    kv_caches: Mapping[str, torch.Tensor],
    shape: BlockShape,
    placement: RankPlacement | None,
) -> LocalCaches:
    """Describe the caches that this rank really holds.

    Args:
        kv_caches: cache tensors by layer name, shape ``(blocks, 1, tokens, bytes)`` where a block
            of the scheduler may be several of the kernel's.
        placement: this rank's placement under KVPP, or ``None`` where every rank holds all.

    Raises:
        LayoutError: the layers have different dtypes, or a tensor's shape does not fit.
    """
    held = {
        name: cache
        for name, cache in kv_caches.items()
        if placement is None or name in placement.persistent_layers
    }
    dtypes = sorted({str(cache.dtype) for cache in kv_caches.values()})
    if len(dtypes) != 1:
        raise LayoutError(f"KV caches of several dtypes are not supported: {', '.join(dtypes)}")
    return LocalCaches(
        block_tokens=shape.block_tokens,
        cache_dtype=dtypes[0],
        components=tuple(_address(name, held[name], shape) for name in sorted(held)),
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
    tokens_in_rows = cache.dim() == 4 and cache.shape[1] == 1
    rows = cache.shape[2] * kernel_blocks if tokens_in_rows else 0
    return ComponentAddress(
        layer_name=name,
        address=cache.data_ptr(),
        page_bytes=page_bytes,
        block_stride_bytes=stride_bytes,
        token_bytes=page_bytes // rows if rows == shape.block_tokens else 0,
    )
