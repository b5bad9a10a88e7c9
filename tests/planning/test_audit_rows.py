import pytest
from planning_tools import MLA, named, write_config

from kvpp_connect.errors import ConfigError
from kvpp_connect.planning.audit import audit, read_model
from kvpp_connect.planning.caches import CacheOptions
from kvpp_connect.planning.geometry import ParallelSizes


def row(model, tp, pcp=1, dcp=1, **more):
    sizes = ParallelSizes(tensor=tp, prefill_context=pcp, decode_context=dcp)
    return audit(model, sizes, CacheOptions(), **more)


def launches(found):
    return [(advice.cure, advice.flags, advice.copies_left) for advice in found.advice]


KVPP = """--additional-config '{"enable_kvpp": true}'"""


@pytest.mark.parametrize(
    ("name", "tp", "wanted"),
    [
        ("DeepSeek-R1", 8, [("kvpp", f"-tp 8 {KVPP}", 1), ("dcp", "-tp 8 -dcp 8", 1)]),
        (
            "Kimi-K2",
            16,
            [
                ("kvpp", f"-tp 16 {KVPP}", 1),
                ("dcp", "-tp 16 -dcp 16", 1),
                ("dcp", "-tp 16 -dcp 8", 2),
            ],
        ),
        ("Qwen3-235B-A22B", 8, [("dcp", "-tp 8 -dcp 2", 1)]),
        ("Qwen3-32B", 8, [("nothing", "-tp 8", 1)]),
        ("Qwen3-32B", 16, [("dcp", "-tp 16 -dcp 2", 1)]),
    ],
)
def test_what_to_launch_in_the_worked_cases(name, tp, wanted):
    assert launches(row(named(name), tp)) == wanted


def test_the_waste_is_all_copies_but_one():
    found = row(named("DeepSeek-R1"), 8)
    assert found.distinct_token_bytes == 61 * 1152
    assert found.wasted_token_bytes == 7 * 61 * 1152
    assert found.wasted_share == 7 / 8
    assert row(named("Qwen3-32B"), 8).wasted_token_bytes == 0


def test_one_copy_of_a_token_is_the_same_at_every_size():
    qwen = named("Qwen3-235B-A22B")
    assert {row(qwen, tp).distinct_token_bytes for tp in (1, 2, 4, 8, 16)} == {94 * 2 * 4 * 128 * 2}


def test_dcp_takes_copies_away_unless_it_is_refused():
    assert row(named("Kimi-K2"), 16, dcp=8).copies == 2
    refused = row(named("DeepSeek-R1"), 8, dcp=3)
    assert refused.copies == 8
    assert refused.refusal.by == "ParallelConfig"


def test_pcp_is_no_cure_and_may_leave_copies_that_nothing_removes():
    assert row(named("DeepSeek-R1"), 8, pcp=2).copies == 16
    qwen = row(named("Qwen3-32B"), 8, pcp=2)
    assert qwen.copies == 2
    assert launches(qwen) == [("nothing", "-tp 8 -pcp 2", 2)]
    assert qwen.advice[0].why == "no DCP is accepted, and 2 copies stay"


def test_sizes_that_never_start_get_no_advice():
    assert row(named("DeepSeek-R1"), 7).advice == ()


def test_kvpp_is_not_advised_where_the_cache_is_not_known(tmp_path):
    config = {**MLA, "model_type": "kimi_linear"}
    found = row(read_model(write_config(tmp_path, config), environment={}), 8)
    assert "not known here" in found.unknown_caches
    assert found.distinct_token_bytes is None
    assert [advice.cure for advice in found.advice] == ["dcp"]


def test_nodes_of_other_sizes():
    found = row(named("Kimi-K2"), 16, ranks_per_node=4)
    assert launches(found)[-1] == ("dcp", "-tp 16 -dcp 4", 4)
    with pytest.raises(ConfigError, match="--ranks-per-node is 0"):
        row(named("Kimi-K2"), 16, ranks_per_node=0)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({}, 2048),
        ({"max_position_embeddings": 4096, "seq_length": 1024}, 1024),
        ({"max_position_embeddings": 4096, "model_max_length": 8192}, 8192),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4}},
            16384,
        ),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 4}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"factor": "x"}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": 7}, 4096),
    ],
)
def test_the_longest_sequence_is_derived_as_vllm_does(tmp_path, config, tokens):
    base = {"model_type": "llama", "num_attention_heads": 8}
    model = read_model(write_config(tmp_path, base | config), environment={})
    assert model.max_model_tokens == tokens
