"""What a deployment's KV values depend on, beside the tokens: one fingerprint for the keys.

Two engines share objects only where this is the same. A path or name alone is not enough: the
weights under it may change, and two machines may keep different ones under one path.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpp_connect.seam.api import VllmConfig

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLE_BYTES = 1 << 16
_NOT_ABOUT_VALUES = ("_name_or_path", "transformers_version")


def model_identity(vllm_config: "VllmConfig", namespace: str = "") -> str:
    """Fingerprint of a deployment: sha256, the first 32 hex digits.

    Weights in a local folder are sampled (size, and 64 KiB at the beginning, in the middle and at
    the end of each file); those from a hub are known by name, revision and commit.

    Args:
        namespace: set by the operator to keep deployments apart.
    """
    model = vllm_config.model_config
    document: dict[str, Any] = {
        "namespace": namespace,
        "model": _model_facts(model),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "load_format": str(vllm_config.load_config.load_format),
    }
    if document["load_format"] == "dummy":
        document["seed"] = model.seed
    speculation = vllm_config.speculative_config
    if speculation is not None:
        draft = getattr(speculation, "draft_model_config", None)
        document["draft"] = [
            str(speculation.method),
            _model_facts(draft) if draft is not None else None,
        ]
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def _model_facts(model: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's ModelConfig
    config = model.hf_config.to_dict()
    path = Path(model.model)
    return {
        # A local path says nothing that its contents do not say better.
        "name": "" if path.is_dir() else model.model,
        "revision": model.revision,
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "config": {key: config[key] for key in config if key not in _NOT_ABOUT_VALUES},
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "weights": sample_weights(path) if path.is_dir() else "",
    }


def sample_weights(folder: Path) -> str:
    """Fingerprint of the weight files in a folder: sha256 over names, sizes and samples, hex."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in _WEIGHTS or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        for sample in _samples(path, size):
            digest.update(sample)
    return digest.hexdigest()


def _samples(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        for offset in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            file.seek(offset)
            yield file.read(_SAMPLE_BYTES)
