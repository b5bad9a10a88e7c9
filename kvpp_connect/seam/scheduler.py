"""Scratch as the scheduler's second resource: requests never refer to more blocks than it holds."""

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvpp_connect._log import get_logger
from kvpp_connect.config import parse_additional_config
from kvpp_connect.seam.pool_guard import GuardedBlockPool, guard_pool
from kvpp_connect.seam.settings import scratch_size

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request

logger = get_logger(__name__)


class _GuardMixin:
    """Guards the pool, and tells it which finished requests' blocks are only leased."""

    # What vLLM's Scheduler provides; declared for the type checker only.
    vllm_config: Any
    kv_cache_manager: "KVCacheManager"

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed through
        super().__init__(*args, **kwargs)
        pool = self.kv_cache_manager.block_pool
        config = parse_additional_config(self.vllm_config.additional_config)
        running = min(
            scratch_size(self.vllm_config, config).blocks(pool.num_gpu_blocks),
            pool.num_gpu_blocks - 1,
        )
        self._pool = guard_pool(pool, running)
        self._leased: dict[str, list[int]] = {}
        _reserve_hits(self.kv_cache_manager, self._pool)
        logger.info(
            "KVPP compact: running requests may hold %d of %d blocks, the rest is prefix cache",
            running,
            pool.num_gpu_blocks,
        )

    def _connector_finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        keep, params = super()._connector_finished(request)  # type: ignore[misc]
        if keep:
            block_ids = self.kv_cache_manager.get_block_ids(request.request_id)
            leased = [block_id for group in block_ids for block_id in group]
            self._leased[request.request_id] = leased
            self._pool.lease(leased)
        return keep, params

    def _free_blocks(self, request: "Request") -> None:
        self._pool.end_lease(self._leased.pop(request.request_id, ()))
        super()._free_blocks(request)  # type: ignore[misc]


def _reserve_hits(manager: "KVCacheManager", pool: GuardedBlockPool) -> None:
    """Make each allocation count the leased blocks that its request hits."""
    original = manager.allocate_slots

    def allocate_slots(
        request: "Request",
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: "KVCacheBlocks | None" = None,
        **kwargs: Any,  # noqa: ANN401 - passed through
    ) -> "KVCacheBlocks | None":
        hits = new_computed_blocks.blocks if new_computed_blocks is not None else ()
        with pool.reserving_hits(block for group in hits for block in group):
            return original(
                request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, **kwargs
            )

    manager.allocate_slots = allocate_slots  # type: ignore[assignment] - the rest is in kwargs


class KvppScheduler(_GuardMixin, Scheduler):
    """vLLM's scheduler with a guarded pool."""


class KvppAsyncScheduler(_GuardMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler with a guarded pool."""
