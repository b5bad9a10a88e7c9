"""Bundles from the specs that vLLM's layers give, and the budget under vLLM's own planner."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowMLASpec

from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import RunningScratch, place_rank, plan_budget, plan_group
from kvpp_connect.seam.specs import planner_block_bytes, stage_from_specs

BLOCK_TOKENS = 64
INDEXER_TOKEN = 128 + 4  # fp8 keys and a float32 scale


@pytest.fixture(scope="module")
def vllm_config():
    config = VllmConfig()
    config.cache_config.block_size = BLOCK_TOKENS
    config.cache_config.kv_cache_layout = "LBNHC"
    config.model_config = SimpleNamespace(
        dtype=torch.bfloat16, max_model_len=128, original_max_model_len=128
    )
    return config


def main(config, dtype="auto", indexer=None):
    """Spec of a layer's main cache, from vLLM's layer class."""
    layer = SimpleNamespace(
        kv_cache_dtype=dtype,
        head_size=576,
        sliding_window=None,
        indexer=indexer,
        non_causal_multi_token_decode=False,
    )
    return MLAAttention.get_kv_cache_spec(layer, config)


def indexer(config):
    """Spec of an indexer's cache, from vLLM's layer class."""
    cache = SimpleNamespace(
        cache_config=config.cache_config, head_dim=INDEXER_TOKEN, dtype=torch.uint8
    )
    return DeepseekV32IndexerCache.get_kv_cache_spec(cache, config)


def dense(config, dtype="auto"):
    return {f"model.layers.{i}.self_attn.attn": main(config, dtype) for i in range(7)}


def sparse(config, dtype="auto", pattern="FFSFFSF", rows=None):
    """DeepSeek-V3.2 and GLM-5: layers marked F have an indexer."""
    specs = {}
    for i, kind in enumerate(pattern):
        spec = main(config, dtype, indexer=object() if kind == "F" else None)
        specs[f"model.layers.{i}.self_attn.attn"] = align_blocks_to_rows(spec, rows or 1)
        if kind == "F":
            specs[f"model.layers.{i}.self_attn.indexer.k_cache"] = indexer(config)
    return specs


def mixed(config):
    """The first layer's cache is kept unquantised."""
    return sparse(config, "fp8_ds_mla") | {"model.layers.0.self_attn.attn": main(config)}


BF16, PACKED = BLOCK_TOKENS * 576 * 2, BLOCK_TOKENS * 656
INDEX = BLOCK_TOKENS * INDEXER_TOKEN
CASES = {
    "main": (dense, [[BF16]] * 7),
    "main packed": (lambda c: dense(c, "fp8_ds_mla"), [[PACKED]] * 7),
    "main and indexer": (lambda c: sparse(c, pattern="F" * 7), [[BF16, INDEX]] * 7),
    "packed main and indexer": (
        lambda c: sparse(c, "fp8_ds_mla", pattern="F" * 7),
        [[PACKED, INDEX]] * 7,
    ),
    "some with indexer": (
        sparse,
        [[BF16, INDEX] if kind == "F" else [BF16] for kind in "FFSFFSF"],
    ),
    "pages padded to 48 rows": (
        lambda c: sparse(c, pattern="FF", rows=48),
        [[96 * 576 * 2, INDEX]] * 2,
    ),
    "one layer unquantised": (
        mixed,
        [[BF16, INDEX], *([PACKED, INDEX] if kind == "F" else [PACKED] for kind in "FSFFSF")],
    ),
}


@pytest.fixture(params=CASES)
def case(request, vllm_config):
    build, pages = CASES[request.param]
    return build(vllm_config), pages


def test_a_layers_caches_are_one_bundle_with_the_main_cache_first(case):
    specs, pages = case
    stage = stage_from_specs(dict(reversed(specs.items())))
    assert [[c.page_bytes for c in bundle.components] for bundle in stage.targets] == pages
    names = [c.layer_name for bundle in stage.targets for c in bundle.components]
    assert sorted(names) == sorted(specs)


def test_the_planner_divides_by_the_sum_of_padded_pages_where_caches_are_of_one_kind(
    case, vllm_config
):
    specs, pages = case
    assert len(get_kv_cache_groups(vllm_config, dict(specs))) == 1
    assert planner_block_bytes(vllm_config, specs) == sum(map(sum, pages))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("running", [None, 40])
def test_the_planner_arrives_at_the_blocks_that_really_fit(case, vllm_config, ranks, running):
    specs, _ = case
    scratch = RunningScratch(least=running, most=running) if running else None
    layout = plan_group(stage_from_specs(specs), ranks, 64, scratch)
    divisor = planner_block_bytes(vllm_config, specs)
    for memory in (60_000_000, 123_456_789):
        budgets = [plan_budget(layout, rank, memory, divisor) for rank in range(ranks)]
        plans = get_kv_cache_configs(
            vllm_config, [dict(specs)] * ranks, [budget.logical_bytes for budget in budgets]
        )
        blocks = min(budget.num_blocks for budget in budgets)
        assert {plan.num_blocks for plan in plans} == {blocks}
        assert all(place_rank(layout, r, blocks).total_bytes <= memory for r in range(ranks))
        assert any(place_rank(layout, r, blocks + 1).total_bytes > memory for r in range(ranks))


def test_an_enforced_block_count_does_not_change_the_divisor(vllm_config):
    specs = sparse(vllm_config)
    divisor = planner_block_bytes(vllm_config, specs)
    vllm_config.cache_config.num_gpu_blocks_override = 5
    try:
        assert planner_block_bytes(vllm_config, specs) == divisor
    finally:
        vllm_config.cache_config.num_gpu_blocks_override = None


def test_with_several_groups_the_divisor_is_not_the_sum_of_the_pages(vllm_config):
    specs = dense(vllm_config)
    window = SlidingWindowMLASpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.bfloat16,
        sliding_window=64,
    )
    specs |= {f"model.layers.{i}.self_attn.attn": window for i in (7, 8, 9)}
    groups = get_kv_cache_groups(vllm_config, dict(specs))
    assert len(groups) > 1
    widest = max(len(group.layer_names) for group in groups) * BF16
    assert planner_block_bytes(vllm_config, specs) == widest < 10 * BF16
    with pytest.raises(LayoutError, match=r"layers\.7.*SlidingWindowMLASpec.*MLA only"):
        stage_from_specs(specs)


def test_a_cache_that_is_not_mla_is_refused_by_name():
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    with pytest.raises(LayoutError, match=r"layers\.0\.attn: cache of kind FullAttentionSpec"):
        stage_from_specs({"model.layers.0.attn": spec})
