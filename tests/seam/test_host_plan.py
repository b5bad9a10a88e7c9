"""Ownership out of a host's own plan, in the shape of the one on vllm-ascend's main branch."""

import sys
import types
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch

from kvpp_connect.connectors.caches import BlockShape, describe_caches
from kvpp_connect.errors import LayoutError, SeamError
from kvpp_connect.seam import host_plan
from kvpp_connect.seam.groups import GroupInfo
from kvpp_connect.seam.host_plan import placement_for, placement_of_plan

BLOCKS = 3
LATENT, ROPE, INDEX = 64, 16, 32  # bytes per block


@dataclass(frozen=True)
class Plan:
    """The fields of the host's plan that are read here."""

    layer_owner_ranks: dict
    layer_bundles: dict
    tensor_sizes: dict
    kvpp_rank: int
    logical_cache_spec: dict = field(default_factory=dict)


def main(index):
    return f"model.layers.{index}.self_attn.attn"


def indexer(index):
    return f"model.layers.{index}.self_attn.indexer.k_cache"


def make_plan(rank=0, owners=(0, 0, 1), drafts=1):
    """Layers 0 and 2 have indexers; drafts come behind the targets."""
    bundles = {main(i): (main(i), indexer(i)) if i != 1 else (main(i),) for i in range(len(owners))}
    by_name = {name: owners[i] for i, names in enumerate(bundles.values()) for name in names}
    for i in range(len(owners), len(owners) + drafts):
        bundles[main(i)] = (main(i),)
    sizes = {
        name: (INDEX,) if name.endswith("k_cache") else (LATENT, ROPE)
        for names in bundles.values()
        for name in names
    }
    return Plan(by_name, bundles, sizes, rank)


def allocate(plan, blocks=BLOCKS):
    """Caches like the host's: a buffer for each bundle that the rank holds, two for all others."""
    largest = max(sum(sum(plan.tensor_sizes[n]) for n in b) for b in plan.layer_bundles.values())
    scratch = [torch.zeros(largest * blocks, dtype=torch.int8) for _ in range(2)]
    caches, ordinal = {}, 0
    for first, names in plan.layer_bundles.items():
        owner = plan.layer_owner_ranks.get(first)
        held = owner in (None, plan.kvpp_rank)
        buffer = torch.zeros(largest * blocks, dtype=torch.int8) if held else scratch[ordinal % 2]
        cursor = 0
        for name in names:
            for number, page in enumerate(plan.tensor_sizes[name]):
                part = buffer[cursor : cursor + page * blocks].view(blocks, page)
                caches[f"{name}/{number}" if number else name] = part
                cursor += page * blocks
        ordinal += owner is not None
    return caches


def group(rank=0, size=2):
    return GroupInfo(pp_rank=0, rank_in_group=rank, group_size=size)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_holds_the_layers_that_the_plan_gives_to_it_and_all_drafts(rank):
    plan = make_plan(rank)
    caches = allocate(plan)
    placement = placement_of_plan(plan, group(rank), BLOCKS, caches)
    assert placement.layout.owners == (0, 0, 1)
    held = {0: (main(0), main(1), indexer(0)), 1: (main(2), indexer(2))}[rank]
    expected = {*held, main(3)}
    expected |= {f"{name}/1" for name in expected if name.endswith("attn")}
    assert placement.persistent_layers == expected
    shape = BlockShape(num_blocks=BLOCKS, block_tokens=1)
    described = describe_caches(caches, shape, placement)
    assert {c.layer_name for c in described} == expected
    assert all(c.address == caches[c.layer_name].data_ptr() for c in described)


def test_owners_are_taken_as_they_are_and_not_balanced_anew():
    plan = make_plan(0, owners=(1, 0, 0))
    assert placement_of_plan(plan, group(), BLOCKS, allocate(plan)).layout.owners == (1, 0, 0)


def test_a_layer_that_another_rank_owns_must_lie_in_scratch():
    """Owners shifted by one rank, over the caches of the right plan."""
    right = make_plan(0, owners=(0, 0, 0, 1, 1, 1), drafts=0)
    shifted = {name: 1 - owner for name, owner in right.layer_owner_ranks.items()}
    caches = allocate(right)
    with pytest.raises(LayoutError, match=r"not scratch|share memory"):
        placement_of_plan(replace(right, layer_owner_ranks=shifted), group(), BLOCKS, caches)


