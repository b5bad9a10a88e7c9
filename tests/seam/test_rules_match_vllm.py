"""The arithmetic of `kvpp audit` and `kvpp plan` against the classes of the installed vLLM."""

import ast
import inspect
import json
import textwrap
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_tools import EXAMPLES, MLA, NAMES, caches_of, named, write_config

pytest.importorskip("vllm", reason="needs vLLM")

import torch
import vllm.envs
from vllm.config import ModelConfig, ParallelConfig
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)

from kvpp_connect.errors import ConfigError
from kvpp_connect.planning.attention import (
    KV_HEAD_KEYS,
    MLA_MODEL_TYPES,
    Attention,
    mla_disabled,
    read_attention,
)
from kvpp_connect.planning.audit import read_model
from kvpp_connect.planning.caches import pipeline_split
from kvpp_connect.planning.checkpoint import read_checkpoint
from kvpp_connect.planning.forecast import ServerSettings, plain_capacity
from kvpp_connect.planning.geometry import ParallelSizes, refusal
from kvpp_connect.seam import checks

TYPES = sorted(MLA_MODEL_TYPES)


def test_the_list_of_model_types_is_vllms():
    source = textwrap.dedent(inspect.getsource(ModelArchConfigConvertorBase.is_deepseek_mla))
    tuples = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Tuple)]
    named_types = {constant.value for constant in tuples[0].elts}
    assert named_types == MLA_MODEL_TYPES


_SIZE = st.integers(1, 256)
_CONFIGS = st.fixed_dictionaries(
    {
        "model_type": st.sampled_from([*TYPES, "eagle", "falcon", "dbrx", "llama", "qwen3"]),
        "num_attention_heads": _SIZE,
    },
    optional={
        **dict.fromkeys(KV_HEAD_KEYS, _SIZE),
        "kv_lora_rank": st.one_of(st.none(), _SIZE),
        "head_dim": st.one_of(st.none(), _SIZE),
        "compress_ratios": st.lists(st.integers(0, 4), max_size=2),
        "is_causal": st.booleans(),
        "multi_query": st.booleans(),
        "new_decoder_architecture": st.booleans(),
    },
)
_WRAPPED_TYPES = st.sampled_from(["deepseek_v3", "deepseek_mtp", "kimi_k2", "llama"])


def vllms_view(config, model_impl, monkeypatch_disabled):
    """``use_mla`` and the KV heads, from vLLM's own code over the raw keys."""
    raw = dict(config)
    if "model" in raw:
        raw["model"] = SimpleNamespace(**raw["model"])
    if "attn_config" in raw:
        raw["attn_config"] = SimpleNamespace(**raw["attn_config"])
    hf = SimpleNamespace(**raw)
    convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(raw["model_type"], ModelArchConfigConvertorBase)
    arch = convertor(hf, hf)
    model = SimpleNamespace(
        hf_text_config=hf,
        is_deepseek_mla=arch.is_deepseek_mla(),
        using_transformers_backend=lambda: model_impl == "transformers",
    )
    use_mla = ModelConfig.use_mla.fget(model) and not monkeypatch_disabled
    return use_mla, 1 if use_mla else arch.get_total_num_kv_heads()


@settings(max_examples=500, deadline=None)
@given(
    config=_CONFIGS,
    wrapped=_WRAPPED_TYPES,
    expert_heads=_SIZE,
    model_impl=st.sampled_from(["vllm", "transformers"]),
    disabled=st.booleans(),
)
def test_mla_and_kv_heads_are_those_of_vllm(
    config, wrapped, expert_heads, model_impl, disabled, tmp_path_factory
):
    if config["model_type"] == "eagle":
        config = {**config, "model": {"model_type": wrapped}}
    if config["model_type"] == "dbrx":
        config = {**config, "attn_config": {"kv_n_heads": expert_heads}}
    folder = write_config(tmp_path_factory.mktemp("config"), config)
    ours = read_attention(read_checkpoint(folder), disabled=disabled, model_impl=model_impl)
    assert (ours.is_mla, ours.kv_heads) == vllms_view(config, model_impl, disabled)


