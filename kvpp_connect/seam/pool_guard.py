"""A block pool that bounds how many blocks running requests refer to.

Scratch holds the blocks of running requests. The pool hides all others from allocation, so when
scratch is full vLLM waits or preempts exactly as it does without free blocks; the rest serves as
prefix cache. Blocks that only leases refer to, of finished requests whose decode node has not read
them yet, are not running and do not count, until another request hits them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvpp_connect.errors import ConfigError


class GuardedBlockPool(BlockPool):
    """A block pool that allows requests to refer to ``running_blocks`` blocks at once."""

    running_blocks: int
    _leases: Counter[int]  # references by leases, by block id
    _idle_leased: int  # blocks that only leases refer to
    _hits: Sequence[KVCacheBlock]  # of the request that is being given blocks

    def get_num_free_blocks(self) -> int:
        """Blocks that requests may still take; cached blocks without a reader count as free."""
        free = super().get_num_free_blocks()
        running = self._usable - free - self._idle_leased
        # Blocks that are only leased become running ones when they are hit. vLLM does not count
        # them, since taking what is not free costs nothing there.
        about_to_run = self._count_idle_leased(self._hits)
        return min(free, self.running_blocks - running - about_to_run)

    def get_usage(self) -> float:
        """Share of the whole pool that requests and leases refer to."""
        return 1.0 - super().get_num_free_blocks() / self._usable if self._usable else 0.0

    def reset_prefix_cache(self) -> bool:
        """Reset as ever: hidden blocks are not in use."""
        limit, self.running_blocks = self.running_blocks, self.num_gpu_blocks
        idle_leased, self._idle_leased = self._idle_leased, 0
        try:
            return super().reset_prefix_cache()
        finally:
            self.running_blocks, self._idle_leased = limit, idle_leased

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a reference to each block."""
        before = self._count_idle_leased(blocks)
        super().touch(blocks)
        self._idle_leased += self._count_idle_leased(blocks) - before

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drop a reference of each block."""
        blocks = list(ordered_blocks)
        before = self._count_idle_leased(blocks)
        super().free_blocks(blocks)
        self._idle_leased += self._count_idle_leased(blocks) - before

    def lease(self, block_ids: Iterable[int]) -> None:
        """A finished request's references become a lease's."""
        blocks = [self.blocks[block_id] for block_id in block_ids]
        before = self._count_idle_leased(blocks)
        self._leases.update(block.block_id for block in blocks if not block.is_null)
        self._idle_leased += self._count_idle_leased(blocks) - before

    def end_lease(self, block_ids: Iterable[int]) -> None:
        """The lease's references are dropped next, by ``free_blocks``."""
        blocks = [self.blocks[block_id] for block_id in block_ids]
        before = self._count_idle_leased(blocks)
        self._leases.subtract(block.block_id for block in blocks if not block.is_null)
        self._leases = +self._leases  # without zeros
        self._idle_leased += self._count_idle_leased(blocks) - before

    @contextmanager
    def reserving_hits(self, hits: Iterable[KVCacheBlock]) -> Iterator[None]:
        """Surround the allocation of a request that will refer to these cached blocks as well."""
        self._hits = tuple(hits)
        try:
            yield
        finally:
            self._hits = ()

    @property
    def _usable(self) -> int:
        return self.num_gpu_blocks - 1  # without the null block

    def _is_idle_leased(self, block: KVCacheBlock) -> bool:
        return 0 < block.ref_cnt == self._leases.get(block.block_id, 0)

    def _count_idle_leased(self, blocks: Sequence[KVCacheBlock]) -> int:
        if not self._leases:
            return 0
        distinct = {block.block_id: block for block in blocks}
        return sum(map(self._is_idle_leased, distinct.values()))


def guard_pool(pool: BlockPool, running_blocks: int) -> GuardedBlockPool:
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
    pool.running_blocks = running_blocks
    pool._leases, pool._idle_leased, pool._hits = Counter(), 0, ()  # noqa: SLF001 - its maker
    return pool
