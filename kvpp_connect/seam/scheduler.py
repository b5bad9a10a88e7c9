"""Scratch as the scheduler's second resource: requests never refer to more blocks than it holds.

The block pool hides all but the running blocks from allocation. When they run out vLLM waits or
preempts exactly as it does without free blocks; the hidden rest serves as prefix cache.
"""

from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvpp_connect._log import get_logger
from kvpp_connect.config import parse_additional_config
from kvpp_connect.errors import ConfigError
from kvpp_connect.seam.settings import scratch_size

logger = get_logger(__name__)


class GuardedBlockPool(BlockPool):
    """A block pool that allows references to ``running_blocks`` blocks at once."""

    hidden_blocks: int = 0

    def get_num_free_blocks(self) -> int:
        """Blocks that requests may still take; cached blocks without a reader count as free."""
        return super().get_num_free_blocks() - self.hidden_blocks

    def get_usage(self) -> float:
        """Share of the whole pool that requests refer to."""
        total = self.num_gpu_blocks - 1  # without the null block
        return 1.0 - super().get_num_free_blocks() / total if total else 0.0

    def reset_prefix_cache(self) -> bool:
        """Reset as ever: hidden blocks are not in use."""
        hidden, self.hidden_blocks = self.hidden_blocks, 0
        try:
            return super().reset_prefix_cache()
        finally:
            self.hidden_blocks = hidden


def guard_pool(pool: BlockPool, running_blocks: int) -> None:
    """Turn a new pool into a guarded one.

    Raises:
        ConfigError: the pool holds fewer blocks than one request of maximum length needs.
    """
    usable = pool.num_gpu_blocks - 1
    if running_blocks > usable:
        raise ConfigError(
            f"enable_kvpp: running requests need {running_blocks} blocks, the cache has {usable}; "
            "give it more memory or lower --max-model-len"
        )
    pool.__class__ = GuardedBlockPool
    assert isinstance(pool, GuardedBlockPool)
    pool.hidden_blocks = usable - running_blocks


class _GuardMixin:
    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed through
        super().__init__(*args, **kwargs)
        vllm_config: Any = self.vllm_config  # type: ignore[attr-defined]
        pool: BlockPool = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        config = parse_additional_config(vllm_config.additional_config)
        running = min(
            scratch_size(vllm_config, config).blocks(pool.num_gpu_blocks), pool.num_gpu_blocks - 1
        )
        guard_pool(pool, running)
        logger.info(
            "KVPP compact: running requests may hold %d of %d blocks, the rest is prefix cache",
            running,
            pool.num_gpu_blocks,
        )


class KvppScheduler(_GuardMixin, Scheduler):
    """vLLM's scheduler with a guarded pool."""


class KvppAsyncScheduler(_GuardMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler with a guarded pool."""
