"""KVPP on real vLLM servers: the tokens of plain vLLM, and the capacity of the formula."""

import pytest
from e2e_tools import continue_all

from kvpp_connect.demo.logs import kv_cache_size, read_log
from kvpp_connect.layout import full_capacity_ratio

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def servers(describe, run_servers):
    return run_servers(describe("kvpp", 2, kvpp=True))


@pytest.fixture(scope="module")
def kvpp(servers):
    with servers as clients:
        yield clients["kvpp"]


def test_chunked_prefill_and_decode_give_the_tokens_of_plain_vllm(kvpp, prompts, plain_tokens):
    assert continue_all(kvpp, prompts) == plain_tokens


def test_prefix_hits_give_the_tokens_of_plain_vllm(kvpp, prompts, plain_tokens):
    hits = "vllm:prefix_cache_hits_total"
    before = kvpp.counters([hits])[hits]
    assert continue_all(kvpp, prompts, concurrency=1) == plain_tokens
    assert kvpp.counters([hits])[hits] - before >= 300 * len(prompts)


def test_the_cache_holds_as_many_tokens_as_the_formula_says(kvpp, servers, plain, prompts):
    plain_size = 60_000_000 // (6 * 16 * 576 * 4) * 16
    size = kv_cache_size(read_log(servers.logs["kvpp"]))
    assert size.tokens == 60_000_000 // (5 * 16 * 576 * 4) * 16
    assert size.tokens / plain_size == pytest.approx(full_capacity_ratio(6, 2), rel=1e-2)


def test_preemption_under_a_tiny_cache_gives_the_tokens_of_plain_vllm(
    describe, run_servers, prompts, plain
):
    # 70 blocks: four prompts of 16 blocks fit, but not the 80 tokens that each of them grows by.
    tiny = describe("tiny", 2, kvpp=True, cache_bytes=70 * 5 * 36_864)
    different = [[5 + i, *prompt[1:250]] for i, prompt in enumerate(prompts)]
    with run_servers(tiny) as clients:
        answers = [
            client.complete_all(different, max_tokens=80, concurrency=4)
            for client in (clients["tiny"], plain)
        ]
        assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]
        preemptions = "vllm:num_preemptions_total"
        assert clients["tiny"].counters([preemptions])[preemptions] > 0


def test_without_the_broadcast_the_tokens_differ(describe, run_servers, prompts, plain_tokens):
    """Negative control: a model or test too weak to notice would prove nothing."""
    silent = describe("silent", 2, kvpp=True, switches=("no_broadcast",))
    with run_servers(silent) as clients:
        answers = continue_all(clients["silent"], prompts)
    assert all(a != b for a, b in zip(answers, plain_tokens, strict=True))
