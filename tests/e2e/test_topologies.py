"""P/D between nodes of different shapes, each with the tokens of plain vLLM.

KVPP is on at every prefill node: over two pipeline stages, with a draft (MTP) on both sides, and
with sparse MLA, whose main caches and packed index keys differ in size, dtype and divisibility.
"""

import json
from dataclasses import dataclass

import pytest
from e2e_tools import continue_all, count, decode, kv, prefill, wait_for
from sparse_model import write_sparse_checkpoint

from kvpp_connect.demo.model import ModelSpec, write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

COMPACT = {"mode": "compact"}
# The proposer chooses a backend of its own: where the CPU has AMX, one without float32.
SPECULATION = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "CPU_MLA"}
MTP = ("--speculative-config", json.dumps(SPECULATION))
PULLED = ("pull_bytes", "pull_peer_bytes", "pull_tokens", "pull_failures")


@dataclass(frozen=True)
class Node:
    ranks: int = 2
    kvpp: dict | None = None
    args: tuple[str, ...] = ()
    compiled: bool = False
    # Bytes that ranks of this node read from each other, for each byte read from P.
    shared: float = 1.0


@dataclass(frozen=True)
class Topology:
    model: str
    prefill: Node
    decodes: tuple[Node, ...]
    args: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    token_bytes: int | None = None


ROW = 576 * 4
TOPOLOGIES = {
    "stages": Topology(
        model="plain",
        prefill=Node(kvpp=COMPACT, args=("--pipeline-parallel-size", "2"), compiled=True),
        decodes=(Node(),),
        token_bytes=6 * ROW,
    ),
    "drafts": Topology(
        model="experts",
        prefill=Node(kvpp=COMPACT, args=MTP),
        # With KVPP the ranks share the draft's cache alone: one layer of seven.
        decodes=(Node(args=MTP), Node(kvpp=COMPACT, args=MTP, shared=1 / 7)),
        token_bytes=7 * ROW,
    ),
    "sparse": Topology(
        model="sparse",
        prefill=Node(kvpp=COMPACT),
        decodes=(Node(), Node(kvpp=COMPACT, shared=0)),
        args=("--tokenizer-mode", "hf"),
        switches=("sparse",),
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("models")
    return {
        "plain": model,
        "experts": write_checkpoint(folder / "experts", ModelSpec(dense_layers=3, mtp_layers=1)),
        "sparse": write_sparse_checkpoint(folder / "sparse"),
    }


@pytest.fixture(scope="module", params=TOPOLOGIES)
def topology(request):
    return request.param


@pytest.fixture(scope="module")
def servers(describe, run_servers, models, topology):
    chosen = TOPOLOGIES[topology]

    def server(name, node, role=None):
        return describe(
            f"{topology}-{name}",
            node.ranks,
            kvpp=node.kvpp,
            kv=kv(role) if role else None,
            args=(*chosen.args, *node.args),
            switches=chosen.switches,
            compiled=node.compiled,
            model=models[chosen.model],
        )

    ranks = 2 if chosen.model == "sparse" else 1
    return run_servers(
        server("plain", Node(ranks)),
        server("p", chosen.prefill, "kv_producer"),
        *(server(f"d{i}", node, "kv_consumer") for i, node in enumerate(chosen.decodes)),
    )


@pytest.fixture(scope="module")
def clients(servers, topology):
    with servers as running:
        yield {name.removeprefix(f"{topology}-"): client for name, client in running.items()}


@pytest.fixture(scope="module")
def expected(clients, prompts):
    return continue_all(clients["plain"], prompts, concurrency=1)


def test_the_tokens_are_those_of_plain_vllm_and_each_byte_leaves_p_once(
    clients, topology, prompts, expected
):
    chosen = TOPOLOGIES[topology]
    for i, node in enumerate(chosen.decodes):
        client = clients[f"d{i}"]
        before = count(client, *PULLED)
        answers = [decode(client, p, prefill(clients["p"], p)) for p in prompts]
        assert answers == expected, f"d{i}"

        def difference(client=client, before=before):
            return [a - b for a, b in zip(count(client, *PULLED), before, strict=True)]

        def settled(node=node, difference=difference):
            pulled, from_peers, tokens, _ = difference()
            return tokens > 0 and from_peers == pytest.approx(pulled * node.shared)

        wait_for(settled)
        pulled, _, tokens, failures = difference()
        assert failures == 0
        if chosen.token_bytes:
            assert pulled == tokens * chosen.token_bytes


def test_p_keeps_no_blocks(clients):
    usage = "vllm:kv_cache_usage_perc"
    wait_for(lambda: clients["p"].counters([usage]) == {usage: 0.0})
