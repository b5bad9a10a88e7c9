"""The KV pool through real Mooncake: engines fill it, others hit it, tokens are plain vLLM's.

A store node lends the memory, so objects outlive the engines; engines run one after the other.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from e2e_tools import MAX_TOKENS, continue_all, count, is_idle, pool, post, wait_for
from kv_events import KvEvents
from pool_equipment import StoreNode, mooncake_master
from sparse_model import write_sparse_checkpoint

from kvpp_connect.demo.local_http import post_json
from kvpp_connect.demo.model import ModelSpec, write_checkpoint
from kvpp_connect.demo.ports import free_ports
from kvpp_connect.errors import PeerError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BLOCK = 16
PREFIX = 300
COMPACT, FULL = {"mode": "compact"}, {"mode": "full"}
# The proposer chooses a backend of its own: where the CPU has AMX, one without float32.
SPECULATION = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "CPU_MLA"}
MTP = ("--speculative-config", json.dumps(SPECULATION))
FAILURES = "pool_failures"


@pytest.fixture(scope="module")
def master():
    with mooncake_master(default_kv_lease_ttl=60_000) as server, StoreNode(server, 512 << 20):
        yield server


@pytest.fixture(scope="module")
def models(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("models")
    return {
        "dense": model,
        "experts": write_checkpoint(folder / "experts", ModelSpec(dense_layers=3, mtp_layers=1)),
        "sparse": write_sparse_checkpoint(folder / "sparse"),
    }


def hit_tokens(prompts, block=BLOCK):
    """Tokens that the prompts, one after the other, find in a pool that holds all of them.

    The last token is always computed. The common prefix is in the prefix cache after the first.
    """
    blocks = sum((len(prompt) - 1) // block for prompt in prompts)
    return block * (blocks - PREFIX // block * (len(prompts) - 1))


def stored_blocks(prompts, block=BLOCK):
    """Blocks that the same prompts fill: the last token of an answer is never computed."""
    blocks = sum((len(prompt) + MAX_TOKENS - 1) // block for prompt in prompts)
    return blocks - PREFIX // block * (len(prompts) - 1)


def hits_and_failures(client):
    return count(client, "pool_hit_tokens", FAILURES)


@pytest.fixture(scope="module")
def filled(describe, run_servers, master, prompts, plain_tokens):
    """The dense model's prompts in the pool, put there by KVPP on two ranks."""
    with run_servers(describe("fill", 2, kvpp=COMPACT, kv=pool(master))) as clients:
        client = clients["fill"]
        assert continue_all(client, prompts, concurrency=1) == plain_tokens
        wait_for(lambda: count(client, "pool_stored_blocks") == [stored_blocks(prompts)])
        assert count(client, "pool_unstored_blocks", "pool_hit_tokens", FAILURES) == [0, 0, 0]
        wait_for(lambda: is_idle(client))
    return master