@pytest.mark.parametrize("value", ["0", "1", "2", "-1", " 1 ", "00", "true", "", "0x1", "1.0"])
def test_the_switch_is_parsed_as_vllm_parses_it(monkeypatch, value):
    monkeypatch.setenv("VLLM_MLA_DISABLE", value)
    read = vllm.envs.environment_variables["VLLM_MLA_DISABLE"]
    try:
        theirs = read()
    except ValueError:
        with pytest.raises(ConfigError):
            mla_disabled({"VLLM_MLA_DISABLE": value})
    else:
        assert mla_disabled({"VLLM_MLA_DISABLE": value}) is theirs


@settings(max_examples=500, deadline=None)
@given(
    tensor=st.integers(1, 16),
    prefill=st.sampled_from([1, 1, 2, 4]),
    decode=st.integers(0, 40),
    heads=st.sampled_from([8, 16, 24, 40, 64]),
    kv_heads=st.sampled_from([1, 2, 3, 4, 8]),
    is_mla=st.booleans(),
)
def test_sizes_are_judged_as_vllm_judges_them(tensor, prefill, decode, heads, kv_heads, is_mla):
    sizes = ParallelSizes(tensor=tensor, prefill_context=prefill, decode_context=decode)
    attention = Attention(
        is_mla=is_mla,
        kv_heads=1 if is_mla else kv_heads,
        kv_heads_from="",
        attention_heads=heads,
        why="",
    )
    by = None
    try:
        parallel = ParallelConfig(
            tensor_parallel_size=tensor,
            prefill_context_parallel_size=prefill,
            decode_context_parallel_size=decode,
            distributed_executor_backend="mp",
        )
    except ValueError:
        by = "ParallelConfig"
    else:
        model = SimpleNamespace(
            model_arch_config=SimpleNamespace(total_num_attention_heads=heads),
            get_total_num_kv_heads=lambda: kv_heads,
            use_mla=is_mla,
            multimodal_config=None,
        )
        try:
            ModelConfig.verify_with_parallel_config(model, parallel)
        except ValueError:
            by = "model"
    found = refusal(sizes, attention)
    assert (found.by if found else None) == by


@pytest.mark.parametrize("layers", [1, 5, 8, 61, 62, 63, 78])
def test_stages_are_split_as_vllm_splits_them(layers):
    for stages in range(1, min(6, layers) + 1):
        ranges = [get_pp_indices(layers, rank, stages) for rank in range(stages)]
        assert pipeline_split(layers, stages) == tuple(end - start for start, end in ranges)


def cache_config(block_size, dtype):
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block_size),
        model_config=SimpleNamespace(dtype=dtype),
    )


@pytest.mark.parametrize(
    ("kv_cache_dtype", "options"),
    [
        ("auto", {}),
        ("auto", {"dtype": "float32"}),
        ("fp8", {"kv_cache_dtype": "fp8", "attention_backend": "FLASHINFER_MLA_SPARSE"}),
        ("fp8_ds_mla", {"kv_cache_dtype": "fp8_ds_mla"}),
        ("nvfp4_ds_mla", {"kv_cache_dtype": "nvfp4_ds_mla"}),
    ],
)
def test_pages_of_sparse_mla_are_as_large_as_vllms(kv_cache_dtype, options):
    caches = caches_of(named("DeepSeek-V3.2"), **options)
    layer = SimpleNamespace(
        kv_cache_dtype=kv_cache_dtype,
        head_size=576,
        sliding_window=None,
        indexer=None,
        non_causal_multi_token_decode=False,
    )
    dtype = torch.float32 if options.get("dtype") == "float32" else torch.bfloat16
    main = MLAAttention.get_kv_cache_spec(layer, cache_config(64, dtype))
    head_dim = 128 + 128 // 128 * 4  # as the indexer passes it
    index = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=64), head_dim=head_dim, dtype=torch.uint8
    )
    indexer = DeepseekV32IndexerCache.get_kv_cache_spec(index, None)
    (stage,) = caches.stages(1, None)
    assert [component.page_bytes for component in stage.targets[0].components] == [
        main.page_size_bytes,
        indexer.page_size_bytes,
    ]


