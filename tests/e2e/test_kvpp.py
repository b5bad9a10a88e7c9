"""KVPP on real vLLM servers: the tokens of plain vLLM, and the capacity of the formula."""

import pytest
from builders import equal_stage
from e2e_tools import continue_all

from kvpp_connect.demo.logs import kv_cache_size, read_log
from kvpp_connect.layout import capacity_ratio, plan_group, running_scratch
from kvpp_connect.layout.budget import fitting_blocks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PAGE = 16 * 576 * 4
MEMORY = 60_000_000
PLAIN_BLOCKS = MEMORY // (6 * PAGE)


@pytest.fixture(scope="module", params=["full", "compact"])
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def servers(describe, run_servers, mode):
    return run_servers(describe(f"kvpp-{mode}", 2, kvpp={"mode": mode}))


@pytest.fixture(scope="module")
def kvpp(servers, mode):
    with servers as clients:
        yield clients[f"kvpp-{mode}"]


def test_chunked_prefill_and_decode_give_the_tokens_of_plain_vllm(kvpp, prompts, plain_tokens):
    assert continue_all(kvpp, prompts) == plain_tokens


def test_prefix_hits_give_the_tokens_of_plain_vllm(kvpp, prompts, plain_tokens):
    hits = "vllm:prefix_cache_hits_total"
    before = kvpp.counters([hits])[hits]
    assert continue_all(kvpp, prompts, concurrency=1) == plain_tokens
    assert kvpp.counters([hits])[hits] - before >= 300 * len(prompts)


def test_the_cache_holds_as_many_tokens_as_the_formula_says(kvpp, servers, mode):
    scratch = running_scratch(
        block_tokens=16, max_model_tokens=1024, max_requests=4, running_tokens=None
    )
    layout = plan_group(equal_stage(6, PAGE), 2, 64, scratch if mode == "compact" else None)
    blocks = fitting_blocks(layout, 0, MEMORY)
    size = kv_cache_size(read_log(servers.logs[f"kvpp-{mode}"]))
    assert size.tokens == blocks * 16
    share = layout.scratch.blocks(blocks) / blocks
    assert blocks / PLAIN_BLOCKS == pytest.approx(capacity_ratio(6, 2, share), rel=1e-2)


def test_preemption_for_want_of_blocks_gives_the_tokens_of_plain_vllm(
    describe, run_servers, mode, prompts, plain
):
    """Four prompts of 16 blocks fit, but not the 80 tokens that each of them grows by.

    In full mode the cache is that small; in compact mode it is large and only scratch is.
    """
    options = {"mode": mode} | ({"running_tokens": 70 * 16} if mode == "compact" else {})
    memory = 70 * 5 * PAGE if mode == "full" else MEMORY
    tiny = describe(f"tiny-{mode}", 2, kvpp=options, cache_bytes=memory)
    different = [[5 + i, *prompt[1:250]] for i, prompt in enumerate([*prompts, *prompts])]
    with run_servers(tiny) as clients:
        answers = [
            client.complete_all(different, max_tokens=80, concurrency=8)
            for client in (clients[f"tiny-{mode}"], plain)
        ]
        assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]
        preemptions = "vllm:num_preemptions_total"
        assert clients[f"tiny-{mode}"].counters([preemptions])[preemptions] > 0


def test_without_the_broadcast_the_tokens_differ(
    describe, run_servers, mode, prompts, plain_tokens
):
    """Negative control: a model or test too weak to notice would prove nothing."""
    silent = describe(f"silent-{mode}", 2, kvpp={"mode": mode}, switches=("no_broadcast",))
    with run_servers(silent) as clients:
        answers = continue_all(clients[f"silent-{mode}"], prompts)
    assert all(a != b for a, b in zip(answers, plain_tokens, strict=True))
