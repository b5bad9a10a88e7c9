"""Sparse MLA (DeepSeek-V3.2 shape) on CPU, in plain torch: a reference for tests, not fast.

vLLM's model, cache specs, indexer op and indexer metadata are used as they are; replaced is only
what exists for accelerators alone: the kernels that the indexer op calls, and the sparse attention
backend. Index keys are stored as on an accelerator: a block holds the fp8 values of its tokens,
then one float32 scale for each of them.
"""

from itertools import pairwise
from typing import Any

import torch

FP8_MAX = 448.0


def install() -> None:
    """Put the replacements in place; once per process, before the model is built."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers import sparse_attn_indexer as indexer
    from vllm.model_executor.models import deepseek_v2
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.mla import indexer as indexer_metadata

    dense_backend = CpuPlatform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if attn_selector_config.use_sparse:
            return "kvpp_sparse_backend.SparseCpuBackend"
        return dense_backend(cls, selected_backend, attn_selector_config, num_heads)

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    CpuPlatform.num_compute_units = classmethod(lambda cls, device_id=0: 1)
    deepseek_v2.per_token_group_quant_fp8 = unquantised_queries
    # The branch for accelerators, which goes through the opaque op.
    indexer.SparseAttnIndexer.forward_cpu = indexer.SparseAttnIndexer.forward_cuda
    indexer.fp8_fp4_mqa_logits = mqa_logits
    indexer.fp8_fp4_paged_mqa_logits = paged_mqa_logits
    indexer.get_indexer_topk = lambda backend: decode_topk
    ops.indexer_k_quant_and_cache = store_keys
    ops.cp_gather_indexer_k_quant_cache = gather_keys
    ops.top_k_per_row_prefill = prefill_topk
    indexer_metadata._BUILD_PREFILL_CHUNK_METADATA_KERNEL = prefill_bounds  # noqa: SLF001


def unquantised_queries(q: torch.Tensor, group: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries stay as they are: scales of one."""
    return q, q.new_ones(q.shape[0], q.shape[1] // group)


def _parts(cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values ``(blocks, tokens, head_dim)`` as bytes and scales ``(blocks, tokens)`` of a cache."""
    tokens = cache.shape[1]
    block = cache.reshape(cache.shape[0], tokens * cache.shape[-1])
    assert block.data_ptr() == cache.data_ptr(), "the cache was copied"
    values = block[:, : tokens * head_dim].unflatten(1, (tokens, head_dim))
    return values, block[:, tokens * head_dim :].view(torch.float32)


def store_keys(
    k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, group: int, scale_format: str
) -> None:
    """Quantise keys ``(tokens, head_dim)`` and write them to their slots; -1 is padding."""
    values, scales = _parts(cache, k.shape[-1])
    used = slots >= 0
    k, slots = k[used].float(), slots[used]
    scale = (k.abs().amax(-1) / FP8_MAX).clamp(min=1e-10)
    if scale_format == "ue8m0":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    blocks, offsets = slots // cache.shape[1], slots % cache.shape[1]
    fp8 = (k / scale.unsqueeze(1)).to(torch.float8_e4m3fn)
    values[blocks, offsets] = fp8.view(torch.uint8)
    scales[blocks, offsets] = scale


def gather_keys(
    cache: torch.Tensor,
    k_values: torch.Tensor,
    k_scales: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
) -> None:
    """Copy the keys of each request, one request after the other, out of their blocks."""
    values, scales = _parts(cache, k_values.shape[-1])
    bounds = cu_seq_lens.tolist()
    for row, (start, end) in enumerate(pairwise(bounds)):
        position = torch.arange(end - start)
        blocks = block_table[row][position // cache.shape[1]].long()
        offsets = position % cache.shape[1]
        k_values.view(torch.uint8)[start:end] = values[blocks, offsets]
        k_scales[start:end] = scales[blocks, offsets].unsqueeze(1).view(torch.uint8)


def _scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Index scores ``(queries, keys)`` of queries ``(queries, heads, dim)``."""
    return torch.einsum("qhk,qh->qk", torch.einsum("qhd,kd->qhk", q, k).relu(), weights.float())


def mqa_logits(
    q: tuple[torch.Tensor, None],
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Scores of prefill queries over gathered keys ``(keys, dim)`` with scales ``(keys,)``."""
    return _scores(q[0].float(), kv[0].float() * kv[1].unsqueeze(1), weights)


def prefill_topk(
    logits: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    stride0: int,
    stride1: int,
    k: int,
) -> None:
    """Best positions in ``[starts, ends)`` of each row, counted from its start; -1 fills up."""
    for row in range(rows):
        start, end = int(starts[row]), int(ends[row])
        _best(logits[row, start:end], out[row], k)


def _best(scores: torch.Tensor, out: torch.Tensor, k: int) -> None:
    best = scores.topk(min(k, len(scores))).indices.sort().values
    out.fill_(-1)
    out[: len(best)] = best.to(out.dtype)


def paged_mqa_logits(
    q: tuple[torch.Tensor, None],
    cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule: Any,
    *,
    max_model_len: int,
    **_: Any,
) -> torch.Tensor:
    """Scores of decode queries ``(requests, per request, heads, dim)`` over paged keys."""
    requests, per_request, _, head_dim = q[0].shape
    values, scales = _parts(cache.squeeze(2), head_dim)
    logits = q[0].new_full((requests * per_request, max_model_len), float("-inf"))
    for row in range(requests * per_request):
        request = row // per_request
        position = torch.arange(int(seq_lens.reshape(-1)[row]))
        blocks = block_table[request][position // cache.shape[1]].long()
        offsets = position % cache.shape[1]
        k = values[blocks, offsets].view(torch.float8_e4m3fn).float()
        k = k * scales[blocks, offsets].unsqueeze(1)
        query = q[0][request, row % per_request].float().unsqueeze(0)
        logits[row, : len(position)] = _scores(query, k, weights[row : row + 1])[0]
    return logits


def decode_topk(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    next_n: int,
    out: torch.Tensor,
    k: int,
    max_seq_len: int,
) -> None:
    """Best positions of each row below its length."""
    for row, length in enumerate(seq_lens.reshape(-1).tolist()):
        _best(logits[row, :length], out[row], k)


def prefill_bounds(
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    row_starts: torch.Tensor,
    token_to_seq: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slice_start: int,
    slice_stop: int,
    *_: int,
    num_reqs: int,
    **__: Any,
) -> None:
    """First and last key of each query of a chunk, in the gathered keys; fills the outputs."""
    for request in range(num_reqs):
        first, last = int(query_start[request]), int(query_start[request + 1])
        start, length = int(row_starts[request]), int(seq_lens[request])
        token_to_seq[int(cu_seq_lens[request]) : int(cu_seq_lens[request + 1])] = request
        for query in range(max(first, slice_start), min(last, slice_stop)):
            starts[query - slice_start] = start
            ends[query - slice_start] = start + length - (last - first) + query - first + 1
