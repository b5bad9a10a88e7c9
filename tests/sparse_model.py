"""A small DeepSeek-V3.2 checkpoint: the demo's model plus an indexer in some of its layers."""

import json
import math
import shutil

from kvpp_connect.demo.model import ModelSpec, write_checkpoint

INDEX_TOPK = 48
INDEX_HEADS = 4
INDEX_DIM = 128
# F: a layer with an indexer; S: it reuses what the last indexer chose and has no index keys. On two
# ranks the strangers' index keys meet in scratch: layers 0 and 2 on rank 1, 3 and 5 on rank 0.
PATTERN = "FSFFSF"


def write_sparse_checkpoint(path, pattern=PATTERN, heads=4):
    """Write a checkpoint into the new directory ``path``; answer it.

    The weights are random but of scales with which the choice of the indexer, and so the greedy
    continuation, depends on the whole prompt.
    """
    import torch
    from safetensors.torch import load_file, save_file

    spec = ModelSpec(layers=len(pattern), heads=heads)
    shutil.copytree(write_checkpoint(path.with_name("dense"), spec), path)
    config = json.loads((path / "config.json").read_text())
    config |= {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_topk": INDEX_TOPK,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk_pattern": pattern,
    }
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(99)
    weights = load_file(path / "model.safetensors")
    for layer in (i for i, kind in enumerate(pattern) if kind == "F"):
        shapes = {
            "wq_b": (INDEX_HEADS * INDEX_DIM, spec.q_lora_rank),
            "wk": (INDEX_DIM, spec.hidden),
            "weights_proj": (INDEX_HEADS, spec.hidden),
        }
        prefix = f"model.layers.{layer}.self_attn.indexer"
        for name, (rows, columns) in shapes.items():
            values = torch.randn(rows, columns, generator=generator) / math.sqrt(columns)
            weights[f"{prefix}.{name}.weight"] = values
        weights[f"{prefix}.k_norm.weight"] = torch.ones(INDEX_DIM)
        weights[f"{prefix}.k_norm.bias"] = torch.zeros(INDEX_DIM)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
