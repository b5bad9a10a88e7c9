"""Compact mode: real requests of vLLM's scheduler through the real runner, two ranks over gloo."""

import itertools

import ascend_chain
import ascend_served
import pytest
from ascend_served import LAYERS, PROMPTS

pytestmark = pytest.mark.distributed

ALIGNMENT = 2 << 20
BLOCKS, RUNNING = 40, 10
LATENT, ROPE, INDEX = (b * 128 * 2 for b in (512, 64, 128))  # bytes per block of 128 tokens
PAGES = {"mla": (LATENT, ROPE), "sfa": (LATENT, ROPE, INDEX)}


def compact(running_tokens):
    return {
        "enable_kvpp": True,
        "kvpp": {"mode": "compact", "running_tokens": running_tokens},
    }


SERVING = {
    "num_gpu_blocks_override": BLOCKS,
    "max_num_batched_tokens": 256,
    "async_scheduling": False,
    "additional_config": compact(RUNNING * 128),
}


@pytest.fixture(scope="module", params=["mla", "sfa"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(kind, run_ranks):
    return run_ranks(ascend_served.served, kind, layers=LAYERS, **SERVING)


@pytest.fixture(scope="module")
def drafting(kind, run_ranks):
    return run_ranks(ascend_served.served, kind, layers=LAYERS, drafts=1, **SERVING)


@pytest.fixture(scope="module")
def prefilling(kind, run_ranks):
    """Ranks of a prefill node, whose block count is what fits."""
    options = {"role": "kv_producer", "additional_config": compact(16 * 128)}
    return run_ranks(ascend_chain.described_rank, kind, layers=6, **options)


def aligned(value):
    return -(-value // ALIGNMENT) * ALIGNMENT


def parts(rank):
    """Cache tensors by the names under which they are planned."""
    return {
        f"{name}/{number}" if number else name: tensor
        for name, tensors in rank["caches"].items()
        for number, tensor in enumerate(tensors)
    }


def test_every_request_finds_what_its_own_tokens_left_in_every_layer(kind, ranks):
    for rank in ranks:
        assert rank["wrong"] == []
        assert rank["finished"] == dict.fromkeys(
            map(str, range(len(PROMPTS))), ascend_served.OUTPUT_TOKENS
        )
        rows = sum(len(step["tokens"]) for step in rank["steps"])
        assert rank["reads"] == rows * LAYERS * len(PAGES[kind])


def test_batches_were_of_all_kinds(ranks):
    steps = [step["tokens"] for step in ranks[0]["steps"]]
    assert [step["tokens"] for step in ranks[1]["steps"]] == steps
    decodes = [set(step.values()) == {1} for step in steps if step]
    mixed = [1 in step.values() and max(step.values()) > 1 for step in steps if step]
    assert any(decodes)
    assert any(mixed)
    first = {name: tokens for step in reversed(steps) for name, tokens in step.items()}
    assert first["2"] == 1  # all but one token of its prompt is in the prefix cache
    assert first["3"] == 256 - sum(n for n in next(s for s in steps if "3" in s).values() if n == 1)


def test_requests_never_refer_to_more_blocks_than_scratch_holds_and_the_rest_is_prefix_cache(ranks):
    for rank in ranks:
        used = [step["blocks"] for step in rank["steps"] if "blocks" in step]
        assert max(map(len, used)) <= RUNNING  # without the guard it is one more
        assert max(itertools.chain(*used)) >= RUNNING  # numbers that scratch does not have
        assert len({*itertools.chain(*used)}) > RUNNING


def test_the_guard_stands_in_front_of_vllm_ascends_own_scheduler(ranks):
    names = ranks[0]["scheduler"]
    assert names[0] == "KvppScheduler"
    assert names.index("_GuardMixin") < names.index("BalanceScheduler")
    assert names.index("_GuardMixin") < names.index("KVDeliveryScheduler")


def test_exactly_the_active_blocks_are_broadcast_a_range_for_each_tensor(kind, ranks):
    for rank in ranks:
        sizes = [len(step["blocks"]) for step in rank["steps"] if step["history"]]
        assert rank["broadcasts"] == len(sizes) * LAYERS * len(PAGES[kind])
        assert rank["moved_bytes"] == sum(sizes) * LAYERS * sum(PAGES[kind])


def test_layers_in_scratch_are_bound_to_its_blocks_and_held_ones_to_all(ranks):
    for rank in ranks:
        for name, tensor in parts(rank).items():
            assert tensor["shape"][0] == (BLOCKS if name in rank["persistent"] else RUNNING)


def test_drafts_are_made_by_the_pools_numbers_and_verified_in_every_layer(kind, drafting):
    for rank in drafting:
        assert rank["wrong"] == []
        assert rank["proposed_from"]
        assert all(rank["proposed_from"])
        assert any(set(step["tokens"].values()) == {2} for step in rank["steps"])
        drafts = [name for name in parts(rank) if name.startswith(f"model.layers.{LAYERS}.")]
        assert len(drafts) == len(PAGES[kind])
        assert set(drafts) <= set(rank["persistent"])
        assert {parts(rank)[name]["shape"][0] for name in drafts} == {BLOCKS}


def test_the_budget_is_what_is_allocated_and_one_block_more_would_not_fit(kind, prefilling):
    slots = 2 * sum(aligned(page * 16) for page in PAGES[kind])
    for rank in prefilling:
        blocks = rank["num_blocks"]
        assert rank["total_bytes"] == slots + 3 * sum(aligned(p * blocks) for p in PAGES[kind])
        (allocated,) = {t["allocated"] for t in parts(rank).values()}
        assert allocated == rank["total_bytes"] + ALIGNMENT <= ascend_chain.MEMORY_BYTES
        more = 3 * sum(aligned(p * (blocks + 1)) for p in PAGES[kind])
        assert slots + more + ALIGNMENT > ascend_chain.MEMORY_BYTES


def test_every_tensor_begins_at_two_mebibytes_in_scratch_as_well(prefilling):
    for rank in prefilling:
        for name, tensor in parts(rank).items():
            assert tensor["address"] % ALIGNMENT == 0, name


def test_peers_are_told_of_held_layers_only(prefilling):
    for number, rank in enumerate(prefilling):
        published = {name: address for name, address, *_ in rank["manifest"][number]}
        assert sorted(published) == rank["persistent"]
        for name, address in published.items():
            assert address == parts(rank)[name]["address"]
