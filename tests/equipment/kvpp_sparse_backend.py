"""The sparse MLA attention backend of :mod:`kvpp_sparse_cpu`, loaded by vLLM by name."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MLAAttentionImpl,
)
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

BLOCK_TOKENS = 64  # the only size that vLLM's indexer backend takes


@dataclass
class SparseCpuMetadata(AttentionMetadata):
    """``block_table`` has shape ``(requests, width)``, ``request_of_token`` ``(tokens,)``."""

    block_table: torch.Tensor
    request_of_token: torch.Tensor
    num_actual_tokens: int
    # To vLLM's MLA layer every token is one of a decode: it takes the top-k path.
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    prefill: None = None


class SparseCpuMetadataBuilder(AttentionMetadataBuilder[SparseCpuMetadata]):
    """Builds the metadata of a batch."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if not is_workspace_manager_initialized():
            init_workspace_manager(device)  # the indexer op gathers keys there

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SparseCpuMetadata:
        common = common_attn_metadata
        lengths = common.query_start_loc_cpu.diff()
        return SparseCpuMetadata(
            block_table=common.block_table_tensor,
            request_of_token=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
        )


class SparseCpuImpl(MLAAttentionImpl[SparseCpuMetadata], SharedTopkIndicesBuffer):
    """Attends to the positions that the indexer left in the shared buffer."""

    is_sparse = True
    supports_dense_mha_prefill = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        *_: Any,
        kv_lora_rank: int,
        indexer: object = None,
        topk_indices_buffer: torch.Tensor | None = None,
        **__: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.kv_lora_rank = kv_lora_rank
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def record_logical_topk_ready(self) -> None:
        """Nothing runs beside the host."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *_: Any,
    ) -> None:
        slots = slot_mapping.flatten()
        used = slots >= 0
        rows = torch.cat([kv_c_normed, k_pe.squeeze(1)], -1)[: len(slots)]
        slots, block_tokens = slots[used], kv_cache.shape[1]
        kv_cache[slots // block_tokens, slots % block_tokens] = rows[used]

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseCpuMetadata,
        layer: object,
    ) -> tuple[torch.Tensor, None]:
        q = torch.cat(q, -1) if isinstance(q, tuple) else q
        assert self.topk_indices_buffer is not None
        positions = self.topk_indices_buffer[: q.shape[0]].long()
        found, block_tokens = positions.clamp(min=0), kv_c_and_k_pe_cache.shape[1]
        tables = attn_metadata.block_table[attn_metadata.request_of_token].long()
        blocks = tables.gather(1, found // block_tokens)
        rows = kv_c_and_k_pe_cache[blocks, found % block_tokens]
        scores = torch.einsum("thd,tkd->thk", q, rows) * self.scale
        scores = scores.masked_fill((positions < 0).unsqueeze(1), float("-inf"))
        latent = rows[..., : self.kv_lora_rank]
        return torch.einsum("thk,tkd->thd", scores.softmax(-1), latent), None


class SparseCpuBackend(AttentionBackend):
    """Names the classes above."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA_SPARSE_FOR_TESTS"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int]:
        return [BLOCK_TOKENS]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @staticmethod
    def get_builder_cls() -> type[SparseCpuMetadataBuilder]:
        return SparseCpuMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[SparseCpuImpl]:
        return SparseCpuImpl
