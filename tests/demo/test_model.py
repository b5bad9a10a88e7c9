import json

import pytest

from kvpp_connect.demo.model import DIGEST_FILE, ModelSpec, write_checkpoint
from kvpp_connect.demo.workload import make_waves
from kvpp_connect.errors import ConfigError

pytest.importorskip("safetensors", reason="needs safetensors")
pytest.importorskip("transformers", reason="needs transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", ModelSpec(layers=2))


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_the_same_parameters_give_the_same_bytes(model, tmp_path):
    again = write_checkpoint(tmp_path / "again", ModelSpec(layers=2))
    assert contents(again) == contents(model)


def test_another_seed_gives_other_weights(model, tmp_path):
    other = write_checkpoint(tmp_path / "other", ModelSpec(layers=2, seed=7))
    assert contents(other)["model.safetensors"] != contents(model)["model.safetensors"]


def test_a_checkpoint_that_is_there_is_not_written_again(model):
    before = {file: file.stat().st_mtime_ns for file in model.iterdir()}
    assert write_checkpoint(model, ModelSpec(layers=2)) == model
    assert {file: file.stat().st_mtime_ns for file in model.iterdir()} == before


def test_a_checkpoint_of_other_parameters_is_replaced_and_nothing_else_is_left(tmp_path):
    path = write_checkpoint(tmp_path / "model", ModelSpec(layers=1))
    write_checkpoint(path, ModelSpec(layers=2))
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_checkpoint_without_its_digest_is_not_taken_for_complete(tmp_path):
    path = write_checkpoint(tmp_path / "model", ModelSpec(layers=1))
    (path / DIGEST_FILE).unlink()
    with pytest.raises(ConfigError, match="not a test model"):
        write_checkpoint(path, ModelSpec(layers=1))


def test_a_directory_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ConfigError, match="choose another directory"):
        write_checkpoint(tmp_path, ModelSpec(layers=1))
    assert [entry.name for entry in tmp_path.iterdir()] == ["precious"]


def test_a_failure_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path / "model", ModelSpec(layers=1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layers", [0, -1])
def test_a_model_without_layers_is_refused(layers):
    with pytest.raises(ConfigError, match="layer"):
        ModelSpec(layers=layers)


def test_kv_bytes_per_token_count_the_latent_and_the_rope_part_of_every_layer():
    assert ModelSpec(layers=6).kv_bytes_per_token == 6 * 576 * 4


def test_every_tensor_has_the_shape_that_the_config_asks_for(model):
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).state_dict()
    with safe_open(model / "model.safetensors", "pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in set(file.keys())}
    assert found == {name: tuple(value.shape) for name, value in expected.items()}


def test_the_tokenizer_gives_one_token_per_character_of_the_demo_and_text_comes_back(model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    for wave in make_waves():
        for prompt in wave.prompts:
            ids = tokenizer(prompt)["input_ids"]
            assert len(ids) == len(prompt)
            assert tokenizer.decode(ids) == prompt
    merged = tokenizer("the letters, \N{GREEK SMALL LETTER ALPHA}")["input_ids"]
    assert len(merged) < len("the letters, ??")
    assert tokenizer.decode(merged) == "the letters, \N{GREEK SMALL LETTER ALPHA}"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "user: hi\nassistant: "
