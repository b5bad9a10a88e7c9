"""Small deterministic MLA checkpoints for the demo and the tests.

The checkpoints have the shape of DeepSeek-V3 (one latent KV head of 512 + 64 values per token and
layer) with random weights. The scales are chosen so that greedy output depends on the whole
prompt: with trained-looking scales a random model falls into loops that ignore its context, and
"same tokens" would prove nothing about the KV cache. No quality of the text is meant.

Usage: python -m kvpp_connect.demo.model DIR
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpp_connect.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID, SPECIAL_TOKENS, write_tokenizer
from kvpp_connect.errors import ConfigError

if TYPE_CHECKING:
    import torch

DIGEST_FILE = "kvpp_model.json"
_RECIPE_VERSION = 1
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that decides the bytes of a checkpoint."""

    layers: int = 6
    seed: int = 1234
    heads: int = 4
    hidden: int = 128
    intermediate: int = 256
    q_lora_rank: int = 64
    kv_lora_rank: int = 512  # fixed by vLLM's CPU kernels
    qk_rope_dim: int = 64  # fixed by vLLM's CPU kernels
    qk_nope_dim: int = 32
    v_dim: int = 32
    vocab: int = 512
    max_tokens: int = 4096
    # Weights are normal with std = gain / sqrt(fan_in); gains not named here are 1.
    gain_q_b: float = 4.0
    gain_o: float = 4.0
    gain_down: float = 2.0
    gain_head: float = 3.0

    def __post_init__(self) -> None:
        if self.layers < 1 or self.heads < 1:
            raise ConfigError(
                f"a test model needs at least one layer and one head, "
                f"got layers={self.layers}, heads={self.heads}"
            )

    @property
    def kv_bytes_per_token(self) -> int:
        """Logical KV bytes of one token in float32, all layers, one copy."""
        return self.layers * (self.kv_lora_rank + self.qk_rope_dim) * _FLOAT32_BYTES

    @property
    def digest(self) -> str:
        """Hexadecimal sha256 of the recipe and its parameters."""
        text = json.dumps({"recipe": _RECIPE_VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def write_checkpoint(
    path: str | Path, *, layers: int = 6, seed: int = 1234, heads: int = 4, hidden: int = 128
) -> Path:
    """Write a checkpoint directory unless the same one is already there.

    The directory appears complete or not at all. A directory that holds anything else than an
    older checkpoint of this function is left alone.

    Args:
        path: the directory to create.
        layers: number of decoder layers.
        seed: seed of the weights.
        heads: attention heads, a multiple of the tensor-parallel size.
        hidden: width of the residual stream.

    Returns: the absolute path.

    Raises:
        ConfigError: `path` holds something else.
    """
    spec = ModelSpec(layers=layers, seed=seed, heads=heads, hidden=hidden)
    target = Path(path).absolute()
    if _stored_digest(target) == spec.digest:
        return target
    if target.exists() and _stored_digest(target) is None and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty and not a test model: choose another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        _write_files(fresh, spec)
        _put_in_place(fresh, target, spec.digest, Path(scratch) / "old")
    return target


def _stored_digest(path: Path) -> str | None:
    """Digest of the checkpoint at `path`, or None where there is none."""
    try:
        stored = json.loads((path / DIGEST_FILE).read_text())
    except (OSError, ValueError):
        return None
    return stored.get("digest") if isinstance(stored, dict) else None


def _put_in_place(fresh: Path, target: Path, digest: str, attic: Path) -> None:
    """Rename `fresh` to `target`; another process that was faster with the same bytes wins."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, attic)
    try:
        os.rename(fresh, target)
    except OSError:
        if _stored_digest(target) != digest:
            raise
        shutil.rmtree(fresh)


def _write_files(path: Path, spec: ModelSpec) -> None:
    from safetensors.torch import save_file

    special = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    _write_json(path / "config.json", {**_config(spec), **special})
    _write_json(path / "generation_config.json", {**special, "do_sample": False})
    save_file(_weights(spec), path / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(path, vocab_size=spec.vocab, max_tokens=spec.max_tokens)
    _write_json(path / DIGEST_FILE, {"digest": spec.digest, "spec": asdict(spec)})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def _config(spec: ModelSpec) -> dict[str, Any]:
    """config.json of a dense DeepSeek-V3 (no layer uses experts)."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "float32",
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.heads,
        "q_lora_rank": spec.q_lora_rank,
        "kv_lora_rank": spec.kv_lora_rank,
        "qk_nope_head_dim": spec.qk_nope_dim,
        "qk_rope_head_dim": spec.qk_rope_dim,
        "v_head_dim": spec.v_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "max_position_embeddings": spec.max_tokens,
        "rope_theta": 10000,
        "rope_scaling": _identity_yarn(spec.max_tokens),
        "first_k_dense_replace": spec.layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "ep_size": 1,
        "num_nextn_predict_layers": 0,
    }


def _identity_yarn(max_tokens: int) -> dict[str, Any]:
    """Yarn with factor 1, which is plain rope by another code path.

    vLLM's CPU kernel for plain rope mishandles the query and key strides of MLA without AMX;
    yarn goes through PyTorch and is right everywhere.
    """
    return {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": max_tokens,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def _weights(spec: ModelSpec) -> dict[str, "torch.Tensor"]:
    """All tensors by name, float32, on the CPU."""
    import torch

    generator = torch.Generator().manual_seed(spec.seed)

    def linear(rows: int, columns: int, gain: float = 1.0) -> "torch.Tensor":
        values = torch.randn(rows, columns, generator=generator)
        return values * (gain / math.sqrt(columns))

    head = linear(spec.vocab, spec.hidden, spec.gain_head)
    head[: len(SPECIAL_TOKENS)] = 0.0  # never the greedy choice, so no early end
    weights = {
        "model.embed_tokens.weight": torch.randn(spec.vocab, spec.hidden, generator=generator),
        "model.norm.weight": torch.ones(spec.hidden),
        "lm_head.weight": head,
    }
    qk_dim = spec.qk_nope_dim + spec.qk_rope_dim
    for layer in range(spec.layers):
        tensors = {
            "input_layernorm": torch.ones(spec.hidden),
            "post_attention_layernorm": torch.ones(spec.hidden),
            "self_attn.q_a_proj": linear(spec.q_lora_rank, spec.hidden),
            "self_attn.q_a_layernorm": torch.ones(spec.q_lora_rank),
            "self_attn.q_b_proj": linear(spec.heads * qk_dim, spec.q_lora_rank, spec.gain_q_b),
            "self_attn.kv_a_proj_with_mqa": linear(
                spec.kv_lora_rank + spec.qk_rope_dim, spec.hidden
            ),
            "self_attn.kv_a_layernorm": torch.ones(spec.kv_lora_rank),
            "self_attn.kv_b_proj": linear(
                spec.heads * (spec.qk_nope_dim + spec.v_dim), spec.kv_lora_rank
            ),
            "self_attn.o_proj": linear(spec.hidden, spec.heads * spec.v_dim, spec.gain_o),
            "mlp.gate_proj": linear(spec.intermediate, spec.hidden),
            "mlp.up_proj": linear(spec.intermediate, spec.hidden),
            "mlp.down_proj": linear(spec.hidden, spec.intermediate, spec.gain_down),
        }
        prefix = f"model.layers.{layer}"
        weights.update({f"{prefix}.{name}.weight": value for name, value in tensors.items()})
    return weights


def main(arguments: list[str] | None = None) -> int:
    """Write the default checkpoint into the directory named on the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1:
        print("usage: python -m kvpp_connect.demo.model DIR", file=sys.stderr)
        return 2
    print(write_checkpoint(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
