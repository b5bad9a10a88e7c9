"""The test model on a real vLLM server: its output depends on its context, and is right.

Without this every test that compares tokens would be worth nothing: a model that ignores its KV
cache gives the same tokens whatever the cache holds.
"""

import random

import pytest

from kvpp_connect.demo.client import CompletionClient
from kvpp_connect.demo.fleet import Fleet
from kvpp_connect.demo.model import ModelSpec, write_checkpoint
from kvpp_connect.demo.ports import free_ports
from kvpp_connect.demo.servers import MODEL_NAME, VllmServer
from kvpp_connect.demo.tokenizer import SPECIAL_TOKENS

pytest.importorskip("vllm", reason="needs vLLM")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LENGTHS = (7, 16, 40, 129, 300, 900, 1500)  # prompt tokens
CONTINUED_TOKENS = 24
VOCAB = ModelSpec().vocab


def random_prompt(tokens, seed=0):
    rng = random.Random(f"{seed}/{tokens}")
    return [rng.randrange(len(SPECIAL_TOKENS), VOCAB) for _ in range(tokens)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def client(model, tmp_path_factory):
    """A plain vLLM server without any of our settings."""
    server = VllmServer(name="plain", model=model, port=free_ports(1)[0])
    with Fleet(tmp_path_factory.mktemp("logs")) as fleet:
        (running,) = fleet.start([server.launch()], timeout_s=200)
        yield CompletionClient(url=running.url, model=MODEL_NAME, timeout_s=60)


@pytest.fixture(scope="module")
def continuations(client):
    """Greedy continuation by number of prompt tokens, one request at a time."""
    return {
        n: client.complete(random_prompt(n), max_tokens=CONTINUED_TOKENS).token_ids for n in LENGTHS
    }


@pytest.mark.parametrize("tokens", LENGTHS)
def test_changing_one_early_token_changes_the_continuation(client, continuations, tokens):
    for position in (0, 1, 3, tokens // 4):
        prompt = random_prompt(tokens)
        prompt[position] = prompt[position] + 1 if prompt[position] + 1 < VOCAB else 100
        changed = client.complete(prompt, max_tokens=CONTINUED_TOKENS).token_ids
        assert changed != continuations[tokens], f"token {position} does not matter"


@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_continuation_does_not_fall_into_a_loop(continuations, tokens):
    continuation = continuations[tokens]
    assert len(set(continuation)) >= CONTINUED_TOKENS // 2
    assert len(set(continuation[-8:])) > 2


def test_the_tokens_do_not_depend_on_what_else_is_in_the_batch(client, continuations):
    prompts = [random_prompt(n) for n in LENGTHS]
    together = client.complete_all(prompts, max_tokens=CONTINUED_TOKENS, concurrency=len(prompts))
    assert [answer.token_ids for answer in together] == list(continuations.values())


@pytest.mark.parametrize("tokens", [7, 40, 300, 900])
def test_vllm_gives_the_tokens_of_the_hugging_face_model(model, continuations, tokens):
    torch = pytest.importorskip("torch", reason="needs torch")
    from transformers import DeepseekV3ForCausalLM

    reference = DeepseekV3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = torch.tensor([random_prompt(tokens)])
    with torch.inference_mode():
        output = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=CONTINUED_TOKENS,
            max_new_tokens=CONTINUED_TOKENS,
        )
    assert tuple(output[0, tokens:].tolist()) == continuations[tokens]
