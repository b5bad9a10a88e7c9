import pytest
from planning_tools import GQA, MLA, caches_of, named, write_config

from kvpp_connect.errors import ConfigError
from kvpp_connect.planning.audit import read_model
from kvpp_connect.planning.caches import pipeline_split


@pytest.fixture
def model(tmp_path):
    """Reads a model from a config, with MLA disabled or not."""

    def read(config, *, disabled=False):
        environment = {"VLLM_MLA_DISABLE": "1"} if disabled else {}
        return read_model(write_config(tmp_path / "model", config), environment=environment)

    return read


def token_bytes(caches, layer=0):
    return {piece.name: piece.token_bytes for piece in caches.layers[layer]}


def test_mla_keeps_one_latent_and_its_rope_part():
    caches = caches_of(named("DeepSeek-R1"))
    assert token_bytes(caches) == {"attn": 576 * 2}
    assert len(caches.layers) == 61
    assert caches.token_bytes == 61 * 576 * 2


def test_sparse_mla_keeps_index_keys_besides():
    for name in ("DeepSeek-V3.2", "GLM-5"):
        assert token_bytes(caches_of(named(name))) == {"attn": 1152, "indexer.k_cache": 132}


def test_plain_attention_keeps_keys_and_values_of_the_ranks_heads():
    qwen = named("Qwen3-32B")
    for tensor, heads in ((1, 8), (4, 2), (8, 1), (16, 1)):
        assert token_bytes(caches_of(qwen, tensor)) == {"attn": 2 * heads * 128 * 2}


def test_mla_turned_off_expands_keys_and_values_for_every_head(model):
    caches = caches_of(model(MLA, disabled=True), 2, dtype="bfloat16")
    assert token_bytes(caches) == {"attn": 2 * 4 * 192 * 2}


@pytest.mark.parametrize(
    ("options", "main", "stored_as"),
    [
        ({}, 1152, "bfloat16"),
        ({"dtype": "float32"}, 2304, "float32"),
        ({"kv_cache_dtype": "fp8", "attention_backend": "FLASHMLA_SPARSE"}, 656, "fp8_ds_mla"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, 656, "fp8_ds_mla"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, 352, "nvfp4_ds_mla"),
        ({"kv_cache_dtype": "fp8", "attention_backend": "FLASHINFER_MLA_SPARSE"}, 576, "fp8"),
        ({"attention_backend": "FLASHINFER_MLA_SPARSE_SM120"}, 656, "fp8_ds_mla"),
    ],
)
def test_the_formats_of_sparse_mla(options, main, stored_as):
    caches = caches_of(named("DeepSeek-V3.2"), **options)
    assert token_bytes(caches) == {"attn": main, "indexer.k_cache": 132}
    assert caches.stored_as == stored_as


def test_fp8_without_sparse_attention_is_one_byte_per_value():
    assert token_bytes(caches_of(named("DeepSeek-R1"), kv_cache_dtype="fp8")) == {"attn": 576}
    assert token_bytes(caches_of(named("Qwen3-32B"), 8, kv_cache_dtype="fp8")) == {"attn": 256}


@pytest.mark.parametrize(
    ("c8", "pieces"),
    [
        ("none", {"attn.latent": 1024, "attn.rope": 128, "indexer.k_cache": 256}),
        ("main", {"attn": 656, "indexer.k_cache": 256}),
        (
            "indexer",
            {
                "attn.latent": 1024,
                "attn.rope": 128,
                "indexer.k_cache": 128,
                "indexer.k_cache.scale": 2,
            },
        ),
        ("both", {"attn": 656, "indexer.k_cache": 128, "indexer.k_cache.scale": 2}),
    ],
)
def test_the_layouts_of_npus(c8, pieces):
    caches = caches_of(named("DeepSeek-V3.2"), device="npu", c8=c8)
    assert token_bytes(caches) == pieces
    assert caches.block_tokens == 128


