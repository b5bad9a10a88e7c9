"""KVPP beside the other kinds of parallelism, each with the tokens of plain vLLM.

One model with experts and a multi-token prediction (MTP) draft serves all; the reference is one
rank of plain vLLM without speculation, whose greedy tokens every combination has to give.
"""

import json
import random
from dataclasses import dataclass, replace

import pytest
from e2e_tools import continue_all, wait_for
from forecast_tools import forecast

from kvpp_connect.demo.logs import kv_cache_size, read_log
from kvpp_connect.demo.model import ModelSpec, write_checkpoint
from kvpp_connect.errors import PeerError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LAYERS = 6
LONG = 100  # tokens
RUNNING_TOKENS = 70 * 16


def speculation(tokens):
    # The proposer chooses a backend of its own: where the CPU has AMX, one without float32.
    config = {
        "method": "mtp",
        "num_speculative_tokens": tokens,
        "attention_backend": "CPU_MLA",
    }
    return ("--speculative-config", json.dumps(config))


@dataclass(frozen=True)
class Combination:
    ranks: int
    mode: str
    args: tuple[str, ...] = ()
    compiled: bool = False
    drafts: bool = False
    stages: int = 1

    @property
    def memory(self) -> int:
        """Bytes of KV cache per rank; in full mode they hold 70 blocks."""
        owned = -(-LAYERS // (self.stages * self.ranks))
        pages = owned + 2 + self.drafts
        return 60_000_000 if self.mode == "compact" else 70 * pages * 16 * 576 * 4


PP2 = ("--pipeline-parallel-size", "2")
# Pipelines are compiled: with --enforce-eager vLLM 0.32 skips, on CPUs, the run that makes the
# tensors that stages hand on.
COMBINATIONS = {
    "tp4": Combination(4, "compact"),
    "tp4-full": Combination(4, "full"),
    "tp2-mtp1": Combination(2, "compact", speculation(1), drafts=True),
    "tp2-mtp2-full": Combination(2, "full", speculation(2), drafts=True),
    "tp2-pp2": Combination(2, "compact", PP2, compiled=True, stages=2),
    "tp2-pp2-full": Combination(2, "full", PP2, compiled=True, stages=2),
}


@pytest.fixture(scope="module")
def expert_model(tmp_path_factory):
    spec = ModelSpec(layers=LAYERS, dense_layers=3, mtp_layers=1)
    return write_checkpoint(tmp_path_factory.mktemp("model") / "experts", spec)


@pytest.fixture(scope="module")
def others():
    """Prompts of 250 tokens without a common prefix."""
    rng = random.Random(1)
    return [[rng.randrange(5, 500) for _ in range(250)] for _ in range(6)]


@pytest.fixture(scope="module")
def expected(describe, run_servers, expert_model, prompts, others):
    """What plain vLLM answers: to the prompts, and at length to the other ones."""
    with run_servers(describe("plain-experts", model=expert_model)) as clients:
        client = clients["plain-experts"]
        short = continue_all(client, prompts)
        long = client.complete_all(others, max_tokens=LONG, concurrency=4)
        return short, [answer.token_ids for answer in long]


# Plain vLLM 0.32 on CPU, TP=2 with --enable-expert-parallel and this model, without KVPP: after two
# right tokens all logits are NaN and every further token is 0.
EXPERT_PARALLEL = pytest.param(
    "tp2-ep", marks=pytest.mark.skip("plain vLLM answers NaN with expert parallelism on CPU")
)


@pytest.fixture(scope="module", params=[*COMBINATIONS, EXPERT_PARALLEL])
def combination(request):
    return request.param


@pytest.fixture(scope="module")
def servers(describe, run_servers, expert_model, combination):
    """70 blocks for running requests: four of the long answers do not fit together."""
    chosen = COMBINATIONS[combination]
    options = {"mode": chosen.mode}
    if chosen.mode == "compact":
        options["running_tokens"] = RUNNING_TOKENS
    return run_servers(
        describe(
            combination,
            chosen.ranks,
            kvpp=options,
            args=chosen.args,
            compiled=chosen.compiled,
            model=expert_model,
            cache_bytes=chosen.memory,
        )
    )


@pytest.fixture(scope="module")
def client(servers, combination):
    with servers as clients:
        yield clients[combination]


def test_chunked_prefill_and_prefix_hits_give_the_tokens_of_plain_vllm(client, prompts, expected):
    assert continue_all(client, prompts) == expected[0]
    hits = "vllm:prefix_cache_hits_total"
    before = client.counters([hits])[hits]
    assert continue_all(client, prompts, concurrency=1) == expected[0]
    assert client.counters([hits])[hits] - before >= 200 * len(prompts)


def test_long_answers_with_preemption_give_the_tokens_of_plain_vllm(client, others, expected):
    preemptions = "vllm:num_preemptions_total"
    before = client.counters([preemptions])[preemptions]
    answers = client.complete_all(others, max_tokens=LONG, concurrency=6)
    assert [answer.token_ids for answer in answers] == expected[1]
    assert client.counters([preemptions])[preemptions] > before


def test_an_abort_in_the_middle_leaves_the_others_right(client, prompts, others, expected):
    hasty = replace(client, timeout_s=1.0)
    with pytest.raises(PeerError, match="did not answer within 1 s"):
        hasty.complete(others[0], max_tokens=700)
    assert continue_all(client, prompts) == expected[0]
    running = "vllm:num_requests_running"
    wait_for(lambda: client.counters([running])[running] == 0)


def test_the_cache_holds_as_many_tokens_as_kvpp_plan_says(
    client, servers, expert_model, combination
):
    chosen = COMBINATIONS[combination]
    flags = ["--pp", chosen.stages, "--mtp", int(chosen.drafts)]
    if chosen.mode == "compact":
        flags += ["--running-tokens", RUNNING_TOKENS]
    planned = forecast(expert_model, chosen.mode, chosen.memory, *flags, ranks=chosen.ranks)
    assert kv_cache_size(read_log(servers.logs[combination])).tokens == planned["tokens"]


def test_drafts_are_cached_on_every_rank(client, servers, combination):
    drafts = COMBINATIONS[combination].drafts
    drafted = "vllm:spec_decode_num_draft_tokens_total"
    assert (client.counters([drafted]).get(drafted, 0) > 0) is drafts
    assert f"{int(drafts)} draft cache(s) on each" in read_log(servers.logs[combination])
