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
    dense_layers: int | None = None  # the layers after them use experts; None: all are dense
    experts: int = 8
    mtp_layers: int = 0  # layers of a multi-token prediction (MTP) draft behind the last
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
    def first_expert_layer(self) -> int:
        """Index of the first layer that uses experts; ``layers`` where none does."""
        return self.layers if self.dense_layers is None else self.dense_layers

    @property
    def expert_intermediate(self) -> int:
        """Width inside one expert."""
        return self.intermediate // 4

    @property
    def kv_bytes_per_token(self) -> int:
        """Logical KV bytes of one token in float32, all layers, one copy."""
        return self.layers * (self.kv_lora_rank + self.qk_rope_dim) * _FLOAT32_BYTES

    @property
    def digest(self) -> str:
        """Hexadecimal sha256 of the recipe and its parameters."""
        text = json.dumps({"recipe": _RECIPE_VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def write_checkpoint(path: str | Path, spec: ModelSpec | None = None) -> Path:
    """Write a checkpoint directory unless the same one is already there.

    The directory appears complete or not at all. A directory that holds anything else than an
    older checkpoint of this function is left alone.

    Args:
        path: the directory to create.
        spec: what to write; the default model where there is none.

    Returns: the absolute path.

    Raises:
        ConfigError: `path` holds something else.
    """
    spec = spec or ModelSpec()
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
    """config.json of a DeepSeek-V3."""
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
        "first_k_dense_replace": spec.first_expert_layer,
        "moe_layer_freq": 1,
        "moe_intermediate_size": spec.expert_intermediate,
        "n_routed_experts": spec.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "ep_size": 1,
        "num_nextn_predict_layers": spec.mtp_layers,
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


class _Weights:
    """Tensors by name, float32, on the CPU, drawn in a fixed order."""

    def __init__(self, spec: ModelSpec) -> None:
        import torch

        self._torch = torch
        self._spec = spec
        self._generator = torch.Generator().manual_seed(spec.seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def normal(self, rows: int, columns: int) -> "torch.Tensor":
        """Standard normal values."""
        return self._torch.randn(rows, columns, generator=self._generator)

    def linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """A matrix with standard deviation gain / sqrt(columns)."""
        self.tensors[f"{name}.weight"] = self.normal(rows, columns) * (gain / math.sqrt(columns))

    def norm(self, name: str, width: int) -> None:
        """The scale of a normalisation: all ones."""
        self.tensors[f"{name}.weight"] = self._torch.ones(width)

    def mlp(self, name: str, width: int) -> None:
        """A gated feed-forward block."""
        spec = self._spec
        self.linear(f"{name}.gate_proj", width, spec.hidden)
        self.linear(f"{name}.up_proj", width, spec.hidden)
        self.linear(f"{name}.down_proj", spec.hidden, width, spec.gain_down)

    def experts(self, name: str) -> None:
        """Routed experts, their router, and the shared expert."""
        spec = self._spec
        self.linear(f"{name}.gate", spec.experts, spec.hidden)
        self.tensors[f"{name}.gate.e_score_correction_bias"] = self._torch.zeros(spec.experts)
        for expert in range(spec.experts):
            self.mlp(f"{name}.experts.{expert}", spec.expert_intermediate)
        self.mlp(f"{name}.shared_experts", spec.expert_intermediate)

    def decoder_layer(self, name: str, *, experts: bool) -> None:
        """Latent attention and a feed-forward block."""
        spec = self._spec
        qk_dim = spec.qk_nope_dim + spec.qk_rope_dim
        latent = spec.kv_lora_rank
        self.norm(f"{name}.input_layernorm", spec.hidden)
        self.norm(f"{name}.post_attention_layernorm", spec.hidden)
        attention = f"{name}.self_attn"
        self.linear(f"{attention}.q_a_proj", spec.q_lora_rank, spec.hidden)
        self.norm(f"{attention}.q_a_layernorm", spec.q_lora_rank)
        self.linear(f"{attention}.q_b_proj", spec.heads * qk_dim, spec.q_lora_rank, spec.gain_q_b)
        self.linear(f"{attention}.kv_a_proj_with_mqa", latent + spec.qk_rope_dim, spec.hidden)
        self.norm(f"{attention}.kv_a_layernorm", latent)
        self.linear(f"{attention}.kv_b_proj", spec.heads * (spec.qk_nope_dim + spec.v_dim), latent)
        self.linear(f"{attention}.o_proj", spec.hidden, spec.heads * spec.v_dim, spec.gain_o)
        if experts:
            self.experts(f"{name}.mlp")
        else:
            self.mlp(f"{name}.mlp", spec.intermediate)

    def draft_layer(self, name: str) -> None:
        """An MTP layer; embedding and head are the model's own."""
        spec = self._spec
        self.norm(f"{name}.enorm", spec.hidden)
        self.norm(f"{name}.hnorm", spec.hidden)
        self.linear(f"{name}.eh_proj", spec.hidden, 2 * spec.hidden)
        self.norm(f"{name}.shared_head.norm", spec.hidden)
        self.tensors[f"{name}.shared_head.head.weight"] = self.tensors["lm_head.weight"].clone()
        self.tensors[f"{name}.embed_tokens.weight"] = self.tensors[
            "model.embed_tokens.weight"
        ].clone()
        self.decoder_layer(name, experts=spec.first_expert_layer < spec.layers)


def _weights(spec: ModelSpec) -> dict[str, "torch.Tensor"]:
    """All tensors of a checkpoint."""
    weights = _Weights(spec)
    weights.linear("lm_head", spec.vocab, spec.hidden, spec.gain_head)
    # Special tokens are never the greedy choice, so no answer ends early.
    weights.tensors["lm_head.weight"][: len(SPECIAL_TOKENS)] = 0.0
    weights.tensors["model.embed_tokens.weight"] = weights.normal(spec.vocab, spec.hidden)
    weights.norm("model.norm", spec.hidden)
    for layer in range(spec.layers):
        weights.decoder_layer(f"model.layers.{layer}", experts=layer >= spec.first_expert_layer)
    for layer in range(spec.layers, spec.layers + spec.mtp_layers):
        weights.draft_layer(f"model.layers.{layer}")
    return weights.tensors


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
