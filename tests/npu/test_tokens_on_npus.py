"""Real engines on NPUs: the tokens of plain vllm-ascend, with KVPP in both modes.

KVPP_TEST_MODEL names a checkpoint with MLA that fits two NPUs; default: a tiny one is made.
"""

import os
from importlib.util import find_spec

import pytest
from device_answers import ask_engine

from kvpp_connect.demo.model import ModelSpec, write_checkpoint

ENGINE_S = 900

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.npu(devices=2),
    pytest.mark.skipif(find_spec("vllm_ascend") is None, reason="vllm-ascend is not installed"),
]


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    model = os.environ.get("KVPP_TEST_MODEL")
    if model is None:
        model = write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", ModelSpec())

    def ask(**settings):
        settings = {"tensor_parallel_size": 2, **settings}
        return ask_engine(model, settings, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, ENGINE_S)

    return ask


WAYS = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
}


@pytest.fixture(scope="module", params=WAYS)
def plain(request, answer):
    """How an engine runs, and what it says without KVPP."""
    return WAYS[request.param], answer(**WAYS[request.param])


@pytest.mark.parametrize("mode", ["full", "compact"])
def test_kvpp_answers_like_plain_vllm_ascend(answer, plain, mode):
    settings, tokens = plain
    kvpp = {"enable_kvpp": True, "kvpp": {"mode": mode}}
    assert answer(additional_config=kvpp, **settings) == tokens
