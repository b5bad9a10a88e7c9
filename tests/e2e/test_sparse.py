"""Sparse MLA (DeepSeek-V3.2 shape) on real vLLM servers: main caches and index keys under KVPP.

Some layers have an indexer and some do not. The attention and the indexer's kernels are those of
the test equipment; the model, the indexer op and the cache specs are vLLM's.
"""

import random
from dataclasses import replace

import pytest
from builders import bundle_stage
from e2e_tools import continue_all, wait_for
from forecast_tools import forecast
from sparse_model import INDEX_DIM, INDEX_TOPK, PATTERN, write_sparse_checkpoint

from kvpp_connect.demo.logs import kv_cache_size, read_log
from kvpp_connect.errors import PeerError
from kvpp_connect.layout import capacity_by_bytes, plan_group, running_scratch
from kvpp_connect.layout.budget import fitting_blocks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BLOCK_TOKENS = 64
MEMORY = 60_000_000
MAIN_PAGE, INDEX_PAGE = BLOCK_TOKENS * 576 * 4, BLOCK_TOKENS * (INDEX_DIM + 4)
LONG = 130  # tokens
# For running requests on the tiny servers: one of 1,024 tokens, and not four with long answers.
TINY_BLOCKS = 17
# Name of the server: KVPP's options, switches of the equipment. The one called compact is compiled.
SERVERS = {
    "plain": (None, ()),
    "full": ({"mode": "full"}, ("late",)),
    "compact": ({"mode": "compact"}, ("async",)),
    "silent": ({"mode": "full"}, ("no_broadcast",)),
    "keyless": ({"mode": "compact"}, ("no_index_keys",)),
    "tiny-full": ({"mode": "full"}, ()),
    "tiny-compact": ({"mode": "compact", "running_tokens": TINY_BLOCKS * BLOCK_TOKENS}, ()),
}
MODES = pytest.mark.parametrize("mode", ["full", "compact"])


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory):
    return write_sparse_checkpoint(tmp_path_factory.mktemp("model") / "sparse")


@pytest.fixture(scope="module")
def servers(describe, run_servers, sparse_model):
    block_zero = 1  # vLLM's own, which holds no tokens
    tiny_bytes = max(sparse_layout().rank_bytes(rank, TINY_BLOCKS + block_zero) for rank in (0, 1))

    def server(name):
        kvpp, switches = SERVERS[name]
        return describe(
            f"sparse-{name}",
            2,
            kvpp=kvpp,
            switches=("sparse", *switches),
            args=("--tokenizer-mode", "hf"),
            cache_bytes=tiny_bytes if name == "tiny-full" else MEMORY,
            compiled=name == "compact",
            model=sparse_model,
        )

    return run_servers(*map(server, SERVERS))


@pytest.fixture(scope="module")
def clients(servers):
    with servers as running:
        yield {name: running[f"sparse-{name}"] for name in SERVERS}


@pytest.fixture(scope="module")
def expected(clients, prompts):
    """What plain vLLM on two ranks answers, one prompt after the other."""
    return continue_all(clients["plain"], prompts, concurrency=1)


def sparse_layout(scratch=None):
    stage = bundle_stage([[MAIN_PAGE, INDEX_PAGE] if k == "F" else [MAIN_PAGE] for k in PATTERN])
    return plan_group(stage, 2, 64, scratch)


def decode_side_by_side(client):
    """Long answers to prompts without a common prefix, in one batch."""
    rng = random.Random(2)
    prompts = [[rng.randrange(5, 500) for _ in range(n)] for n in (150, 260, 90, 201)]
    answers = client.complete_all(prompts, max_tokens=LONG, concurrency=4)
    return [answer.token_ids for answer in answers]


@pytest.fixture(scope="module")
def expected_long(clients):
    return decode_side_by_side(clients["plain"])


def test_the_answers_depend_on_the_whole_prompt(clients, prompts, expected):
    """Without this the other tests would prove nothing."""
    assert min(map(len, prompts)) > 4 * INDEX_TOPK
    changed = [[*prompt[:3], prompt[3] + 1, *prompt[4:]] for prompt in prompts]
    answers = continue_all(clients["plain"], changed)
    assert all(a != b for a, b in zip(answers, expected, strict=True))


@MODES
def test_chunked_prefill_gives_the_tokens_of_plain_vllm(clients, mode, prompts, expected):
    assert continue_all(clients[mode], prompts[:3], concurrency=1) == expected[:3]


@MODES
def test_prefix_hits_in_a_full_batch_give_the_tokens_of_plain_vllm(
    clients, mode, prompts, expected
):
    client, hits = clients[mode], "vllm:prefix_cache_hits_total"
    before = client.counters([hits])[hits]
    assert continue_all(client, prompts) == expected
    assert client.counters([hits])[hits] - before >= 4 * BLOCK_TOKENS * len(prompts)


@MODES
def test_long_decodes_side_by_side_give_the_tokens_of_plain_vllm(clients, mode, expected_long):
    assert decode_side_by_side(clients[mode]) == expected_long


@MODES
def test_preemption_for_want_of_blocks_gives_the_tokens_of_plain_vllm(clients, mode, expected_long):
    client, preemptions = clients[f"tiny-{mode}"], "vllm:num_preemptions_total"
    assert decode_side_by_side(client) == expected_long
    assert client.counters([preemptions])[preemptions] > 0


@MODES
def test_an_abort_in_the_middle_leaves_the_others_right(clients, mode, prompts, expected):
    client, running = clients[f"tiny-{mode}"], "vllm:num_requests_running"
    hasty = replace(client, timeout_s=1.0)
    with pytest.raises(PeerError, match="did not answer within 1 s"):
        hasty.complete(prompts[2], max_tokens=350)
    assert continue_all(client, prompts) == expected
    wait_for(lambda: client.counters([running])[running] == 0)


@MODES
def test_the_cache_holds_as_many_tokens_as_the_plan_says(clients, servers, sparse_model, mode):
    scratch = running_scratch(
        block_tokens=BLOCK_TOKENS, max_model_tokens=1024, max_requests=4, running_tokens=None
    )
    layout = sparse_layout(scratch if mode == "compact" else None)
    blocks = min(fitting_blocks(layout, rank, MEMORY) for rank in (0, 1))
    log = read_log(servers.logs[f"sparse-{mode}"])
    assert kv_cache_size(log).tokens == blocks * BLOCK_TOKENS
    planned = forecast(sparse_model, mode, MEMORY, "--block-size", BLOCK_TOKENS)
    assert planned["tokens"] == blocks * BLOCK_TOKENS
    plain = MEMORY // layout.stage.plain_page_bytes
    formula = capacity_by_bytes([layout], layout.scratch.blocks(blocks) / blocks)
    assert (
        f"{blocks} blocks fit where plain vLLM has {plain} "
        f"(x{blocks / plain:.2f}, formula x{formula:.2f})"
    ) in log
    assert ("KvppAsyncScheduler" in log) is (mode == "compact")


@pytest.mark.parametrize("control", ["silent", "keyless"])
def test_without_the_broadcast_or_without_its_index_keys_the_tokens_differ(
    clients, control, prompts, expected
):
    answers = continue_all(clients[control], prompts)
    assert all(a != b for a, b in zip(answers, expected, strict=True))
