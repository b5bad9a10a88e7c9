"""Checkpoints for the tests of the planning commands."""

import json
from pathlib import Path

from kvpp_connect.planning.audit import read_model
from kvpp_connect.planning.caches import CacheOptions, read_caches

EXAMPLES = Path(__file__).parent / "examples"
NAMES = (
    "DeepSeek-R1",
    "Kimi-K2",
    "DeepSeek-V3.2",
    "GLM-5",
    "Qwen3-235B-A22B",
    "Qwen3-32B",
)

MLA = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
"""The shape of the demo's model."""

GQA = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}


def named(name):
    """One of the six checkpoints."""
    return read_model(EXAMPLES / name, environment={})


def write_config(folder, config):
    """A checkpoint directory with nothing but this config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return folder


def caches_of(model, tensor=1, **options):
    return read_caches(model.checkpoint, model.attention, CacheOptions(**options), tensor)