def test_pages_of_plain_attention_are_as_large_as_vllms():
    for tensor, heads in ((4, 2), (8, 1), (16, 1)):
        spec = FullAttentionSpec(
            block_size=16, num_kv_heads=heads, head_size=128, dtype=torch.bfloat16
        )
        (stage,) = caches_of(named("Qwen3-32B"), tensor).stages(1, None)
        assert stage.targets[0].page_bytes == spec.page_size_bytes


@settings(max_examples=200, deadline=None)
@given(
    blocks=st.integers(200, 100_000),
    length=st.integers(1, 10_000),
    block_size=st.sampled_from([1, 16, 64]),
    decode=st.sampled_from([1, 2, 8]),
)
def test_tokens_and_concurrency_are_those_that_vllm_logs(blocks, length, block_size, decode):
    spec = MLAAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=length),
        parallel_config=SimpleNamespace(decode_context_parallel_size=decode),
    )
    theirs = get_kv_cache_capacity(
        config,
        KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["a"], spec)],
        ),
    )
    stages = caches_of(named("DeepSeek-R1"), block_tokens=block_size).stages(1, None)
    ours = plain_capacity(
        stages,
        block_size,
        ServerSettings(memory_bytes=blocks * stages[0].plain_page_bytes, max_model_tokens=length),
        decode,
    )
    assert (ours.tokens, ours.concurrency) == theirs


@pytest.mark.parametrize("name", NAMES)
def test_vllm_reads_the_six_checkpoints_as_we_do(name):
    model = named(name)
    for tensor, decode in ((8, 1), (8, 2), (8, 3), (16, 4)):
        sizes = ParallelSizes(tensor=tensor, decode_context=decode)
        found = checks.compare_with_vllm(model, sizes, "vllm")
        assert found.differences == ()
        assert bool(found.server_says) == (refusal(sizes, model.attention) is not None)


@pytest.mark.parametrize("model_type", TYPES)
def test_vllms_own_config_classes_agree_for_every_model_type(model_type, tmp_path):
    """Through the classes of vLLM and Transformers, which fill in what a file leaves out."""
    config = {**MLA, "model_type": model_type, "vocab_size": 128, "hidden_size": 1024}
    config["architectures"] = ["DeepseekV3ForCausalLM"]
    if model_type == "longcat_flash":
        config["num_layers"] = 3
    if model_type.startswith("glm5_next"):
        config |= {"qk_rope_head_dim": 0, "mla_use_nope": True}
    model = read_model(write_config(tmp_path, config), environment={})
    assert model.attention.is_mla
    try:
        found = checks.compare_with_vllm(model, ParallelSizes(tensor=8), "vllm")
    except ConfigError as error:
        pytest.skip(f"vLLM has no config class for it, or wants more keys: {str(error)[:120]}")
    assert found.differences == ()


def test_a_difference_is_reported(tmp_path):
    """The config class fills in a latent that the file does not name."""
    config = json.loads((EXAMPLES / "DeepSeek-R1/config.json").read_text())
    del config["kv_lora_rank"]
    model = read_model(write_config(tmp_path, config), environment={})
    found = checks.compare_with_vllm(model, ParallelSizes(tensor=8), "vllm")
    assert found.differences[0] == "MLA: False here, True there"
    assert "agrees" not in found.summary


def test_a_config_that_vllm_cannot_read_is_one_line(tmp_path):
    config = {"model_type": "no_such_type", "num_attention_heads": 8}
    model = read_model(write_config(tmp_path, config), environment={})
    with pytest.raises(ConfigError, match="vLLM cannot read") as caught:
        checks.compare_with_vllm(model, ParallelSizes(tensor=1), "vllm")
    assert "\n" not in str(caught.value)
