"""P/D through real Mooncake: P with KVPP on two ranks, D on one, on two, and on two with KVPP.

P runs in compact mode here; the demo runs it in full mode.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from e2e_tools import count, decode, is_idle, kv, post, prefill, wait_for

from kvpp_connect.errors import PeerError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TOKEN_BYTES = 6 * 576 * 4
LEASE_S = 12


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    """The setting that names the secret which all nodes share."""
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_text("a secret of these tests alone")
    return {"control_secret_file": str(file)}


@pytest.fixture(scope="module")
def nodes(describe, run_servers, secret):
    p = kv("kv_producer", lease_s=LEASE_S, **secret)
    with run_servers(
        describe("p", 2, kvpp={"mode": "compact"}, kv=p),
        describe("d1", 1, kv=kv("kv_consumer", **secret)),
        describe("d2", 2, kv=kv("kv_consumer", **secret)),
        describe("dk", 2, kvpp={"mode": "compact"}, kv=kv("kv_consumer", **secret)),
    ) as clients:
        yield clients


def fresh(prompt, number):
    """The same prompt with another first token, so that no prefix cache knows it."""
    return [5 + number, *prompt[1:]]


PULLED = ("pull_bytes", "pull_peer_bytes", "pull_tokens", "pull_failures")


@pytest.mark.parametrize(("name", "other_ranks"), [("d1", 0), ("d2", 1), ("dk", 0)])
def test_the_tokens_are_those_of_plain_vllm_and_each_byte_leaves_p_once(
    nodes, name, other_ranks, prompts, plain_tokens
):
    d = nodes[name]
    before = count(d, *PULLED)
    for prompt, expected in zip(prompts, plain_tokens, strict=True):
        assert decode(d, prompt, prefill(nodes["p"], prompt)) == expected
    # The first prompt leaves its 300 common tokens in D's prefix cache: 18 whole blocks.
    tokens = sum(len(p) for p in prompts) - 288 * (len(prompts) - 1)

    expected = [tokens * TOKEN_BYTES, tokens * TOKEN_BYTES * other_ranks, tokens, 0]

    def difference():
        now = count(d, *PULLED)
        return [a - b for a, b in zip(now, before, strict=True)]

    # Each rank reports its pulls when it next steps.
    wait_for(lambda: difference() >= expected)
    assert difference() == expected


def test_one_done_per_request_frees_the_blocks_on_p(nodes, prompts, plain):
    p = nodes["p"]
    wait_for(lambda: is_idle(p))
    before = count(p, "leases_granted", "leases_released", "leases_expired")
    for number in range(3):
        prompt = fresh(prompts[0], number)
        decode(nodes["d2"], prompt, prefill(p, prompt))

    def settled():
        now = count(p, "leases_granted", "leases_released", "leases_expired")
        return [a - b for a, b in zip(now, before, strict=True)] == [3, 3, 0]

    wait_for(settled)
    wait_for(lambda: is_idle(p))


@pytest.fixture
def full(nodes, prompts):
    """D at TP=1 with all its slots taken three times over, for longer than a lease."""
    d, prompt = nodes["d1"], fresh(prompts[0], 60)
    gauge = "vllm:num_requests_running"
    with ThreadPoolExecutor(12) as pool:
        running = [pool.submit(post, d, prompt, 690) for _ in range(12)]
        wait_for(lambda: d.counters([gauge]).get(gauge) == 4)
        yield d
        for future in running:
            future.result()


def test_while_d_is_full_an_abort_frees_p_s_blocks_at_once_and_who_waits_is_pulled_in_the_end(
    nodes, prompts, plain, full
):
    p, waiting = nodes["p"], fresh(prompts[1], 61)
    params = prefill(p, waiting)
    before = count(p, "leases_expired", "leases_released", "leases_renewed")
    pulled, failures = count(full, "pull_tokens", "pull_failures")
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(decode, full, waiting, params)
        aborted = fresh(prompts[1], 62)
        with pytest.raises(PeerError, match="did not answer within 1 s"):
            decode(replace(full, timeout_s=1), aborted, prefill(p, aborted))
        wait_for(lambda: count(p, "leases_released")[0] == before[1] + 1, timeout_s=20)
        assert not answer.done()
        tokens = answer.result()
    waited_s = time.monotonic() - began
    assert tokens == plain.complete(waiting, max_tokens=12).token_ids
    assert waited_s > LEASE_S, "D was not full for long enough to show anything"
    wait_for(lambda: count(full, "pull_tokens")[0] > pulled)
    assert count(full, "pull_failures") == [failures]
    expired, _, renewed = count(p, "leases_expired", "leases_released", "leases_renewed")
    assert (expired, renewed > before[2]) == (before[0], True)


def test_a_reader_that_never_comes_is_forgotten_after_the_lease(nodes, prompts, plain):
    p = nodes["p"]
    prompt = fresh(prompts[1], 10)
    (before,) = count(p, "leases_expired")
    params = prefill(p, prompt)
    wait_for(lambda: count(p, "leases_expired")[0] > before, timeout_s=LEASE_S + 90)
    # Too late: the blocks may belong to somebody else. D computes the prompt itself.
    expected = plain.complete(prompt, max_tokens=12).token_ids
    (failures,) = count(nodes["d1"], "pull_failures")
    assert decode(nodes["d1"], prompt, params) == expected
    wait_for(lambda: count(nodes["d1"], "pull_failures")[0] == failures + 1)


@pytest.mark.parametrize(
    "damage",
    [
        {"remote_port": 1},
        {"remote_block_ids": [0]},
        {"remote_block_ids": [10**6] * 64},
        {"remote_host": 5},
        {"kvpp_connect": None},
    ],
)
def test_a_handover_that_cannot_be_used_ends_in_a_recompute(nodes, prompts, plain, damage):
    prompt = fresh(prompts[2], 20)
    params = prefill(nodes["p"], prompt) | damage
    expected = plain.complete(prompt, max_tokens=12).token_ids
    assert decode(nodes["d1"], prompt, params) == expected


def test_a_handover_of_another_prompt_is_not_used(nodes, prompts, plain):
    params = prefill(nodes["p"], fresh(prompts[3], 30))
    other = fresh(prompts[3], 31)
    assert decode(nodes["d1"], other, params) == plain.complete(other, max_tokens=12).token_ids


def test_an_ordinary_request_hands_nothing_over(nodes, prompts, plain):
    prompt = fresh(prompts[4], 40)
    before = count(nodes["p"], "leases_granted")
    answer = post(nodes["p"], prompt, 12)
    assert answer.get("kv_transfer_params") is None
    assert tuple(answer["choices"][0]["token_ids"]) == (
        plain.complete(prompt, max_tokens=12).token_ids
    )
    time.sleep(1)
    assert count(nodes["p"], "leases_granted") == before


def test_with_the_wrong_owners_the_tokens_differ(
    nodes, describe, run_servers, secret, prompts, plain_tokens
):
    """Negative control: P publishes, for each layer, the rank that holds only scratch of it."""
    wrong = describe("wrong", 2, kvpp={}, kv=kv("kv_producer", **secret), switches=("wrong_owner",))
    with run_servers(wrong) as clients:
        answers = []
        for number, prompt in enumerate(prompts):
            prompt = fresh(prompt, 50 + number)
            before = count(nodes["d1"], "pull_tokens")
            answers.append(
                decode(nodes["d1"], prompt, prefill(clients["wrong"], prompt))
                != prefill_and_continue(nodes, prompt)
            )
            wait_for(lambda before=before: count(nodes["d1"], "pull_tokens") != before)
        assert all(answers)


def prefill_and_continue(nodes, prompt):
    return tuple(post(nodes["p"], prompt, 12)["choices"][0]["token_ids"])
