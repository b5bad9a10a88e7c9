"""The guarded pool on vLLM's own block pool."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool

from kvpp_connect.errors import ConfigError
from kvpp_connect.seam.scheduler import guard_pool


@pytest.fixture
def pool():
    made = BlockPool(num_gpu_blocks=21, enable_caching=True, hash_block_size=16)
    guard_pool(made, 8)
    return made


def test_requests_get_the_running_blocks_and_not_one_more(pool):
    assert pool.get_num_free_blocks() == 8
    blocks = pool.get_new_blocks(8)
    assert pool.get_num_free_blocks() == 0
    with pytest.raises(ValueError, match="free blocks"):
        pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == 8


def test_usage_counts_hidden_blocks_as_free(pool):
    assert pool.get_usage() == 0
    pool.get_new_blocks(5)
    assert pool.get_usage() == pytest.approx(5 / 20)


def test_the_prefix_cache_can_be_reset(pool):
    assert pool.reset_prefix_cache()
    blocks = pool.get_new_blocks(1)
    assert not pool.reset_prefix_cache()
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.get_num_free_blocks() == 8


def test_a_pool_smaller_than_scratch_is_refused():
    small = BlockPool(num_gpu_blocks=9, enable_caching=True, hash_block_size=16)
    with pytest.raises(ConfigError, match="need 9 blocks, the cache has 8"):
        guard_pool(small, 9)
