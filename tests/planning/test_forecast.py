import pytest
from planning_tools import MLA, caches_of, named, write_config

from kvpp_connect.errors import ConfigError
from kvpp_connect.layout import capacity_ratio, place_rank
from kvpp_connect.planning.audit import read_model
from kvpp_connect.planning.caches import CacheOptions
from kvpp_connect.planning.forecast import (
    ServerSettings,
    kvpp_capacity,
    owned_layers,
    plain_capacity,
)
from kvpp_connect.planning.geometry import ParallelSizes
from kvpp_connect.planning.plan import PlanRequest, make_plan

GIB = 2**30


@pytest.fixture
def tiny(tmp_path):
    return read_model(write_config(tmp_path / "tiny", MLA), environment={})


def tiny_settings(memory, **more):
    """The demo's servers: two ranks, 2,048 tokens, 8 requests."""
    values = {"max_model_tokens": 2048, "max_requests": 8, "group_size": 2, "alignment_bytes": 64}
    return ServerSettings(memory_bytes=memory, **values | more)


@pytest.mark.parametrize(
    ("memory", "running", "plain", "full", "compact"),
    [
        # Read from the start-up lines of real servers.
        (200_000_000, None, 14_464, 17_360, None),
        (120_000_000, 2400, 8_672, 10_416, 15_760),
    ],
)
def test_the_numbers_of_real_servers(tiny, memory, running, plain, full, compact):
    stages = caches_of(tiny, 2, device="cpu", dtype="float32").stages(1, None)
    settings = tiny_settings(memory, running_tokens=running)
    assert plain_capacity(stages, 16, settings).tokens == plain
    assert kvpp_capacity("full", stages, 16, settings)[0].tokens == full
    if compact is not None:
        assert kvpp_capacity("compact", stages, 16, settings)[0].tokens == compact


def test_vllms_own_line_to_the_second_digit(tiny):
    stages = caches_of(tiny, 2, device="cpu", dtype="float32").stages(1, None)
    found = plain_capacity(stages, 16, tiny_settings(200_000_000))
    assert f"{found.concurrency:.2f}" == "7.06"


def test_a_length_that_is_no_multiple_of_the_block_rounds_as_in_the_log(tiny):
    stages = caches_of(tiny, 2, device="cpu", dtype="float32").stages(1, None)
    found = plain_capacity(stages, 16, tiny_settings(200_000_000, max_model_tokens=1000))
    assert found.blocks == 904
    assert found.concurrency == 904 / 63
    assert found.tokens == int(904 / 63 * 1000)


def test_dcp_multiplies_what_a_block_stands_for():
    stages = caches_of(named("DeepSeek-R1"), 8).stages(1, None)
    settings = ServerSettings(memory_bytes=40 * GIB, max_model_tokens=32768)
    plain = plain_capacity(stages, 64, settings)
    sharded = plain_capacity(stages, 64, settings, 8)
    assert sharded.blocks == plain.blocks
    assert sharded.tokens == 8 * plain.tokens
    assert sharded.block_tokens == 512


def test_a_shard_of_an_odd_length_is_rounded_up():
    stages = caches_of(named("DeepSeek-R1"), 8).stages(1, None)
    settings = ServerSettings(memory_bytes=40 * GIB, max_model_tokens=8 * 64 + 1)
    # 513 tokens over 8 ranks: 65 on the first, which are two blocks.
    assert plain_capacity(stages, 64, settings, 8).concurrency == 9549 / 2


@pytest.mark.parametrize("variant", ["full", "compact"])
def test_the_formula_holds_where_stages_differ(variant):
    stages = caches_of(named("DeepSeek-R1"), 8).stages(2, "50,11")
    settings = ServerSettings(
        memory_bytes=40 * GIB, max_model_tokens=2048, group_size=8, running_tokens=64 * 100
    )
    found, _ = kvpp_capacity(variant, stages, 64, settings)
    plain = plain_capacity(stages, 64, settings)
    assert found.formula == pytest.approx(found.blocks / plain.blocks, rel=1e-2)


@pytest.mark.parametrize(("layers", "ranks"), [(78, 8), (61, 8), (6, 2), (3, 2), (8, 3), (2, 8)])
def test_the_formula_is_the_one_of_equal_layers(tmp_path, layers, ranks):
    config = {**MLA, "num_hidden_layers": layers}
    stages = caches_of(read_model(write_config(tmp_path, config), environment={})).stages(1, None)
    settings = ServerSettings(
        memory_bytes=40 * GIB, max_model_tokens=2048, group_size=ranks, running_tokens=64 * 1000
    )
    for variant in ("full", "compact"):
        found, _ = kvpp_capacity(variant, stages, 64, settings)
        share = found.scratch_blocks / found.blocks
        assert found.formula == pytest.approx(capacity_ratio(layers, ranks, share))
        plain = plain_capacity(stages, 64, settings)
        assert found.blocks / plain.blocks == pytest.approx(found.formula, rel=1e-2)


def test_drafts_stay_on_every_rank_and_cost_both():
    stages = caches_of(named("DeepSeek-R1"), 8, drafts=1).stages(1, None)
    settings = ServerSettings(memory_bytes=40 * GIB, max_model_tokens=32768, group_size=8)
    found, _ = kvpp_capacity("full", stages, 64, settings)
    assert found.formula == pytest.approx((61 + 1) / (8 + 1 + 2))


