"""DUPLICATION: the golden cases, and the traps."""

from pathlib import Path

import pytest
from planning_tools import GQA, MLA, named, write_config

from kvpp_connect.errors import ConfigError
from kvpp_connect.planning.attention import KV_HEAD_KEYS, mla_disabled, read_attention
from kvpp_connect.planning.checkpoint import Checkpoint


def checkpoint(config, model_type=None):
    return Checkpoint(
        path=Path("config.json"),
        name="model",
        config=config,
        text=config,
        text_key="",
        model_type=model_type or config.get("model_type", ""),
    )


def attention(config, **how):
    return read_attention(checkpoint(config), **how)


@pytest.mark.parametrize(
    ("name", "tensor", "kv_heads", "factor"),
    [
        ("DeepSeek-R1", 8, 1, 8),
        ("Kimi-K2", 16, 1, 16),
        ("DeepSeek-V3.2", 8, 1, 8),
        ("GLM-5", 8, 1, 8),
        ("Qwen3-235B-A22B", 8, 4, 2),
        ("Qwen3-32B", 8, 8, 1),
        ("Qwen3-32B", 16, 8, 2),
    ],
)
def test_the_worked_cases(name, tensor, kv_heads, factor):
    found = named(name).attention
    assert found.kv_heads == kv_heads
    assert found.factor(tensor) == factor


def test_the_kv_heads_that_an_mla_checkpoint_states_do_not_count():
    """128 of them would give 8 // 128: no duplication where everything is stored eight times."""
    stated = {**MLA, "num_attention_heads": 128, "num_key_value_heads": 128}
    assert attention(stated).factor(8) == 8
    assert attention({**stated, "model_type": "llama"}).factor(8) == 1


def test_the_list_is_not_enough_the_latent_must_be_there():
    for latent in ({"kv_lora_rank": None}, {}):
        config = {k: v for k, v in MLA.items() if k != "kv_lora_rank"} | latent
        assert not attention(config).is_mla
    assert not attention({**MLA, "model_type": "llama"}).is_mla


def test_compressed_models_need_a_head_dim_instead():
    config = {**MLA, "model_type": "deepseek_v4", "compress_ratios": [1, 4]}
    assert not attention(config).is_mla
    assert attention({**config, "head_dim": 512, "kv_lora_rank": None}).is_mla


def test_an_eagle_module_goes_by_the_model_that_it_wraps():
    wrapped = {"model_type": "deepseek_v3"}
    assert attention({**MLA, "model_type": "eagle", "model": wrapped}).is_mla
    # Shorter than the list for whole models.
    assert not attention({**MLA, "model_type": "eagle", "model": {"model_type": "kimi_k2"}}).is_mla
    with pytest.raises(ConfigError, match="EAGLE module wraps"):
        attention({**MLA, "model_type": "eagle"})


def test_models_that_look_both_ways_do_without_mla():
    assert not attention({**MLA, "is_causal": False}).is_mla


def test_the_transformers_backend_goes_by_the_latent_alone():
    assert attention({**GQA, "kv_lora_rank": 512}, model_impl="transformers").is_mla
    assert not attention({**GQA, "kv_lora_rank": 512}).is_mla
    assert not attention(GQA, model_impl="transformers").is_mla


@pytest.mark.parametrize(
    ("value", "disabled"), [("0", False), ("1", True), ("-1", True), (" 2 ", True), ("00", False)]
)
def test_the_switch_is_a_whole_number(value, disabled):
    assert mla_disabled({"VLLM_MLA_DISABLE": value}) is disabled
    assert not mla_disabled({})


@pytest.mark.parametrize("value", ["true", "", "0x1", "1.0"])
def test_a_switch_that_vllm_cannot_parse_is_an_error(value):
    with pytest.raises(ConfigError, match="VLLM_MLA_DISABLE is"):
        mla_disabled({"VLLM_MLA_DISABLE": value})


def test_without_mla_the_stated_heads_count():
    assert attention(MLA, disabled=True).kv_heads == MLA["num_key_value_heads"]


def test_the_first_of_the_five_keys_counts():
    config = {"model_type": "x", "num_attention_heads": 64}
    for number, key in reversed(list(enumerate(KV_HEAD_KEYS, 1))):
        config[key] = number
        assert attention(config).kv_heads == number
        assert attention(config).kv_heads_from == key


def test_without_any_key_every_attention_head_has_its_own():
    found = attention({"model_type": "x", "num_attention_heads": 64})
    assert (found.kv_heads, found.kv_heads_from) == (64, "attention heads")
    assert attention({"model_type": "gpt2", "n_head": 12}).kv_heads == 12


def test_families_with_a_rule_of_their_own():
    falcon = {"model_type": "falcon", "num_attention_heads": 71, "multi_query": True}
    assert attention(falcon).kv_heads == 1
    assert attention({**falcon, "new_decoder_architecture": True, "num_kv_heads": 8}).kv_heads == 8
    dbrx = {"model_type": "dbrx", "n_heads": 48, "attn_config": {"kv_n_heads": 8}}
    assert attention(dbrx).kv_heads == 8
    assert attention({**dbrx, "attn_config": 3}).kv_heads == 48
    for model_type, message in (("mamba", "no keys and values"), ("nemotron-nas", "differ")):
        with pytest.raises(ConfigError, match=message):
            attention({"model_type": model_type, "num_attention_heads": 1})


def test_the_usual_names():
    plain = {"model_type": "x", "num_attention_heads": 8}
    kinds = [
        attention(config).kind
        for config in (
            MLA,
            plain,
            {**plain, "num_kv_heads": 1},
            {**plain, "num_kv_heads": 2},
        )
    ]
    assert kinds == ["MLA", "MHA", "MQA", "GQA"]


def test_absent_heads_are_said_with_the_file(tmp_path):
    from kvpp_connect.planning.audit import read_model

    with pytest.raises(ConfigError, match=r"config\.json: num_attention_heads is absent"):
        read_model(write_config(tmp_path, {"model_type": "llama"}), environment={})
