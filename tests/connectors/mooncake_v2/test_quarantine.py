"""Blocks in quarantine are nobody's, for exactly as long as they may be written."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool

from kvpp_connect.connectors.mooncake_v2.quarantine import BlockQuarantine
from kvpp_connect.seam.api import PoolPins


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_pinned_block_is_not_handed_out_though_its_request_frees_it():
    pool = BlockPool(num_gpu_blocks=9, enable_caching=True, hash_block_size=16)
    clock = Clock()
    quarantine = BlockQuarantine(clock)
    quarantine.bind(PoolPins(pool))
    blocks = pool.get_new_blocks(3)
    ids = [block.block_id for block in blocks]
    quarantine.hold(ids, 30.0)

    pool.free_blocks(reversed(blocks))  # finished, aborted or preempted
    assert pool.get_num_free_blocks() == 5
    others = pool.get_new_blocks(5)
    assert not {block.block_id for block in others} & set(ids)

    clock.now += 29.9
    quarantine.end_due()
    assert pool.get_num_free_blocks() == 0
    clock.now += 0.2
    quarantine.end_due()
    quarantine.end_due()
    assert pool.get_num_free_blocks() == 3


def test_a_request_that_outlives_the_quarantine_keeps_its_blocks():
    pool = BlockPool(num_gpu_blocks=9, enable_caching=True, hash_block_size=16)
    clock = Clock()
    quarantine = BlockQuarantine(clock)
    quarantine.bind(PoolPins(pool))
    blocks = pool.get_new_blocks(3)
    quarantine.hold([block.block_id for block in blocks], 30.0)
    quarantine.hold([blocks[0].block_id], 60.0)
    clock.now += 31
    quarantine.end_due()
    assert pool.get_num_free_blocks() == 5
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == 7
    clock.now += 30
    quarantine.end_due()
    assert pool.get_num_free_blocks() == 8