def test_a_held_layer_may_not_share_memory():
    plan = make_plan(0, owners=(1, 0, 1, 1))
    caches = allocate(plan)
    caches |= {main(1): caches[main(0)], main(1) + "/1": caches[main(0) + "/1"]}
    with pytest.raises(LayoutError, match="share memory"):
        placement_of_plan(plan, group(), BLOCKS, caches)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kvpp_rank": 1}, "plan is that of rank 1, this is rank 0"),
        ({"tensor_sizes": {**make_plan().tensor_sizes, main(0): (LATENT, 2 * ROPE)}}, "attn/1 has"),
        ({"tensor_sizes": {**make_plan().tensor_sizes, main(0): (LATENT,)}}, "differ in .*attn/1"),
        (
            {"layer_owner_ranks": {**make_plan().layer_owner_ranks, indexer(0): 1}},
            "to ranks {0, 1}",
        ),
        ({"layer_owner_ranks": {**make_plan().layer_owner_ranks, main(1): 7}}, "outside a group"),
    ],
)
def test_a_plan_that_does_not_describe_the_caches_is_refused_by_name(change, message):
    plan = make_plan()
    with pytest.raises(LayoutError, match=message):
        placement_of_plan(replace(plan, **change), group(), BLOCKS, allocate(plan))


def test_sizes_of_an_unknown_kind_are_refused():
    plan = make_plan()
    odd = {**plan.tensor_sizes, main(0): (SimpleNamespace(size_per_block=64), 16)}
    with pytest.raises(SeamError, match="no plain sizes"):
        placement_of_plan(replace(plan, tensor_sizes=odd), group(), BLOCKS, allocate(plan))


def test_connectors_get_the_hosts_plan_where_ours_is_not_running(monkeypatch):
    monkeypatch.setattr(host_plan, "group_info", group)
    monkeypatch.setattr(host_plan, "check_same_plan", lambda layout, group: None)
    plan = make_plan()
    on = SimpleNamespace(additional_config={"enable_kvpp": True})
    cache_config = SimpleNamespace(num_blocks=BLOCKS, kvpp_plan=plan)
    found = placement_for(on, cache_config, allocate(plan))
    assert found.layout.owners == (0, 0, 1)


@pytest.fixture
def planner(monkeypatch):
    """A host that keeps its plan in the worker, in the shape of the releases 0.28 to 0.30."""
    calls = []

    def get_kvpp_cache_specs(kv_cache_config):
        return {"specs of": kv_cache_config}

    def create_kvpp_cache_allocation_plan(vllm_config, worker_spec, kvpp_rank):
        calls.append((vllm_config, worker_spec))
        return make_plan(kvpp_rank)

    modules = {
        "vllm_ascend.worker.kvpp_cache": get_kvpp_cache_specs,
        "vllm_ascend.core.kv_cache_placement": create_kvpp_cache_allocation_plan,
    }
    for name in ("vllm_ascend", "vllm_ascend.worker", "vllm_ascend.core", *modules):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, function in modules.items():
        setattr(sys.modules[name], function.__name__, function)
    return calls


def test_a_host_that_keeps_its_plan_in_the_worker_is_asked_for_it(monkeypatch, planner):
    monkeypatch.setattr(host_plan, "group_info", lambda: group(1))
    monkeypatch.setattr(host_plan, "check_same_plan", lambda layout, group: None)
    on = SimpleNamespace(additional_config={"enable_kvpp": True})
    cache_config = SimpleNamespace(num_blocks=BLOCKS)
    found = placement_for(on, cache_config, allocate(make_plan(1)))
    assert main(2) in found.persistent_layers
    assert main(0) not in found.persistent_layers
    assert planner == [(on, {"specs of": cache_config})]


def test_a_host_whose_planner_looks_different_is_refused_by_name(monkeypatch, planner):
    monkeypatch.setattr(host_plan, "group_info", group)
    monkeypatch.setattr(
        sys.modules["vllm_ascend.core.kv_cache_placement"],
        "create_kvpp_cache_allocation_plan",
        lambda vllm_config, kvpp_rank: make_plan(),
    )
    on = SimpleNamespace(additional_config={"enable_kvpp": True})
    with pytest.raises(SeamError, match=r"create_kvpp_cache_allocation_plan takes .*'kvpp_rank'"):
        placement_for(on, SimpleNamespace(num_blocks=BLOCKS), allocate(make_plan()))
    assert planner == []


def test_without_kvpp_there_is_no_placement():
    off = SimpleNamespace(additional_config={})
    assert placement_for(off, SimpleNamespace(num_blocks=BLOCKS), {}) is None


@pytest.mark.parametrize("extra", [{}, {"kvpp_plan": SimpleNamespace(layer_bundles={})}])
def test_kvpp_without_a_readable_plan_is_refused_and_never_read_as_every_rank_holds_all(
    monkeypatch, extra
):
    monkeypatch.setattr(host_plan, "group_info", group)
    on = SimpleNamespace(additional_config={"enable_kvpp": True})
    with pytest.raises(
        SeamError, match=r"no plan that tells the layers' owners: (it has no|vllm_ascend)"
    ):
        placement_for(on, SimpleNamespace(num_blocks=BLOCKS, **extra), {})
