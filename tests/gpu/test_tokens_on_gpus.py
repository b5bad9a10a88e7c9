"""Real engines on GPUs: the tokens of plain vLLM, with KVPP in both modes, eager and in graphs."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpp_connect.demo.model import ModelSpec, write_checkpoint
from kvpp_connect.seam.cuda import ENVIRONMENT

SCRIPT = Path(__file__).parent / "answer_prompts.py"
ENGINE_S = 600


def _has_vllm():
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.gpu(devices=2),
    pytest.mark.skipif(not _has_vllm(), reason="vLLM for CUDA (the distribution vllm) is absent"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", ModelSpec())


@pytest.fixture(scope="module")
def answer(model):
    """Tokens of an engine; plain ones reduce over NCCL too, so that they compute alike."""

    def run(**settings):
        plain = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(model), json.dumps(plain | settings)],
            env=os.environ | {name: wanted for name, (wanted, _) in ENVIRONMENT.items()},
            capture_output=True,
            text=True,
            timeout=ENGINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-5000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("> ")]
        return json.loads(line[2:])

    return run


PIECEWISE = {"cudagraph_mode": "PIECEWISE", "pass_config": {"fuse_allreduce_rms": False}}


@pytest.fixture(scope="module")
def plain(answer):
    """What plain vLLM says, eager and in piecewise graphs."""
    return {
        "eager": answer(enforce_eager=True),
        "graphs": answer(compilation_config=PIECEWISE),
    }


@pytest.mark.parametrize("mode", ["full", "compact"])
@pytest.mark.parametrize("way", ["eager", "graphs"])
def test_kvpp_answers_like_plain_vllm(answer, plain, mode, way, monkeypatch):
    if mode == "compact":
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    settings = {"enforce_eager": True} if way == "eager" else {}
    kvpp = {"enable_kvpp": True, "kvpp": {"mode": mode}}
    assert answer(additional_config=kvpp, **settings) == plain[way]
