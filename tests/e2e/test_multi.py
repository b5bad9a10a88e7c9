"""P/D and a pool in one engine, through vLLM's own MultiConnector, on real servers.

Two prefill nodes with KVPP share a pool on a Mooncake master and hand over to one decode node, all
behind vllm-router. The children stand in both orders.
"""

import pytest
from e2e_tools import (
    MAX_TOKENS,
    continue_all,
    count,
    decode,
    is_idle,
    kill_server,
    kv,
    multi,
    pool,
    prefill,
    wait_for,
)
from pool_equipment import StoreNode, mooncake_master

from kvpp_connect.demo.client import CompletionClient
from kvpp_connect.demo.fleet import Fleet
from kvpp_connect.demo.ports import free_ports
from kvpp_connect.demo.servers import MODEL_NAME, RouterServer
from kvpp_connect.errors import PeerError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BLOCK = 16
PREFIX = 300  # tokens that the prompts have in common
KVPP = {"mode": "compact"}
LEASE_S = 8
FAILURES = ("pool_failures", "pull_failures")
# A dead prefill node is found within about a second, since it refuses; a slow one is still used.
PROMPT_ROUTER = (
    *("--health-check-interval-secs", "1", "--health-failure-threshold", "1"),
    *("--health-check-timeout-secs", "10"),
)


@pytest.fixture(scope="module")
def master():
    with mooncake_master(default_kv_lease_ttl=60_000) as server, StoreNode(server, 256 << 20):
        yield server


@pytest.fixture(scope="module")
def nodes(describe, run_servers, master):
    """Two prefill nodes and a decode node; the pool comes second, first and first."""
    give, take = kv("kv_producer", lease_s=LEASE_S), kv("kv_consumer")
    both = pool(master)
    keeps = pool(master, "kv_consumer", consumer_is_to_put=True)
    small = {"cache_bytes": 30_000_000}
    with run_servers(
        describe("p1", 2, kvpp=KVPP, kv=multi(give, both, role="kv_producer"), **small),
        describe("p2", 2, kvpp=KVPP, kv=multi(both, give), **small),
        describe("d", 2, kvpp=KVPP, kv=multi(keeps, take, role="kv_consumer"), **small),
    ) as clients:
        yield clients


@pytest.fixture(scope="module")
def router(nodes, logs):
    port, metrics_port = free_ports(2)
    server = RouterServer(
        name="multi-router",
        port=port,
        metrics_port=metrics_port,
        prefill_urls=(nodes["p1"].url, nodes["p2"].url),
        decode_urls=(nodes["d"].url,),
        extra_args=PROMPT_ROUTER,
    )
    with Fleet(logs) as fleet:
        (running,) = fleet.start([server.launch()], timeout_s=60)
        yield CompletionClient(url=running.url, model=MODEL_NAME, timeout_s=120)


def fresh(prompt, number):
    """The same prompt with another first token, so that neither cache nor pool knows it."""
    return [5 + number, *prompt[1:]]


def full_blocks(prompt):
    """Blocks of a prompt that a pool can give: its last token is always computed."""
    return (len(prompt) - 1) // BLOCK


def test_the_router_lets_both_prefill_nodes_compute_and_the_tokens_are_plain_vllms(
    nodes, router, prompts, plain_tokens
):
    assert continue_all(router, prompts) == plain_tokens
    granted = {name: count(nodes[name], "leases_granted")[0] for name in ("p1", "p2")}
    assert sum(granted.values()) == len(prompts)
    assert min(granted.values()) > 0, granted
    for client in nodes.values():
        wait_for(lambda client=client: is_idle(client))
        assert count(client, *FAILURES) == [0, 0]


