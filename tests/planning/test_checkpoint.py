import json

import pytest
from planning_tools import MLA, write_config

from kvpp_connect.errors import ConfigError
from kvpp_connect.planning.checkpoint import read_checkpoint


def read(tmp_path, config):
    return read_checkpoint(write_config(tmp_path / "model", config))


def test_a_directory_and_a_bare_file_say_the_same(tmp_path):
    directory = write_config(tmp_path / "Tiny", MLA)
    bare = tmp_path / "tiny.json"
    bare.write_text(json.dumps(MLA))
    first, second = read_checkpoint(directory), read_checkpoint(bare)
    assert first.config == second.config == MLA
    assert (first.name, second.name) == ("Tiny", "tiny")
    assert read_checkpoint(directory / "config.json").name == "Tiny"


@pytest.mark.parametrize(
    ("config", "text_key", "model_type"),
    [
        ({"model_type": "qwen3"}, "", "qwen3"),
        (
            {"model_type": "wrapper", "text_config": {"model_type": "kimi_k2"}},
            "text_config",
            "kimi_k2",
        ),
        ({"llm_config": {"model_type": "qwen3"}}, "llm_config", "qwen3"),
        (
            {"thinker_config": {"text_config": {"model_type": "qwen3_moe"}}},
            "thinker_config.text_config",
            "qwen3_moe",
        ),
        # Wrappers whose config class knows the type of a text config that does not say.
        ({"model_type": "kimi_k25", "text_config": {}}, "text_config", "deepseek_v3"),
        # vLLM lifts these to the top, model type excepted.
        (
            {"model_type": "deepseek_v41", "text_config": {"model_type": "x", "head_dim": 1}},
            "",
            "deepseek_v41",
        ),
        ({"architectures": ["LongcatFlashForCausalLM"]}, "", "longcat_flash"),
        ({}, "", ""),
    ],
)
def test_the_language_model_is_found_where_vllm_finds_it(tmp_path, config, text_key, model_type):
    found = read(tmp_path, config)
    assert (found.text_key, found.model_type) == (text_key, model_type)


def test_what_is_lifted_does_not_hide_the_top_level(tmp_path):
    nested = {"head_dim": 512, "vocab": 1}
    found = read(tmp_path, {"model_type": "deepseek_v41", "vocab": 2, "text_config": nested})
    assert found.text["head_dim"] == 512
    assert found.text["vocab"] == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "line 1, column 2: not JSON"),
        ("", "line 1, column 1: not JSON"),
        ("[1]", "holds a list, expected an object"),
        ("null", "holds null, expected an object"),
        ("[" * 100_000, "not JSON"),
        ("1" * 5000, "not JSON"),
        ({"text_config": [1]}, "text_config is a list, expected an object"),
        (
            {"text_config": {"a": 1}, "decoder": {"a": 1}},
            "holds decoder and text_config, and vLLM takes exactly one",
        ),
        ({"model_type": 3}, "model_type is 3, expected a string"),
    ],
)
def test_a_bad_config_is_one_line_that_names_the_file(tmp_path, config, message):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, config)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_none_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "large").write_bytes(b" " * (64 * 2**20 + 1))
    (tmp_path / "latin").write_bytes(b'{"a": "\xff"}')
    for path, message in (
        (tmp_path / "absent", "no such file or directory"),
        (tmp_path / "empty", "holds no config.json"),
        (tmp_path / "large", "too large"),
        (tmp_path / "latin", "not JSON"),
        (tmp_path / ("n" * 5000), "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_checkpoint(path)


@pytest.mark.parametrize("value", ["8", 8.0, True, 0, -1, [8], {"a": 1}])
def test_what_is_no_positive_number_is_refused_with_its_place(tmp_path, value):
    found = read(tmp_path, {"text_config": {"num_attention_heads": value}})
    with pytest.raises(ConfigError, match=r"text_config\.num_attention_heads is .* whole number"):
        found.number("num_attention_heads")


def test_an_absent_number_is_none_unless_it_is_needed(tmp_path):
    found = read(tmp_path, {"a": None})
    assert found.number("a") is None
    with pytest.raises(ConfigError, match=r"a is absent, and so are b"):
        found.needed_number("a", "b")
