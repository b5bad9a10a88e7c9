import pytest
from planning_tools import named

from kvpp_connect.errors import ConfigError
from kvpp_connect.planning.attention import Attention
from kvpp_connect.planning.geometry import (
    ParallelSizes,
    accepted_decode_contexts,
    check_sizes,
    copies,
    refusal,
)


def refused(name, tp, dcp, pcp=1):
    sizes = ParallelSizes(tensor=tp, prefill_context=pcp, decode_context=dcp)
    return refusal(sizes, named(name).attention)


@pytest.mark.parametrize(
    ("name", "tp", "largest"),
    [
        ("DeepSeek-R1", 8, 8),
        ("Kimi-K2", 16, 16),
        ("Qwen3-235B-A22B", 8, 2),
        ("Qwen3-32B", 8, 1),
        ("Qwen3-32B", 16, 2),
    ],
)
def test_the_largest_dcp_of_the_worked_cases(name, tp, largest):
    sizes = ParallelSizes(tensor=tp)
    assert accepted_decode_contexts(sizes, named(name).attention)[-1] == largest


def test_divisibility_fails_before_anything_looks_at_the_model():
    for name in ("DeepSeek-R1", "Qwen3-32B"):
        found = refused(name, 8, 3)
        assert found.by == "ParallelConfig"
        assert "does not divide TP 8" in found.reason


@pytest.mark.parametrize(
    ("tp", "dcp", "reason"),
    [
        (8, 2, "DCP needs TP above the 8 KV heads, and TP is 8"),
        (16, 4, "DCP 4 is above 2, the most"),
        (3, 1, "TP 3 does not divide the 64 attention heads"),
    ],
)
def test_the_models_own_objections(tp, dcp, reason):
    found = refused("Qwen3-32B", tp, dcp)
    assert found.by == "model"
    assert reason in found.reason


def test_query_heads_per_kv_head_must_be_divisible():
    odd = Attention(is_mla=False, kv_heads=3, kv_heads_from="", attention_heads=16, why="")
    found = refusal(ParallelSizes(tensor=8, decode_context=2), odd)
    assert found.reason == "DCP 2 does not divide the 5 query heads per KV head"


def test_every_accepted_dcp_is_listed():
    qwen = named("Qwen3-235B-A22B").attention
    assert accepted_decode_contexts(ParallelSizes(tensor=64), qwen) == (1, 2, 4, 8, 16)
    assert accepted_decode_contexts(ParallelSizes(tensor=7), qwen) == ()


def test_dcp_below_one_is_no_size_and_one_is_off():
    assert refused("DeepSeek-R1", 8, 0).by == "ParallelConfig"
    assert refused("DeepSeek-R1", 8, 1) is None


def test_with_pcp_dcp_is_off_or_one_of_two_sizes():
    for dcp in (1, 2, 16):
        assert refused("DeepSeek-R1", 8, dcp, pcp=2) is None
    for dcp in (4, 8):
        assert "one of 1, 2, 16" in refused("DeepSeek-R1", 8, dcp, pcp=2).reason


def test_pcp_multiplies_the_copies_and_dcp_divides_them():
    attention = named("Kimi-K2").attention
    assert copies(ParallelSizes(tensor=16), attention) == 16
    assert copies(ParallelSizes(tensor=16, decode_context=8), attention) == 2
    assert copies(ParallelSizes(tensor=8, prefill_context=2), attention) == 16


@pytest.mark.parametrize("size", [0, -1, 65_537])
def test_sizes_that_are_none_are_refused_by_flag(size):
    for flag, name in (("tensor", "--tp"), ("pipeline", "--pp"), ("prefill_context", "--pcp")):
        with pytest.raises(ConfigError, match=f"{name} is {size}"):
            check_sizes(ParallelSizes(**{"tensor": 1, flag: size}))