def test_a_prefix_computed_on_one_prefill_node_is_hit_on_the_other(nodes, plain, prompts):
    p1, p2, d = (nodes[name] for name in ("p1", "p2", "d"))
    prompt = fresh(prompts[2], 1)
    expected = plain.complete(prompt, max_tokens=MAX_TOKENS).token_ids
    stored, hits = count(p1, "pool_stored_blocks")[0], count(p2, "pool_hit_tokens")[0]
    assert decode(d, prompt, prefill(p1, prompt)) == expected
    wait_for(lambda: count(p1, "pool_stored_blocks")[0] == stored + len(prompt) // BLOCK)
    # Another end, so that D pulls from P2 what it does not have.
    longer = [*prompt, *prompts[0][:40]]
    pulled = count(d, "pull_tokens")[0]
    assert (
        decode(d, longer, prefill(p2, longer))
        == plain.complete(longer, max_tokens=MAX_TOKENS).token_ids
    )
    wait_for(lambda: count(p2, "pool_hit_tokens")[0] == hits + BLOCK * (len(prompt) // BLOCK))
    wait_for(lambda: count(d, "pull_tokens")[0] > pulled)
    for client in (p1, p2, d):
        assert count(client, *FAILURES) == [0, 0]


def test_a_decode_node_pulls_first_and_stores_what_it_decoded(nodes, plain, prompts):
    p2, d = nodes["p2"], nodes["d"]
    prompt = fresh(prompts[1], 2)
    before = count(d, "pull_tokens", "pool_hit_tokens", "pool_stored_blocks")
    tokens = decode(d, prompt, prefill(p2, prompt))
    assert tokens == plain.complete(prompt, max_tokens=MAX_TOKENS).token_ids
    blocks = (len(prompt) + MAX_TOKENS - 1) // BLOCK
    expected = [before[0] + len(prompt), before[1], before[2] + blocks]
    wait_for(lambda: count(d, "pull_tokens", "pool_hit_tokens", "pool_stored_blocks") == expected)


def test_where_a_prefill_node_was_killed_the_pool_helps_and_the_rest_goes_on(
    nodes, router, plain, prompts
):
    p1, p2, d = (nodes[name] for name in ("p1", "p2", "d"))
    handed = [fresh(prompt, 3) for prompt in prompts[:3]]
    later = [fresh(prompt, 4) for prompt in prompts]
    expected, after = continue_all(plain, handed), continue_all(plain, later)
    stored, shared = count(p1, "pool_stored_blocks")[0], 2 * (PREFIX // BLOCK)
    params = []
    for number, prompt in enumerate(handed):
        params.append(prefill(p1, prompt))
        # The next one asks the pool for the prefix, so that has to be stored.
        stored += len(prompt) // BLOCK - (number > 0) * (PREFIX // BLOCK)
        wait_for(lambda stored=stored: count(p1, "pool_stored_blocks") == [stored])
    hits = count(d, "pool_hit_tokens")[0]
    kill_server(p1)
    assert [decode(d, prompt, one) for prompt, one in zip(handed, params, strict=True)] == expected
    found = BLOCK * (sum(map(full_blocks, handed)) - shared)
    wait_for(lambda: count(d, "pool_hit_tokens")[0] == hits + found)
    assert count(d, "pull_failures")[0] > 0

    def goes_on():
        try:
            return continue_all(router, later)
        except PeerError:
            return None

    assert wait_for(goes_on, timeout_s=60) == after
    assert continue_all(router, later) == after
    for client in (p2, d):
        wait_for(lambda client=client: is_idle(client), timeout_s=LEASE_S + 60)


def test_without_kvpp_they_work_beside_a_connector_of_vllms_own(
    describe, run_servers, master, tmp_path, prompts, plain, plain_tokens
):
    """ExampleConnector keeps whole prompts in files, loads them before the step, and cannot chunk.

    Who comes first loads: P/D on one node, the files on the other.
    """
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    pd, store = kv("kv_both"), pool(master, namespace="three")
    whole = {"args": ("--max-num-batched-tokens", "1024"), "cache_bytes": 30_000_000}
    with run_servers(
        describe("pulls", 1, kv=multi(pd, store, example), **whole),
        describe("reads", 1, kv=multi(example, store, pd), **whole),
    ) as clients:
        pulls, reads = clients["pulls"], clients["reads"]
        assert continue_all(pulls, prompts, concurrency=1) == plain_tokens
        assert list(tmp_path.iterdir()), "the third connector saved nothing"
        assert continue_all(reads, prompts, concurrency=1) == plain_tokens
        for number, (here, there) in enumerate(((pulls, reads), (reads, pulls))):
            handed = [fresh(prompt, 5 + number) for prompt in prompts]
            expected = continue_all(plain, handed)
            assert [decode(there, prompt, prefill(here, prompt)) for prompt in handed] == expected
        wait_for(lambda: count(pulls, "pull_tokens")[0] > PREFIX)
        # The files of the shortest prompt hold no more than its prefix, so P/D gives the rest.
        shortest = min(map(len, prompts))
        assert count(reads, "pull_tokens") == [shortest - PREFIX // BLOCK * BLOCK]
        for client in clients.values():
            # Who does not load gives the hand-over back at once.
            wait_for(lambda client=client: count(client, "leases_released") == [len(prompts)])
            wait_for(lambda client=client: is_idle(client))
            assert count(client, "leases_expired", "pool_unstored_blocks", *FAILURES) == [0] * 4
