"""Real objects from the plugin to the connector, two ranks over gloo."""

import itertools

import ascend_chain
import pytest

pytestmark = pytest.mark.distributed

LAYERS = 6
ALIGNMENT = 2 << 20
LATENT, ROPE, INDEX = (b * 128 * 2 for b in (512, 64, 128))  # bytes per block of 128 tokens
PAGES = {"mla": (LATENT, ROPE), "sfa": (LATENT, ROPE, INDEX)}


def main(index):
    return f"model.layers.{index}.self_attn.attn"


def indexer(index):
    return f"model.layers.{index}.self_attn.indexer.k_cache"


def names(kind, index):
    return [main(index), main(index) + "/1"] + ([indexer(index)] if kind == "sfa" else [])


def aligned(value):
    return -(-value // ALIGNMENT) * ALIGNMENT


@pytest.fixture(scope="module", params=["mla", "sfa"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(kind, run_ranks):
    """Two ranks of a prefill node."""
    return run_ranks(ascend_chain.described_rank, kind, role="kv_producer")


def parts(rank):
    """Cache tensors by the names under which they are planned."""
    return {
        f"{name}/{number}" if number else name: tensor
        for name, tensors in rank["caches"].items()
        for number, tensor in enumerate(tensors)
    }


def test_without_kvpp_the_chain_is_vllm_ascends_own(kind, run_ranks):
    (plain,) = run_ranks(ascend_chain.described_rank, kind, 1, kvpp=False)
    assert (plain["worker"], plain["runner"]) == ("NPUWorker", "NPUModelRunner")
    assert len({t["allocation"] for t in parts(plain).values()}) == LAYERS * len(PAGES[kind])
    assert {t["allocated"] for t in parts(plain).values()} == {
        page * plain["num_blocks"] for page in PAGES[kind]
    }


def test_the_plugin_puts_its_worker_in_place_and_keeps_what_the_platform_chose(ranks):
    for rank in ranks:
        assert (rank["worker"], rank["runner"]) == ("KvppNPUWorker", "NPUModelRunner")
        assert rank["all2all"] == "flashinfer_all2allv"


def test_ranks_agree_on_owners_and_hold_whole_layers(kind, ranks):
    for number, rank in enumerate(ranks):
        assert rank["owners"] == (0, 0, 0, 1, 1, 1)
        held = [n for i in range(LAYERS) if i // 3 == number for n in names(kind, i)]
        assert rank["persistent"] == sorted(held)


def test_the_budget_is_what_is_allocated(kind, ranks):
    """One block more would not fit, alignment and the move of the base included."""
    for rank in ranks:
        blocks = rank["num_blocks"]
        assert rank["reported_bytes"] == blocks * rank["planner_block_bytes"]
        bundle = sum(aligned(page * blocks) for page in PAGES[kind])
        assert rank["total_bytes"] == (2 + LAYERS // 2) * bundle
        (allocated,) = {t["allocated"] for t in parts(rank).values()}
        assert allocated == rank["total_bytes"] + ALIGNMENT <= ascend_chain.MEMORY_BYTES
        more = sum(aligned(page * (blocks + 1)) for page in PAGES[kind])
        assert (2 + LAYERS // 2) * more + ALIGNMENT > ascend_chain.MEMORY_BYTES


def test_every_tensor_begins_at_two_mebibytes_and_holds_all_blocks(kind, ranks):
    for rank in ranks:
        for name, tensor in parts(rank).items():
            assert tensor["address"] % ALIGNMENT == 0, name
            assert tensor["shape"][:3] == (rank["num_blocks"], 128, 1), name
        for index in range(LAYERS):
            sizes = [parts(rank)[n]["nbytes"] for n in names(kind, index)]
            assert sizes == [page * rank["num_blocks"] for page in PAGES[kind]]


def test_layers_of_other_ranks_share_two_slots_and_held_ones_share_nothing(kind, ranks):
    for rank in ranks:
        found = parts(rank)
        strangers = [i for i in range(LAYERS) if main(i) not in rank["persistent"]]
        for index in strangers:
            twin = next(i for i in strangers if i % 2 == index % 2)
            for mine, its in zip(names(kind, index), names(kind, twin), strict=True):
                assert found[mine]["address"] == found[its]["address"]
        spans = sorted({(t["address"], t["address"] + t["nbytes"]) for t in found.values()})
        assert len(spans) == (3 + 2) * len(PAGES[kind])
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))


def test_the_connector_publishes_what_a_rank_holds_and_never_scratch(kind, ranks):
    for number, rank in enumerate(ranks):
        assert len(rank["manifest"]) == len(ranks)  # the whole group's, whichever rank tells
        published = {name: rest for name, *rest in rank["manifest"][number]}
        assert sorted(published) == rank["persistent"]
        for name, (address, page_bytes, token_bytes) in published.items():
            assert address == parts(rank)[name]["address"]
            assert page_bytes == 128 * token_bytes


def test_one_aligned_range_is_registered_and_it_has_all_held_tensors_in_it(ranks):
    for rank in ranks:
        ((first, length),) = rank["registered"]
        assert first % ALIGNMENT == 0
        for name in rank["persistent"]:
            tensor = parts(rank)[name]
            assert first <= tensor["address"]
            assert tensor["address"] + tensor["nbytes"] <= first + length
        (allocation,) = {(t["allocation"], t["allocated"]) for t in parts(rank).values()}
        assert allocation[0] <= first
        assert first + length <= sum(allocation)


def test_the_proposers_caches_are_on_every_rank_its_indexers_among_them(kind, run_ranks):
    """Layers 0 to 3 are the model's, layer 4 drafts."""
    for rank in run_ranks(ascend_chain.described_rank, kind, layers=4, drafts=1):
        drafts = [n for n in parts(rank) if n.startswith("model.layers.4.")]
        assert len(drafts) == len(PAGES[kind])
        assert sorted(rank["drafts"]) == sorted(drafts)
        assert set(drafts) <= set(rank["persistent"])
        assert rank["owners"] == (0, 0, 1, 1)
