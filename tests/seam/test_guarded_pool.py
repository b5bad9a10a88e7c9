"""The guarded pool on vLLM's own block pool."""

import random

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool

from kvpp_connect.errors import ConfigError
from kvpp_connect.seam.pool_guard import guard_pool


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


def test_leased_blocks_leave_room_for_running_requests(pool):
    blocks = pool.get_new_blocks(8)
    ids = [block.block_id for block in blocks]
    pool.lease(ids)
    assert pool.get_num_free_blocks() == 8
    assert pool.get_usage() == pytest.approx(8 / 20)
    assert not pool.reset_prefix_cache()
    pool.end_lease(ids)
    assert pool.get_num_free_blocks() == 0
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == 8


def test_leases_cannot_take_more_than_there_is(pool):
    for _ in range(2):
        pool.lease([block.block_id for block in pool.get_new_blocks(8)])
    assert pool.get_num_free_blocks() == 4


def test_a_request_that_hits_leased_blocks_pays_for_them(pool):
    leased = pool.get_new_blocks(6)
    pool.lease([block.block_id for block in leased])
    with pool.reserving_hits(leased[:5]):
        assert pool.get_num_free_blocks() == 3
        pool.touch(leased[:5])
        assert pool.get_num_free_blocks() == 3
        pool.get_new_blocks(3)
    assert pool.get_num_free_blocks() == 0
    # A second reader of the same blocks pays nothing.
    with pool.reserving_hits(leased[:5]):
        assert pool.get_num_free_blocks() == 0


class Model:
    """Requests and leases on a guarded pool, and what the counts should be."""

    def __init__(self, seed, blocks=30, running=12):
        self.rng = random.Random(seed)
        self.pool = BlockPool(num_gpu_blocks=blocks + 1, enable_caching=True, hash_block_size=16)
        guard_pool(self.pool, running)
        self.limit, self.total = running, blocks
        self.running, self.leased = [], []

    def start(self):
        held = [block for request in (*self.running, *self.leased) for block in request]
        hits = self.rng.sample(held, min(len(held), self.rng.randrange(6)))
        hits = list({block.block_id: block for block in hits}.values())
        new = self.rng.randrange(1, 7)
        with self.pool.reserving_hits(hits):
            if new > self.pool.get_num_free_blocks():
                return
            self.pool.touch(hits)
            self.running.append([*hits, *self.pool.get_new_blocks(new)])

    def finish(self):
        if self.running:
            request = self.running.pop(self.rng.randrange(len(self.running)))
            if self.rng.random() < 0.5:
                self.pool.free_blocks(reversed(request))
            else:
                self.pool.lease(block.block_id for block in request)
                self.leased.append(request)

    def end_lease(self):
        if self.leased:
            request = self.leased.pop(self.rng.randrange(len(self.leased)))
            self.pool.end_lease(block.block_id for block in request)
            self.pool.free_blocks(reversed(request))

    def check(self):
        running = {block.block_id for request in self.running for block in request}
        held = running | {block.block_id for request in self.leased for block in request}
        assert len(running) <= self.limit
        expected = min(self.total - len(held), self.limit - len(running))
        assert self.pool.get_num_free_blocks() == expected


@pytest.mark.parametrize("seed", range(40))
def test_running_requests_never_refer_to_more_than_scratch_holds(seed):
    model = Model(seed)
    for _ in range(300):
        model.rng.choice([model.start, model.start, model.finish, model.end_lease])()
        model.check()
