"""Caches of one tensor or of several per layer, their ranges of memory and their tokens."""

import torch

from kvpp_connect.connectors.caches import (
    BlockShape,
    cache_tensors,
    describe_caches,
    register_storage,
)

BLOCKS, TOKENS = 4, 8


class NotingEngine:
    session = "127.0.0.1:1"

    def __init__(self):
        self.ranges = []

    def register(self, address, length_bytes):
        self.ranges.append((address, length_bytes))


def test_each_tensor_of_a_layer_has_a_name():
    first, second = torch.zeros(1), torch.zeros(2)
    assert cache_tensors({"a": (first, second), "b": [second], "c": first}) == {
        "a": first,
        "a/1": second,
        "b": second,
        "c": first,
    }


def test_one_range_per_allocation_begins_with_the_first_cache_and_ends_with_the_last():
    memory = torch.zeros(4096, dtype=torch.uint8)
    near, far = memory[256:512].view(4, 64), memory[1024:2048].view(4, 256)
    other = torch.zeros(BLOCKS, 16)
    engine = NotingEngine()
    assert register_storage(engine, {"far": far, "near": near, "again": near, "other": other}) == 2
    assert sorted(engine.ranges) == sorted(
        [(memory.data_ptr() + 256, 2048 - 256), (other.data_ptr(), BLOCKS * 16 * 4)]
    )


def test_a_range_ends_with_its_allocation_where_blocks_of_other_layers_lie_between():
    memory = torch.zeros(4, 2, 16)  # blocks, layers, bytes of four
    engine = NotingEngine()
    register_storage(engine, {"a": memory[:, 0], "b": memory[:, 1]})
    assert engine.ranges == [(memory.data_ptr(), memory.nbytes)]


def test_tokens_are_found_on_either_side_of_the_single_head():
    shape = BlockShape(num_blocks=BLOCKS, block_tokens=TOKENS)
    caches = {
        "head first": torch.zeros(BLOCKS, 1, TOKENS, 16, dtype=torch.bfloat16),
        "tokens first": torch.zeros(BLOCKS, TOKENS, 1, 16, dtype=torch.bfloat16),
        "two heads": torch.zeros(BLOCKS, TOKENS, 2, 16, dtype=torch.bfloat16),
        "packed": torch.zeros(BLOCKS, TOKENS, 1, 16, dtype=torch.int8),
    }
    found = {c.layer_name: c.token_bytes for c in describe_caches(caches, shape, None)}
    assert found == {"head first": 32, "tokens first": 32, "two heads": 0, "packed": 0}
