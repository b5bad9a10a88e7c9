"""vLLM's KV events for blocks in a store, and what else names a block beside its tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash

from kvpp_connect.seam.older_vllm import MEDIUM_STORAGE, to_event_extra_keys

if TYPE_CHECKING:
    from vllm.v1.request import Request


def block_extra(request: "Request", start: int, end: int) -> bytes:
    """What decides about the KV of tokens ``[start, end)`` beside tokens: adapter, images, salt.

    Empty for nothing; equal bytes for equal things, in every process.
    """
    extra, _ = generate_block_hash_extra_keys(request, start, end, 0)
    return msgspec.msgpack.encode(extra) if extra else b""


def stored_event(
    request: "Request", start: int, end: int, hash_block_tokens: int
) -> tuple[bytes | int, KVCacheEvent] | None:
    """The event for one full block of a request, and the block's name in it.

    Args:
        hash_block_tokens: tokens for which one of vLLM's own block hashes stands; it divides the
            block's.

    Returns:
        ``None`` where vLLM has not hashed the block.
    """
    hashes = request.block_hashes
    if len(hashes) * hash_block_tokens < end:
        return None
    name = maybe_convert_block_hash(hashes[end // hash_block_tokens - 1])
    parent = maybe_convert_block_hash(hashes[start // hash_block_tokens - 1]) if start else None
    lora = request.lora_request
    extra, _ = generate_block_hash_extra_keys(request, start, end, 0)
    event = BlockStored(
        block_hashes=[name],
        parent_block_hash=parent,
        token_ids=list(request.all_token_ids[start:end]),
        block_size=end - start,
        lora_id=lora.adapter_id if lora else None,
        medium=MEDIUM_STORAGE,
        lora_name=lora.name if lora else None,
        extra_keys=to_event_extra_keys([extra]),
    )
    return name, event


def removed_event(names: Sequence[bytes | int]) -> KVCacheEvent:
    """The event for blocks that the store holds no more."""
    return BlockRemoved(block_hashes=list(names), medium=MEDIUM_STORAGE)
