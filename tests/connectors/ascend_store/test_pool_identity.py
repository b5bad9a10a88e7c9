"""Engines share objects only where their KV values are the same."""

import shutil
from types import SimpleNamespace

import pytest

from kvpp_connect.connectors.ascend_store.identity import model_identity, sample_weights

MIB = 1 << 20


class HubConfig:
    """What transformers makes of a config.json."""

    def __init__(self, commit=None, **values):
        self._commit_hash = commit
        self._values = values

    def to_dict(self):
        return dict(self._values)


def model(name, commit=None, revision=None, dtype="torch.bfloat16", quantization=None, **values):
    config = {"num_hidden_layers": 4, "_name_or_path": str(name), "transformers_version": "5"}
    return SimpleNamespace(
        model=str(name),
        revision=revision,
        dtype=dtype,
        quantization=quantization,
        seed=0,
        hf_config=HubConfig(commit, **{**config, **values}),
    )


def identity(target, namespace="", cache_dtype="auto", load_format="auto", draft=None):
    return model_identity(
        SimpleNamespace(
            model_config=target,
            cache_config=SimpleNamespace(cache_dtype=cache_dtype),
            load_config=SimpleNamespace(load_format=load_format),
            speculative_config=draft,
        ),
        namespace,
    )


def drafts(draft_model, method="mtp"):
    return SimpleNamespace(method=method, draft_model_config=draft_model)


@pytest.fixture
def folder(tmp_path):
    """A local checkpoint: two files of weights, one of them large."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "a.safetensors").write_bytes(bytes(range(256)) * 8)
    with (path / "b.safetensors").open("wb") as file:
        file.truncate(3 * MIB)
    (path / "README.md").write_text("hello")
    return path


def change(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\x5a")


def test_a_copied_folder_is_the_same_model(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "copy")
    assert identity(model(folder)) == identity(model(copy))


@pytest.mark.parametrize(
    ("name", "offset"),
    [
        ("a.safetensors", 0),
        ("a.safetensors", 1000),
        ("b.safetensors", 10),
        ("b.safetensors", 3 * MIB // 2 + 5),
        ("b.safetensors", 3 * MIB - 1),
    ],
)
def test_a_byte_changed_in_a_sample_of_the_weights_makes_another_model(folder, name, offset):
    before = identity(model(folder))
    change(folder / name, offset)
    assert identity(model(folder)) != before


def test_weights_of_another_size_or_name_make_another_model(folder):
    seen = {sample_weights(folder)}
    with (folder / "b.safetensors").open("r+b") as file:
        file.truncate(3 * MIB + 1)
    seen.add(sample_weights(folder))
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    seen.add(sample_weights(folder))
    (folder / "d.bin").write_bytes(b"")
    seen.add(sample_weights(folder))
    assert len(seen) == 4


def test_files_that_are_not_weights_do_not_matter(folder):
    before = identity(model(folder))
    (folder / "README.md").write_text("other")
    (folder / "sub.safetensors").mkdir()
    assert identity(model(folder)) == before


def test_the_name_and_the_version_in_a_config_do_not_matter(folder):
    other = model(folder, _name_or_path="/mnt/elsewhere", transformers_version="6")
    assert identity(model(folder)) == identity(other)


def test_each_thing_that_decides_about_kv_values_makes_another_identity(folder):
    seen = {
        "plain": identity(model(folder)),
        "config": identity(model(folder, num_hidden_layers=5)),
        "rope": identity(model(folder, rope_parameters={"factor": 2.0})),
        "dtype": identity(model(folder, dtype="torch.float32")),
        "quantization": identity(model(folder, quantization="fp8")),
        "cache dtype": identity(model(folder), cache_dtype="fp8"),
        "load format": identity(model(folder), load_format="dummy"),
        "namespace": identity(model(folder), namespace="blue"),
        "other namespace": identity(model(folder), namespace="green"),
        "drafts of its own": identity(model(folder), draft=drafts(None)),
        "drafts": identity(model(folder), draft=drafts(model("org/draft"))),
        "other drafts": identity(model(folder), draft=drafts(model("org/draft", commit="1"))),
        "other method": identity(model(folder), draft=drafts(model("org/draft"), "eagle3")),
    }
    assert len(set(seen.values())) == len(seen), seen


def test_changed_weights_of_a_draft_make_another_identity(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "draft")
    before = identity(model(folder), draft=drafts(model(copy)))
    change(copy / "a.safetensors", 5)
    assert identity(model(folder), draft=drafts(model(copy))) != before


def test_a_model_from_a_hub_is_known_by_name_revision_and_commit():
    seen = {
        identity(model("org/model")),
        identity(model("org/other")),
        identity(model("org/model", revision="main")),
        identity(model("org/model", commit="abc")),
        identity(model("org/model", commit="abd")),
    }
    assert len(seen) == 5
    assert identity(model("org/model", commit="abc")) == identity(model("org/model", commit="abc"))


def test_random_weights_are_known_by_their_seed(folder):
    other = model(folder)
    other.seed = 1
    assert identity(model(folder), load_format="dummy") != identity(other, load_format="dummy")
    assert identity(model(folder)) == identity(other)


def test_an_identity_fits_into_a_key(folder):
    text = identity(model(folder))
    assert len(text) == 32
    assert set(text) <= set("0123456789abcdef")
