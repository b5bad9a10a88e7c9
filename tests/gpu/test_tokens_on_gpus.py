"""Real engines on GPUs: the tokens of plain vLLM, with KVPP in both modes, eager and in graphs."""

import importlib.metadata
import itertools

import pytest
from device_answers import ask_engine

from kvpp_connect.demo.model import ModelSpec, write_checkpoint
from kvpp_connect.seam.cuda import ENVIRONMENT

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

    def ask(runner, **settings):
        settled = {name: wanted for name, (wanted, _) in ENVIRONMENT.items()}
        return ask_engine(
            model,
            {
                "tensor_parallel_size": 2,
                "dtype": "bfloat16",
                "disable_custom_all_reduce": True,
                **settings,
            },
            {**settled, "VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner]},
            ENGINE_S,
        )

    return ask


RUNNERS = {"V1": "0", "V2": "1"}
WAYS = {
    "eager": {"enforce_eager": True},
    "graphs": {
        "compilation_config": {
            "cudagraph_mode": "PIECEWISE",
            "pass_config": {"fuse_allreduce_rms": False},
        }
    },
}


@pytest.fixture(scope="module", params=itertools.product(RUNNERS, WAYS), ids="-".join)
def plain(request, answer):
    """A model runner, how it runs, and what plain vLLM says with it."""
    runner, way = request.param
    return runner, WAYS[way], answer(runner, **WAYS[way])


@pytest.mark.parametrize("mode", ["full", "compact"])
def test_kvpp_answers_like_plain_vllm(answer, plain, mode):
    runner, way, tokens = plain
    kvpp = {"enable_kvpp": True, "kvpp": {"mode": mode}}
    assert answer(runner, additional_config=kvpp, **way) == tokens
