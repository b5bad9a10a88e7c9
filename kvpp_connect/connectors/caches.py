"""What this rank holds: its caches in words, and registered with a transfer engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvpp_connect.connectors.mooncake_engine import TransferEngine
from kvpp_connect.errors import ConfigError, LayoutError
from kvpp_connect.layout import ComponentAddress, RankPlacement, tensor_name

if TYPE_CHECKING:
    from kvpp_connect.seam.api import KVCacheConfig, KVCacheSpec, VllmConfig


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
        ConfigError: the model has several groups of caches, or vLLM does not tell how their
            tokens are split.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"{connector}: the model has {len(groups)} KV cache groups, this version of "
            "kvpp-connect supports one"
        )
    spec, parallel = groups[0].kv_cache_spec, vllm_config.parallel_config
    shards = parallel.decode_context_parallel_size
    if shards > 1 and not _is_sharded(connector, spec, shards):
        shards = 1
    return BlockShape(
        num_blocks=kv_cache_config.num_blocks,
        block_tokens=spec.block_size,
        interleave_tokens=parallel.cp_kv_cache_interleave_size if shards > 1 else 0,
        token_shards=shards,
    )


def _is_sharded(connector: str, spec: "KVCacheSpec", shards: int) -> bool:
    if not hasattr(spec, "dcp_sharded"):  # up to vLLM 0.26
        raise ConfigError(
            f"{connector}: decode_context_parallel_size is {shards}, and this vLLM does not tell "
            "which caches it splits. Use --decode-context-parallel-size 1"
        )
    return spec.dcp_sharded


def describe_caches(
    kv_caches: Mapping[str, torch.Tensor],
    shape: BlockShape,
    placement: RankPlacement | None,
) -> tuple[ComponentAddress, ...]:
    """Describe the caches that this rank really holds, in the order of their names.

    Args:
        kv_caches: cache tensors by name, shape ``(blocks, 1, tokens, width)`` or ``(blocks,
            tokens, 1, width)`` where a block of the scheduler may be several of the kernel's.
        placement: this rank's placement under KVPP, or ``None`` where every rank holds all.

    Raises:
        LayoutError: a tensor's shape does not fit.
    """
    return tuple(
        _address(name, kv_caches[name], shape)
        for name in sorted(kv_caches)
        if placement is None or name in placement.persistent_layers
    )


def cache_tensors(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """One name for each cache tensor, where several may be bound to a layer."""
    found: dict[str, torch.Tensor] = {}
    for name, bound in kv_caches.items():
        tensors = (bound,) if isinstance(bound, torch.Tensor) else bound
        found |= {tensor_name(name, number): tensor for number, tensor in enumerate(tensors)}
    return found


def register_storage(engine: TransferEngine, kv_caches: Mapping[str, torch.Tensor]) -> int:
    """Register what each allocation has of the caches, as one range; answer their number.

    The range begins with the first cache, so that it is aligned where that one is.
    """
    ranges: dict[int, tuple[int, int]] = {}
    for cache in kv_caches.values():
        storage = cache.untyped_storage()
        end = min(cache.data_ptr() + _extent(cache), storage.data_ptr() + storage.nbytes())
        first, last = ranges.get(storage.data_ptr(), (cache.data_ptr(), end))
        ranges[storage.data_ptr()] = min(first, cache.data_ptr()), max(last, end)
    for first, last in ranges.values():
        engine.register(first, last - first)
    return len(ranges)


def _extent(cache: torch.Tensor) -> int:
    """Bytes from a cache's first to behind its last, gaps between its blocks included."""
    return cache.shape[0] * cache.stride(0) * cache.element_size()


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
    in_rows = cache.dim() == 4 and 1 in cache.shape[1:3] and cache.dtype.is_floating_point
    rows = cache.shape[1] * cache.shape[2] * kernel_blocks if in_rows else 0
    return page_bytes // rows if rows == block_tokens else 0