def test_layers_that_share_an_index_keep_no_index_cache(model):
    """GLM-5.2: every fourth layer from the third on, 21 of 78."""
    config = {**MLA, "model_type": "glm_moe_dsa", "index_topk": 1, "index_head_dim": 128}
    config |= {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    caches = caches_of(model(config))
    full = [i for i, layer in enumerate(caches.layers) if len(layer) == 2]
    assert (full[:4], full[-1], len(full)) == ([0, 1, 2, 6], 74, 21)


def test_a_pattern_of_shared_indices_beats_the_frequency(model):
    config = {**MLA, "index_topk": 1, "index_head_dim": 128, "index_topk_freq": 4}
    config["index_topk_pattern"] = "FSSF"
    caches = caches_of(model(config), drafts=1)
    assert [len(layer) for layer in caches.layers] == [2, 1, 1, 2, 2, 2]
    assert len(caches.drafts[0]) == 2  # an MTP layer always has its own index


def test_mtp_layers_are_kept_in_the_last_stage():
    caches = caches_of(named("DeepSeek-R1"), drafts=1)
    first, last = caches.stages(2, None)
    assert (len(first.targets), len(last.targets)) == (31, 30)
    assert not first.drafts
    assert [c.layer_name for c in last.drafts] == ["model.layers.61.self_attn.attn"]
    assert last.drafts[0].page_bytes == 64 * 1152


def test_more_mtp_layers_than_the_checkpoint_has_are_refused():
    with pytest.raises(ConfigError, match="--mtp is 1, and the checkpoint has 0 MTP layers"):
        caches_of(named("Kimi-K2"), drafts=1)


def test_blocks_are_of_the_size_that_vllm_chooses(model):
    assert caches_of(named("DeepSeek-R1")).block_tokens == 64
    assert caches_of(named("Qwen3-32B")).block_tokens == 16
    assert caches_of(model(MLA), device="cpu").block_tokens == 16
    assert caches_of(named("DeepSeek-R1"), block_tokens=128).block_tokens == 128
    forced = caches_of(model(MLA), device="cpu", block_tokens=32)
    assert forced.block_tokens == 16
    assert "ignored" in forced.notes[0]


def test_float32_checkpoints_are_served_in_16_bits(model):
    assert caches_of(model(MLA)).stored_as == "bfloat16"
    assert caches_of(model(MLA), dtype="float").stored_as == "float"
    assert caches_of(model({**MLA, "torch_dtype": "torch.float16"})).stored_as == "float16"
    silent = {k: v for k, v in MLA.items() if k != "torch_dtype"}
    assert "bfloat16 assumed" in caches_of(model(silent)).notes[0]


@pytest.mark.parametrize(
    ("quantisation", "stored_as"),
    [
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8_e4m3"),
        (
            {
                "quant_method": "modelopt",
                "kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False},
            },
            "fp8",
        ),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}, "bfloat16"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "fp8"),
        ({"quant_method": "fp8"}, "bfloat16"),
        ("strange", "bfloat16"),
    ],
)
def test_the_checkpoints_quantisation_decides_what_auto_means(model, quantisation, stored_as):
    assert caches_of(model({**GQA, "quantization_config": quantisation})).stored_as == stored_as


def test_nvfp4_caches_of_a_checkpoint_are_not_known_here(model):
    config = {**GQA, "quantization_config": {"quant_method": "modelopt"}}
    config["quantization_config"]["kv_cache_quant_algo"] = "NVFP4"
    with pytest.raises(ConfigError, match="nvfp4"):
        caches_of(model(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3_text"}, "layout of model type gemma3_text is not known"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"num_hidden_layers": 513}, "513; at most 512"),
        ({"num_hidden_layers": None}, "num_hidden_layers is absent"),
        ({"head_dim": "128"}, "head_dim is '128'"),
        ({"head_dim": None}, "hidden_size is absent"),
        ({"head_dim": None, "hidden_size": 3}, "less than the attention heads"),
    ],
)
def test_what_the_arithmetic_does_not_cover_is_refused(model, changes, message):
    with pytest.raises(ConfigError, match=message):
        caches_of(model({**GQA, **changes}))


def test_a_sliding_window_that_is_off_is_none(model):
    assert caches_of(model({**GQA, "sliding_window": 4096, "use_sliding_window": False}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "--device is 'tpu'; known here: cpu, cuda, npu"),
        ({"dtype": "int8"}, "--dtype"),
        ({"kv_cache_dtype": "int3"}, "--kv-cache-dtype"),
        ({"c8": "main"}, "add --device npu"),
        ({"device": "npu", "c8": "main"}, "sparse MLA only"),
        ({"device": "npu", "kv_cache_dtype": "fp8"}, "not known for NPUs"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "sparse MLA only"),
        ({"block_tokens": 0}, "--block-size is 0"),
        ({"drafts": -1}, "--mtp is -1"),
    ],
)
def test_options_that_are_none_are_refused_by_flag(model, options, message):
    with pytest.raises(ConfigError, match=message):
        caches_of(model(MLA), **options)


def test_sparse_attention_on_a_cpu_is_an_experiment_with_blocks_of_its_own(model):
    config = {**MLA, "index_topk": 1, "index_head_dim": 128, "index_topk_pattern": "FFSFFS"}
    caches = caches_of(model(config), 2, device="cpu", dtype="float32", block_tokens=64)
    (stage,) = caches.stages(1, None)
    main, index = 64 * 576 * 4, 64 * 132
    assert [[c.page_bytes for c in bundle.components] for bundle in stage.targets] == [
        [main, index] if kind == "F" else [main] for kind in "FFSFFS"
    ]
    assert caches.notes == ("vLLM itself runs no sparse attention on a CPU",)


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (61, 1, (61,)),
        (61, 2, (31, 30)),
        (62, 4, (15, 16, 16, 15)),
        (63, 4, (16, 16, 16, 15)),
        (4, 4, (1, 1, 1, 1)),
    ],
)
def test_layers_are_split_over_stages_as_vllm_splits_them(layers, stages, counts):
    assert pipeline_split(layers, stages) == counts


def test_a_split_of_ones_own_must_fit():
    assert pipeline_split(6, 2, "5,1") == (5, 1)
    for partition in ("6", "5,2", "6,0", "a,b", ""):
        with pytest.raises(ConfigError, match="VLLM_PP_LAYER_PARTITION"):
            pipeline_split(6, 2, partition)
    with pytest.raises(ConfigError, match="more stages than the 6 layers"):
        pipeline_split(6, 7)
