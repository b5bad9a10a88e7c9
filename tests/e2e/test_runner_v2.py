"""KVPP with vLLM's model runner V2, each with the tokens of plain vLLM (model runner V1).

V2 needs Triton. Here its kernels run in Triton's interpreter, on the CPU; vLLM's Python around
them, its workers, schedulers and CPU attention are the real ones. Prefill context parallelism (PCP)
exists in V2 alone.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e_tools import EQUIPMENT, continue_all, count, decode, kv, prefill, with_equipment
from sparse_model import write_sparse_checkpoint

from kvpp_connect.demo.logs import read_log
from kvpp_connect.demo.model import ModelSpec, write_checkpoint

TRITON = Path(__file__).parents[2] / ".venv-triton"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (TRITON / ".kvpp-setup").exists(), reason="needs .venv-triton: make test-runner-v2"
    ),
]

FULL, COMPACT = {"mode": "full"}, {"mode": "compact"}
SMALL = {"mode": "compact", "running_tokens": 70 * 16}
PCP2 = ("--prefill-context-parallel-size", "2")
PP2 = ("--pipeline-parallel-size", "2")
HF = ("--tokenizer-mode", "hf")
# The proposer chooses a backend of its own: where the CPU has AMX, one without float32.
SPECULATION = {"method": "mtp", "num_speculative_tokens": 2, "attention_backend": "CPU_MLA"}
MTP = ("--speculative-config", json.dumps(SPECULATION))


def with_v2(*switches):
    equipment = with_equipment(**dict.fromkeys(switches, 1))
    path = (str(TRITON), str(EQUIPMENT / "interpreter"), equipment.pop("PYTHONPATH"))
    return {
        **equipment,
        "PYTHONPATH": os.pathsep.join(path),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }


@dataclass(frozen=True)
class Deployment:
    """``ranks`` is the size of the tensor parallel group."""

    ranks: int
    kvpp: dict | None
    args: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    model: str = "dense"

    @property
    def drafts(self) -> bool:
        return "--speculative-config" in self.args


DEPLOYMENTS = {
    "v2-plain": Deployment(1, None),
    "v2-full": Deployment(2, FULL),
    "v2-compact": Deployment(2, COMPACT, switches=("warm_up", "late")),
    "v2-async": Deployment(2, SMALL, switches=("async",)),
    "v2-pcp2-full": Deployment(1, FULL, PCP2),
    "v2-pcp2": Deployment(1, COMPACT, PCP2),
    "v2-pcp2-tp2": Deployment(2, COMPACT, PCP2, switches=("late",)),
    "v2-pp2": Deployment(2, COMPACT, PP2),
    # Not asynchronously: plain vLLM 0.32 with V2 and CPU_MLA then answers other tokens by itself.
    "v2-mtp-full": Deployment(2, FULL, MTP, model="experts"),
    "v2-mtp": Deployment(2, COMPACT, MTP, ("late",), model="experts"),
    "v2-sparse-full": Deployment(2, FULL, HF, ("sparse", "late"), model="sparse"),
    "v2-sparse": Deployment(2, COMPACT, HF, ("sparse", "async"), model="sparse"),
}


@pytest.fixture(scope="module")
def models(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    spec = ModelSpec(layers=6, dense_layers=3, mtp_layers=1)
    return {
        "dense": model,
        "experts": write_checkpoint(folder / "experts", spec),
        "sparse": write_sparse_checkpoint(folder / "sparse"),
    }


@pytest.fixture(scope="module")
def expected(describe, run_servers, models, prompts, plain_tokens):
    """What plain vLLM answers with a model; of drafts it makes no use."""
    known = {"dense": plain_tokens}

    def answers(model):
        if model not in known:
            options = {"args": HF, "switches": ("sparse",)} if model == "sparse" else {}
            with run_servers(describe(f"v1-{model}", 2, model=models[model], **options)) as clients:
                known[model] = continue_all(clients[f"v1-{model}"], prompts)
        return known[model]

    return answers


@pytest.fixture(scope="module")
def describe_v2(describe, models):
    def build(name, deployment):
        return describe(
            name,
            deployment.ranks,
            kvpp=deployment.kvpp,
            args=deployment.args,
            model=models[deployment.model],
            env=with_v2(*deployment.switches),
        )

    return build


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_v2_gives_the_tokens_of_plain_vllm(describe_v2, run_servers, prompts, expected, name):
    """Chunked prefill, several requests in a batch, decode; then all again with prefix hits."""
    chosen = DEPLOYMENTS[name]
    tokens = expected(chosen.model)
    servers = run_servers(describe_v2(name, chosen))
    with servers as clients:
        client = clients[name]
        assert continue_all(client, prompts) == tokens
        hits = "vllm:prefix_cache_hits_total"
        before = client.counters([hits])[hits]
        assert continue_all(client, prompts, concurrency=1) == tokens
        assert client.counters([hits])[hits] - before >= 200 * len(prompts)
        drafted = "vllm:spec_decode_num_draft_tokens_total"
        assert (client.counters([drafted]).get(drafted, 0) > 0) is chosen.drafts
        log = read_log(servers.logs[name])
    assert "Using V2 Model Runner" in log
    assert ("KVPP_TEST_WARM_UP done" in log) is ("warm_up" in chosen.switches)
    if chosen.kvpp is not None:
        assert f"KVPP {chosen.kvpp['mode']}: stage 0" in log
        assert f"{int(chosen.drafts)} draft cache(s) on each" in log


def test_preemption_for_want_of_running_blocks_gives_the_tokens_of_plain_vllm(
    describe_v2, run_servers, prompts, plain
):
    """Four prompts of 16 blocks fit, but not the 80 tokens that each of them grows by."""
    different = [[5 + i, *prompt[1:250]] for i, prompt in enumerate(prompts)]
    with run_servers(describe_v2("v2-tiny", DEPLOYMENTS["v2-async"])) as clients:
        answers = [
            client.complete_all(different, max_tokens=80, concurrency=5)
            for client in (clients["v2-tiny"], plain)
        ]
        assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]
        preemptions = "vllm:num_preemptions_total"
        assert clients["v2-tiny"].counters([preemptions])[preemptions] > 0


@pytest.mark.parametrize("name", ["v2-compact", "v2-pcp2"])
def test_without_the_broadcast_the_tokens_differ(
    describe_v2, run_servers, prompts, plain_tokens, name
):
    """Negative control: a model or test too weak to notice would prove nothing."""
    chosen = DEPLOYMENTS[name]
    silent = Deployment(chosen.ranks, chosen.kvpp, chosen.args, ("no_broadcast",))
    with run_servers(describe_v2(f"{name}-silent", silent)) as clients:
        answers = continue_all(clients[f"{name}-silent"], prompts)
    assert all(a != b for a, b in zip(answers, plain_tokens, strict=True))


@pytest.mark.parametrize(("ranks", "args"), [(2, ()), (1, PCP2)], ids=["tp2", "pcp2"])
def test_a_decode_node_pulls_from_the_owners_of_a_prefill_node(
    describe, run_servers, prompts, plain_tokens, ranks, args
):
    """V2 asks connectors for loads and results after the step, when tokens are sampled."""
    nodes = [
        describe("v2-p", ranks, kvpp=COMPACT, kv=kv("kv_producer"), args=args, env=with_v2()),
        describe("v2-d", 2, kvpp=COMPACT, kv=kv("kv_consumer"), env=with_v2()),
    ]
    with run_servers(*nodes) as clients:
        answers = [
            decode(clients["v2-d"], prompt, prefill(clients["v2-p"], prompt)) for prompt in prompts
        ]
        assert answers == plain_tokens
        pulled, failures = count(clients["v2-d"], "pull_tokens", "pull_failures")
    assert (pulled > 0, failures) == (True, 0)
