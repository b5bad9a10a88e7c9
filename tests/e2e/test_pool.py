"""The KV pool through real Mooncake: engines fill it, others hit it, tokens are plain vLLM's."""

import pytest
from e2e_tools import MAX_TOKENS, continue_all, count, pool, wait_for
from pool_equipment import mooncake_master

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BLOCK = 16
STORED = ("pool_stored_blocks", "pool_unstored_blocks")


@pytest.fixture(scope="module")
def master():
    with mooncake_master() as server:
        yield server


def hit_blocks(prompts):
    """Blocks that the prompts hit in a pool that holds all of them, with a prefix cache beside it:
    the first prompt brings the common prefix, and the last token is always computed."""
    prefix = 300 // BLOCK
    return sum((len(p) - 1) // BLOCK for p in prompts) - prefix * (len(prompts) - 1)


def settled(client):
    """Waits until all puts are through."""
    wait_for(lambda: client.gauge("vllm:kvpp_pool_pinned_blocks") == 0)


MODES = {
    "kvpp": {"ranks": 2, "kvpp": {"mode": "compact"}},
    "kvpp-full": {"ranks": 2, "kvpp": {"mode": "full"}},
    "plain": {"ranks": 2},
}


def test_one_engine_fills_the_pool_and_a_fresh_one_hits_it(
    describe, run_servers, master, prompts, plain_tokens
):
    first = describe("fill", 2, kvpp={"mode": "compact"}, kv=pool(master))
    with run_servers(first) as clients:
        client = clients["fill"]
        assert continue_all(client, prompts, concurrency=1) == plain_tokens
        _stored, unstored = wait_for(lambda: all_stored(client, prompts))
        assert unstored == 0
        second = describe("hit", 2, kvpp={"mode": "compact"}, kv=pool(master))
        with run_servers(second) as others:
            other = others["hit"]
            assert continue_all(other, prompts, concurrency=1) == plain_tokens
            [tokens] = count(other, "pool_hit_tokens")
            assert tokens == BLOCK * hit_blocks(prompts)


def all_stored(client, prompts):
    """Counters of stored and unstored blocks, once there are enough."""
    prefix = 300 // BLOCK
    blocks = sum((len(p) + MAX_TOKENS - 1) // BLOCK for p in prompts) - prefix * (len(prompts) - 1)
    stored, unstored = count(client, *STORED)
    return (stored, unstored) if stored >= blocks else None