def test_every_rank_of_every_stage_has_room_for_the_blocks():
    """And the fullest of them not for one more."""
    caches = caches_of(named("GLM-5"), 8, drafts=1)
    stages = caches.stages(2, None)
    settings = ServerSettings(
        memory_bytes=5 * GIB, max_model_tokens=32768, group_size=8, alignment_bytes=64
    )
    for variant in ("full", "compact"):
        found, layouts = kvpp_capacity(variant, stages, 64, settings)

        def fits(blocks, layouts=layouts):
            return all(
                place_rank(layout, rank, blocks).total_bytes <= 5 * GIB
                for layout in layouts
                for rank in range(8)
            )

        assert fits(found.blocks)
        assert not fits(found.blocks + 1)


def test_owned_layers_add_up():
    stages = caches_of(named("DeepSeek-R1"), 8).stages(1, None)
    settings = ServerSettings(memory_bytes=GIB, max_model_tokens=2048, group_size=8)
    _, (layout,) = kvpp_capacity("full", stages, 64, settings)
    assert owned_layers(layout) == (8, 8, 8, 8, 8, 7, 7, 7)


@pytest.mark.parametrize("variant", ["full", "compact"])
def test_too_little_memory_is_a_problem_and_no_error(tiny, variant):
    stages = caches_of(tiny, 2, device="cpu", dtype="float32").stages(1, None)
    for memory, message in ((1, "not one block fits"), (1_500_000, "one request of 2048 tokens")):
        found, _ = kvpp_capacity(variant, stages, 16, tiny_settings(memory))
        assert message in found.problem
    assert "needs 128 blocks" in plain_capacity(stages, 16, tiny_settings(1)).problem


def test_vllm_keeps_one_block_to_itself(tiny):
    stages = caches_of(tiny, 2, device="cpu", dtype="float32").stages(1, None)
    block = stages[0].plain_page_bytes
    assert plain_capacity(stages, 16, tiny_settings(128 * block)).problem
    assert not plain_capacity(stages, 16, tiny_settings(129 * block)).problem


def test_running_tokens_that_hold_no_longest_request_are_refused(tiny):
    stages = caches_of(tiny, 2, device="cpu", dtype="float32").stages(1, None)
    with pytest.raises(ConfigError, match="running_tokens is 16"):
        kvpp_capacity("compact", stages, 16, tiny_settings(GIB, running_tokens=16))


def plan(model, **changes):
    values = {"sizes": ParallelSizes(tensor=8), "memory_bytes": 40 * GIB}
    return make_plan(model, PlanRequest(**values | changes), environment={})


def test_a_plan_shows_every_layout_that_the_model_allows():
    variants = [c.variant for c in plan(named("DeepSeek-R1")).capacities]
    assert variants == ["plain", "dcp", "full", "compact"]
    assert [c.variant for c in plan(named("Qwen3-235B-A22B")).capacities] == ["plain", "dcp"]
    qwen = plan(named("Qwen3-32B"))
    assert [c.variant for c in qwen.capacities] == ["plain"]
    assert any("no DCP: DCP needs TP above" in note for note in qwen.notes)
    assert any("no KVPP: it is for models with MLA" in note for note in qwen.notes)


def test_dcp_that_would_be_refused_is_said_and_not_shown():
    made = plan(named("DeepSeek-R1"), decode_context=3)
    assert [c.variant for c in made.capacities] == ["plain", "full", "compact"]
    assert any("DCP 3 would be refused (ParallelConfig)" in note for note in made.notes)
    assert [c.variant for c in plan(named("DeepSeek-R1"), decode_context=1).capacities] == [
        "plain",
        "full",
        "compact",
    ]


def test_one_rank_alone_shares_with_nobody():
    made = plan(named("DeepSeek-R1"), sizes=ParallelSizes(tensor=1))
    assert [c.variant for c in made.capacities] == ["plain"]
    assert any("a group of one rank" in note for note in made.notes)


def test_pcp_widens_the_group():
    made = plan(named("DeepSeek-R1"), sizes=ParallelSizes(tensor=8, prefill_context=2))
    assert made.settings.group_size == 16
    assert made.layouts[0].group_size == 16


def test_the_platform_gives_the_alignment():
    assert plan(named("DeepSeek-R1"), options=CacheOptions(device="cpu")).settings == (
        ServerSettings(
            memory_bytes=40 * GIB,
            max_model_tokens=163_840,
            group_size=8,
            alignment_bytes=64,
        )
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": ParallelSizes(tensor=7)}, "would refuse this .model.: TP 7 does not divide"),
        ({"sizes": ParallelSizes(tensor=0)}, "--tp is 0"),
        ({"sizes": ParallelSizes(tensor=8, pipeline=62)}, "more stages than the 61 layers"),
        ({"sizes": ParallelSizes(tensor=8, prefill_context=64)}, "at most 256 here"),
        ({"max_model_tokens": 0}, "--max-model-len is 0"),
        ({"max_requests": -1}, "--max-num-seqs is -1"),
        ({"running_tokens": 0}, "--running-tokens is 0"),
    ],
)
def test_requests_that_no_server_would_take(changes, message):
    with pytest.raises(ConfigError, match=message):
        plan(named("DeepSeek-R1"), **changes)


def test_a_partition_of_the_environment_is_respected():
    request = PlanRequest(sizes=ParallelSizes(tensor=8, pipeline=2), memory_bytes=GIB)
    model = named("DeepSeek-R1")
    made = make_plan(model, request, environment={"VLLM_PP_LAYER_PARTITION": "40,21"})
    assert [len(stage.targets) for stage in made.stages] == [40, 21]