READERS = {
    "kvpp, in the background": (COMPACT, {}),
    "kvpp full, before the step": (FULL, {"load_async": False}),
    "kvpp, layer by layer": (COMPACT, {"use_layerwise": True}),
    "without kvpp, layer by layer": (None, {"use_layerwise": True}),
    "without kvpp, before the step": (None, {"load_async": False}),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_fresh_engine_hits_what_another_one_stored(
    describe, run_servers, filled, prompts, plain_tokens, reader
):
    kvpp, extra = READERS[reader]
    with run_servers(describe("hit", 2, kvpp=kvpp, kv=pool(filled, **extra))) as clients:
        client = clients["hit"]
        assert continue_all(client, prompts, concurrency=1) == plain_tokens
        assert hits_and_failures(client) == [hit_tokens(prompts), 0]
        assert continue_all(client, prompts, concurrency=4) == plain_tokens
        wait_for(lambda: is_idle(client))


def test_the_tokens_behind_the_last_full_block_are_pooled_on_request(
    describe, run_servers, master, prompts, plain_tokens
):
    kv = pool(master, discard_partial_chunks=False, namespace="partial")
    for round_number in range(2):
        with run_servers(describe(f"partial{round_number}", 2, kvpp=COMPACT, kv=kv)) as clients:
            [client] = clients.values()
            assert continue_all(client, prompts, concurrency=1) == plain_tokens
            hits, failures = hits_and_failures(client)
            # All but each prompt's last token.
            own = sum(len(p) - 1 for p in prompts) - PREFIX // BLOCK * BLOCK * (len(prompts) - 1)
            assert (hits, failures) == (own * round_number, 0)
            wait_for(lambda client=client: is_idle(client))


def test_an_engine_of_another_size_hits_nothing_of_it(
    describe, run_servers, filled, prompts, plain_tokens
):
    with run_servers(describe("tp1", 1, kv=pool(filled))) as clients:
        client = clients["tp1"]
        assert continue_all(client, prompts, concurrency=1) == plain_tokens
        assert hits_and_failures(client) == [0, 0]
        wait_for(lambda: count(client, "pool_stored_blocks") == [stored_blocks(prompts)])


def test_a_consumer_stores_only_when_it_is_told_to(
    describe, run_servers, master, prompts, plain_tokens
):
    quiet = pool(master, "kv_consumer", namespace="consumers")
    putting = pool(master, "kv_consumer", namespace="consumers", consumer_is_to_put=True)
    with run_servers(
        describe("quiet", 2, kvpp=COMPACT, kv=quiet), describe("putting", 2, kv=putting)
    ) as clients:
        for name in ("quiet", "putting", "quiet"):
            assert continue_all(clients[name], prompts, concurrency=1) == plain_tokens
            wait_for(lambda name=name: is_idle(clients[name]))
        assert count(clients["quiet"], "pool_stored_blocks") == [0]
        assert count(clients["putting"], "pool_stored_blocks") == [stored_blocks(prompts)]


@dataclass(frozen=True)
class Family:
    model: str
    fill: dict
    hit: dict
    common: dict
    objects: int  # of a block
    block: int = BLOCK


FAMILIES = {
    "drafts": Family(
        model="experts",
        fill={"kvpp": COMPACT, "args": MTP},
        hit={"kvpp": COMPACT, "args": MTP},
        common={},
        objects=3,  # two owners and the drafts, once
    ),
    "sparse": Family(
        model="sparse",
        fill={"kvpp": COMPACT},
        hit={"kvpp": FULL},
        common={"args": ("--tokenizer-mode", "hf"), "switches": ("sparse",)},
        objects=2,
        block=64,
    ),
    "stages": Family(
        model="dense",
        fill={"kvpp": COMPACT, "args": ("--pipeline-parallel-size", "2"), "compiled": True},
        hit={"args": ("--pipeline-parallel-size", "2"), "compiled": True},
        common={},
        objects=4,  # two stages of two
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_every_kind_are_stored_once_and_hit(
    describe, run_servers, master, models, prompts, plain_tokens, family
):
    chosen = FAMILIES[family]

    def server(name, own):
        args = (*chosen.common.get("args", ()), *own.get("args", ()))
        settings = {**chosen.common, **own, "args": args}
        return describe(f"{family}-{name}", 2, model=models[chosen.model], **settings)

    expected = plain_tokens
    if chosen.model != "dense":
        with run_servers(server("plain", {})) as clients:
            expected = continue_all(clients[f"{family}-plain"], prompts, concurrency=1)
    with run_servers(server("fill", {**chosen.fill, "kv": pool(master)})) as clients:
        client = clients[f"{family}-fill"]
        assert continue_all(client, prompts, concurrency=1) == expected
        stored = stored_blocks(prompts, chosen.block)
        wait_for(lambda: count(client, "pool_stored_blocks") == [stored])
        wait_for(lambda: is_idle(client))
        assert count(client, "pool_put_objects", FAILURES) == [stored * chosen.objects, 0]
    with run_servers(server("hit", {**chosen.hit, "kv": pool(master)})) as clients:
        client = clients[f"{family}-hit"]
        assert continue_all(client, prompts, concurrency=1) == expected
        hits, failures = hits_and_failures(client)
        assert failures == 0
        # With drafts vLLM computes the last block of its own hits once more.
        again = BLOCK * (len(prompts) - 1) if family == "drafts" else 0
        assert hits == hit_tokens(prompts, chosen.block) + again


def test_a_pool_that_is_too_small_evicts_and_never_answers_wrong(
    describe, run_servers, prompts, plain, plain_tokens
):
    block_bytes = 6 * BLOCK * 576 * 4
    with (
        mooncake_master(default_kv_lease_ttl=100, eviction_high_watermark_ratio=0.7) as master,
        StoreNode(master, 16 << 20),
        run_servers(
            describe("a", 2, kvpp=COMPACT, kv=pool(master), cache_bytes=30_000_000),
            describe("b", 2, kv=pool(master), cache_bytes=30_000_000),
        ) as clients,
    ):
        many = [[5 + number, *prompt[1:]] for number in range(6) for prompt in prompts]
        assert len(many) * 20 * block_bytes > 4 * (16 << 20)
        expected = continue_all(plain, many)
        for name in ("a", "b", "a"):
            assert continue_all(clients[name], many, concurrency=2) == expected
        for client in clients.values():
            wait_for(lambda client=client: is_idle(client))


def test_requests_that_are_aborted_or_preempted_leave_nothing_behind(
    describe, run_servers, filled, prompts, plain, plain_tokens
):
    """Four prompts fit, but not what they grow by, while their blocks are stored."""
    small = describe("small", 2, kvpp=COMPACT, kv=pool(filled), cache_bytes=14_000_000)
    with run_servers(small) as clients:
        client = clients["small"]
        long_ones = [[9 + i, *prompts[0][1:250]] for i in range(4)]

        def run(server):
            return [
                tuple(answer["choices"][0]["token_ids"])
                for answer in ThreadPoolExecutor(4).map(
                    lambda prompt: post(server, prompt, 80), long_ones
                )
            ]

        assert run(client) == run(plain)
        for prompt in prompts:
            impatient = type(client)(url=client.url, model=client.model, timeout_s=0.05)
            with pytest.raises(PeerError, match="did not answer"):
                post(impatient, prompt, 200)
        assert continue_all(client, prompts, concurrency=1) == plain_tokens
        wait_for(lambda: is_idle(client))


def test_a_dead_master_delays_nothing_for_long_and_a_new_one_is_found(
    describe, run_servers, prompts, plain_tokens
):
    with (
        mooncake_master(default_kv_lease_ttl=5000) as own,
        run_servers(
            describe(
                "served",
                2,
                kvpp=COMPACT,
                kv=pool(
                    own, global_segment_size="128MB", lookup_timeout_s=1.0, load_timeout_s=10.0
                ),
            )
        ) as clients,
    ):
        client = clients["served"]
        assert continue_all(client, prompts, concurrency=1) == plain_tokens
        own.kill()
        changed = [[5 + i, *p[1:]] for i, p in enumerate(prompts)]
        impatient = type(client)(url=client.url, model=client.model, timeout_s=60)
        first = continue_all(impatient, changed, concurrency=2)
        assert continue_all(impatient, prompts, concurrency=2) == plain_tokens
        own.restart()
        before = count(client, "pool_stored_blocks")[0]

        def stores_again():
            assert continue_all(client, changed, concurrency=2) == first
            return count(client, "pool_stored_blocks")[0] > before

        wait_for(stores_again)
        wait_for(lambda: is_idle(client))


def test_a_reset_pool_is_never_hit_again_and_routers_are_told(
    describe, run_servers, master, prompts, plain_tokens
):
    [port] = free_ports(1)
    endpoint = f"tcp://127.0.0.1:{port}"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    server = describe(
        "told",
        2,
        kvpp=COMPACT,
        kv=pool(master, namespace="reset"),
        args=("--kv-events-config", json.dumps(events)),
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    with KvEvents(endpoint) as told, run_servers(server) as clients:
        client = clients["told"]
        assert continue_all(client, prompts, concurrency=1) == plain_tokens
        wait_for(lambda: len(told.stored()) == stored_blocks(prompts))
        told.assert_chains()
        post_json(f"{client.url}/reset_prefix_cache?reset_external=true", {}, timeout_s=60)
        wait_for(lambda: len(told.removed()) == stored_blocks(prompts))
        assert sorted(told.removed()) == sorted(told.stored())
        assert continue_all(client, prompts, concurrency=1) == plain_tokens
        assert hits_and_failures(client) == [0, 0]
