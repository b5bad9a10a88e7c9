import json

import pytest
from planning_tools import MLA, write_config


def test_several_checkpoints_and_sizes_make_one_table(kvpp):
    done = kvpp("audit", "DeepSeek-R1", "Qwen3-32B", "--tp", "8", "--tp", "16")
    assert done.code == 0
    table = done.stdout.split("DeepSeek-R1, TP 8")[0].splitlines()
    rows = [line.split() for line in table if " MLA " in line or " GQA " in line]
    assert [(row[0], row[3], row[4]) for row in rows] == [
        ("DeepSeek-R1", "8", "8"),
        ("DeepSeek-R1", "16", "16"),
        ("Qwen3-32B", "8", "1"),
        ("Qwen3-32B", "16", "2"),
    ]
    assert "change nothing: -tp 8 " in done.stdout
    assert """KVPP: -tp 8 --additional-config '{"enable_kvpp": true}'""" in done.stdout


def test_the_total_waste_is_that_of_all_ranks(kvpp):
    done = kvpp("audit", "DeepSeek-R1", "--tp", "8", "--kv-memory", "40GiB", "--json")
    (row,) = done.document["rows"]
    assert row["wasted_total_bytes"] == 7 * 40 * 2**30
    assert row["wasted_token_bytes"] == 7 * row["token_bytes"]
    assert row["wasted_request_bytes"] == 163_840 * row["wasted_token_bytes"]
    assert "280.00 GiB" in kvpp("audit", "DeepSeek-R1", "--tp", "8", "--kv-memory", "40GiB").stdout


def test_a_refused_geometry_is_said_and_ends_with_1(kvpp):
    done = kvpp("audit", "DeepSeek-R1", "--tp", "8", "--dcp", "3")
    assert done.code == 1
    assert "the server does not start (ParallelConfig): DCP 3 does not divide TP 8" in done.stdout
    document = kvpp("audit", "Qwen3-32B", "--tp", "16", "--dcp", "4", "--json")
    assert document.code == 1
    assert document.document["rows"][0]["refusal"]["by"] == "model"


def test_one_bad_file_does_not_hide_the_others(kvpp, tmp_path):
    bad = write_config(tmp_path / "bad", "[]")
    done = kvpp("audit", bad, "DeepSeek-R1", tmp_path / "absent", "--tp", "8", "--json")
    assert done.code == 1
    assert [row["model"] for row in done.document["rows"]] == ["DeepSeek-R1"]
    assert [entry["path"] for entry in done.document["problems"]] == [
        str(bad),
        str(tmp_path / "absent"),
    ]
    assert len(done.stderr.splitlines()) == 2
    assert done.stderr.startswith(f"kvpp: {bad}/config.json: holds a list")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not JSON"),
        ({"model_type": "llama"}, "num_attention_heads is absent"),
        ({**MLA, "num_attention_heads": "8"}, "num_attention_heads is '8'; expected a whole"),
        ({**MLA, "num_attention_heads": 0}, "num_attention_heads is 0"),
        ({**MLA, "num_attention_heads": -8}, "num_attention_heads is -8"),
    ],
)
def test_bad_input_is_one_line(kvpp, tmp_path, config, message):
    done = kvpp("audit", write_config(tmp_path, config), "--tp", "8")
    assert done.code == 1
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tp", "0"), "--tp is 0"),
        (("--tp", "-8"), "--tp is -8"),
        (("--tp", "8", "--pcp", "0"), "--pcp is 0"),
        (("--tp", "8", "--device", "tpu"), "--device is 'tpu'"),
        (("--tp", "8", "--kv-memory", "lots"), "--kv-memory is 'lots'"),
    ],
)
def test_bad_options_are_one_line(kvpp, arguments, message):
    done = kvpp("audit", "DeepSeek-R1", *arguments)
    assert done.code == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_switch_of_the_environment_counts(kvpp, monkeypatch):
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    done = kvpp("audit", "DeepSeek-R1", "--tp", "8", "--json")
    assert done.document["rows"][0]["mla"] is False
    assert done.document["rows"][0]["kv_heads"] == 128
    monkeypatch.setenv("VLLM_MLA_DISABLE", "yes")
    assert "VLLM_MLA_DISABLE is 'yes'" in kvpp("audit", "DeepSeek-R1", "--tp", "8").stderr


def test_the_other_backends_rule(kvpp, tmp_path):
    config = write_config(tmp_path, {**MLA, "model_type": "unknown"})
    arguments = ("audit", config, "--tp", "8", "--json")
    assert kvpp(*arguments).document["rows"][0]["mla"] is False
    own_rule = kvpp(*arguments, "--model-impl", "transformers")
    assert own_rule.document["rows"][0]["mla"] is True


def test_verify_asks_vllm(kvpp):
    pytest.importorskip("vllm", reason="needs vLLM")
    done = kvpp("audit", "Kimi-K2", "--tp", "16", "--dcp", "3", "--verify", "--json")
    verified = done.document["rows"][0]["verified"]
    assert verified["agrees"] is True
    assert "divisible" in verified["server_says"]
    assert ": agrees" in kvpp("audit", "Kimi-K2", "--tp", "16", "--verify").stdout


def test_a_difference_to_vllm_ends_with_1(kvpp, tmp_path):
    pytest.importorskip("vllm", reason="needs vLLM")
    config = {k: v for k, v in MLA.items() if k != "kv_lora_rank"}
    done = kvpp("audit", write_config(tmp_path, config), "--tp", "8", "--verify", "--json")
    assert done.code == 1
    assert json.loads(done.stdout)["rows"][0]["verified"]["agrees"] is False
