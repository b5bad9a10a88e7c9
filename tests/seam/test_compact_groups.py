"""Compact mode in both model runners, with vLLM's own attention groups and block zeroers."""

from types import MethodType, SimpleNamespace

import pytest
from builders import bundle_stage

pytest.importorskip("vllm")

import numpy as np
import torch
from vllm.v1.attention.backends.mla.index_group import SparseMLAIndexGroup
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.worker.gpu import model_runner as runner_v2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from kvpp_connect.broadcast.payload import CompactPayload
from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import RunningScratch, place_rank, plan_group
from kvpp_connect.seam.compact_v1 import CompactForwardV1
from kvpp_connect.seam.compact_v2 import CompactForwardV2

BLOCK_TOKENS, NUM_BLOCKS, SCRATCH_BLOCKS = 4, 20, 6


class Builder:
    """Metadata is the block table and the slots that it was built from."""

    requires_block_table_width = False

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.supports_update_block_table = True
        self.chunked_prefill_workspace = object()

    def build(self, common_prefix_len, common):
        return common.block_table_tensor.tolist(), common.slot_mapping.tolist()


class Backend:
    @staticmethod
    def get_builder_cls():
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(spec):
        return [BLOCK_TOKENS]

    @staticmethod
    def get_name():
        return "FAKE"


def spec(token_bytes):
    return MLAAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=token_bytes, dtype=torch.uint8
    )


class Engine:
    armed_with = None

    def arm(self, *, start=True):
        self.armed_with = "armed"


def name(layer, part):
    return f"model.layers.{layer}.self_attn.c{part}"


BLOCKS = [[3, 7, 999], [13, 0, 0]]
TOKENS = [6, 2]
MANY = torch.arange(1, 19).view(2, 9).tolist()


class RunnerV1:
    """What compact mode touches of model runner V1, in a step of two requests."""

    compact_class = CompactForwardV1
    methods = ("_init_kv_zero_meta", "_kv_cache_spec_attn_group_iterator")

    def __init__(self, slots):
        self._kernel_block_sizes = [BLOCK_TOKENS]
        self.runner_only_attn_layers = set()
        self._get_slot_mappings = lambda: (None, dict(slots))
        for method in self.methods:
            setattr(self, method, MethodType(getattr(GPUModelRunner, method), self))

    def step(self, blocks=BLOCKS, tokens=TOKENS):
        """Slots by layer, as the runner hands them on."""
        table = SimpleNamespace(get_cpu_tensor=lambda: torch.tensor(blocks))
        self.input_batch = SimpleNamespace(num_reqs=2, block_table=[table])
        self.optimistic_seq_lens_cpu = torch.tensor([*tokens, 77])
        return self._get_slot_mappings()[1]

    @property
    def zeroer(self):
        return self._kv_block_zeroer


class TablesV2:
    """Block tables of model runner V2, which are on the device only."""

    def __init__(self):
        self.block_tables = [SimpleNamespace(gpu=torch.zeros(4, 9))]

    def append_block_ids(self, req_index, new_block_ids, overwrite):
        assert len(new_block_ids) == 1, "one cache group"


class RunnerV2:
    """What compact mode touches of model runner V2; requests are in rows 2 and 0."""

    compact_class = CompactForwardV2

    def __init__(self, slots):
        self._slots = torch.stack([slots[name(0, 0)]])
        self.kernel_block_sizes = [BLOCK_TOKENS]
        self.block_tables = TablesV2()
        self.pcp_manager = None
        self.prepare_attn = lambda input_batch: "prepared"
        method = runner_v2.GPUModelRunner._init_kv_zero_meta  # noqa: SLF001 - vLLM's name
        self._init_kv_zero_meta = MethodType(method, self)

    def step(self, blocks=BLOCKS, tokens=TOKENS):
        """Slots by layer, as the runner hands them on."""
        for row, ids, used in zip((2, 0), blocks, tokens, strict=True):
            count = -(-used // BLOCK_TOKENS)
            self.block_tables.append_block_ids(row, ([*ids[:1]],), overwrite=True)
            self.block_tables.append_block_ids(row, ([*ids[1:count]],), overwrite=False)
        self.prepare(np.array([2, 0]), tokens)
        return self.slots_by_layer()

    def prepare(self, rows, tokens):
        batch = SimpleNamespace(
            num_reqs=len(rows),
            idx_mapping_np=rows,
            seq_lens_cpu_upper_bound=torch.tensor([*tokens, 0], dtype=torch.int32),
        )
        assert self.prepare_attn(batch) == "prepared"

    def slots_by_layer(self):
        return runner_v2.build_slot_mappings_by_layer(self._slots, self.kv_cache_config)

    @property
    def zeroer(self):
        return self.kv_block_zeroer


@pytest.fixture(params=[RunnerV1, RunnerV2])
def made(request, monkeypatch):
    """Rank 0 of 2 over four layers: owned 0 and 1; layers 0, 1 and 3 have an indexer."""
    function = "build_slot_mappings_by_layer"  # put back after the test
    monkeypatch.setattr(runner_v2, function, getattr(runner_v2, function))
    pages = [[32, 16], [32, 16], [32], [32, 16]]
    scratch = RunningScratch(least=SCRATCH_BLOCKS, most=SCRATCH_BLOCKS)
    layout = plan_group(bundle_stage(pages), 2, 64, scratch)
    assert layout.owners == (0, 0, 1, 1)
    placement = place_rank(layout, 0, NUM_BLOCKS)
    memory = torch.zeros(placement.total_bytes, dtype=torch.uint8)
    layers = {}
    for place in placement.components:
        cache = memory[place.offset : place.offset + place.size].view(place.num_blocks, 4, -1)
        layers[place.component.layer_name] = SimpleNamespace(kv_cache=cache)
    groups = [
        AttentionGroup(Backend, [name(i, 0) for i in range(4)], spec(8), 0),
        AttentionGroup(Backend, [name(i, 1) for i in (0, 1, 3)], spec(4), 0),
    ]
    for group in groups:
        group.create_metadata_builders(None, torch.device("cpu"), BLOCK_TOKENS)
    runner = request.param({n: torch.tensor([13, 52, -1]) for n in layers})
    runner.attn_groups = [groups]
    runner.device = torch.device("cpu")
    runner.vllm_config = None
    runner.compilation_config = SimpleNamespace(static_forward_context=layers)
    runner.kv_cache_config = SimpleNamespace(
        num_blocks=NUM_BLOCKS,
        needs_kv_cache_zeroing=True,
        kv_cache_groups=[
            SimpleNamespace(
                kv_cache_spec=SimpleNamespace(block_size=BLOCK_TOKENS), layer_names=[*layers]
            )
        ],
    )
    engine = Engine()
    forward = runner.compact_class(placement, CompactPayload(placement, memory), engine, runner)
    return SimpleNamespace(
        forward=forward, runner=runner, engine=engine, layers=layers, placement=placement
    )


def metadata_by_layer(runner):
    """What each layer would get from vLLM for a batch with the blocks 3, 7 and 13."""
    common = SimpleNamespace(
        block_table_tensor=torch.tensor([[3, 7, 999], [13, 0, 0]]),
        slot_mapping=torch.tensor([13, 52, -1]),
    )
    return {
        layer: group.build_metadata(common)
        for group in runner.attn_groups[0]
        for layer in group.layer_names
    }


def test_layers_are_grouped_by_how_their_blocks_are_numbered(made):
    assert [group.layer_names for group in made.runner.attn_groups[0]] == [
        [name(0, 0), name(1, 0)],
        [name(2, 0)],
        [name(3, 0)],
        [name(0, 1), name(1, 1)],
        [name(3, 1)],
    ]
    scratch = [made.runner.attn_groups[0][i] for i in (1, 2, 4)]
    assert not any(g.get_metadata_builder().supports_update_block_table for g in scratch)


def test_groups_that_were_split_go_on_sharing_the_workspace_that_vllm_has_measured(made):
    groups = made.runner.attn_groups[0]
    workspaces = [group.get_metadata_builder().chunked_prefill_workspace for group in groups]
    assert workspaces[0] is workspaces[1] is workspaces[2]
    assert workspaces[3] is workspaces[4] is not workspaces[0]


def test_each_layer_gets_the_numbers_of_the_place_where_its_cache_is(made):
    made.forward.open(history=True)
    slots = made.runner.step()
    assert made.engine.armed_with == "armed"
    found = metadata_by_layer(made.runner)
    # Slots 13 and 52 are token 1 of block 3 and token 0 of block 13. Three blocks of six are used:
    # from the front they are 0 to 2, from the back 3 to 5.
    owned = ([[3, 7, 999], [13, 0, 0]], [13, 52, -1])
    front = ([[0, 1, 0], [2, 0, 0]], [1, 8, -1])
    back = ([[3, 4, 3], [5, 3, 3]], [13, 20, -1])
    assert found == {
        **{name(i, part): owned for i in (0, 1) for part in (0, 1)},
        name(2, 0): front,
        name(3, 0): back,
        name(3, 1): front,
    }
    assert {layer: value.tolist() for layer, value in slots.items()} == {
        layer: metadata[1] for layer, metadata in found.items()
    }
    made.forward.close()
    assert set(map(str, metadata_by_layer(made.runner).values())) == {str(owned)}


def test_more_blocks_than_scratch_holds_are_refused(made):
    made.forward.open(history=True)
    with pytest.raises(LayoutError, match="uses 8 blocks, scratch holds 6"):
        made.runner.step(MANY, [16, 16])


def test_requests_that_vllm_makes_up_to_warm_up_stay_inside_scratch(made):
    with made.forward.warming_up():
        made.forward.open(history=True)
        made.runner.step(MANY, [16, 16])
        assert made.engine.armed_with == "armed"
        assert made.forward.active.ids.tolist() == [1, 2, 3, 4, 10, 11]
        table = made.forward.active.renumber_table(torch.tensor(MANY))
        assert table.max() < SCRATCH_BLOCKS
        made.forward.close()
    made.forward.open(history=True)
    with pytest.raises(LayoutError, match="uses 8 blocks, scratch holds 6"):
        made.runner.step(MANY, [16, 16])


def test_new_blocks_are_zeroed_in_owned_caches_only(made):
    addresses = made.runner.zeroer._meta[0].tolist()  # noqa: SLF001 - vLLM's name
    owned = [made.layers[name(i, part)].kv_cache.data_ptr() for i in (0, 1) for part in (0, 1)]
    assert sorted(addresses) == sorted(owned)


def test_layers_that_share_an_indexers_choice_translate_it_one_by_one(made):
    def group(layers):
        return SparseMLAIndexGroup(*([None] * 6), has_indexer=True, num_layers=layers)

    shared, alone = group(2), group(1)
    for layer, (index_group, index) in {
        1: (shared, 0),
        2: (shared, 1),
        3: (alone, 0),
    }.items():
        made.layers[name(layer, 0)].impl = SimpleNamespace(
            index_group=index_group, index_group_index=index
        )
    payload = CompactPayload(
        made.placement, torch.zeros(made.placement.total_bytes, dtype=torch.uint8)
    )
    type(made.forward)(made.placement, payload, made.engine, made.runner)
    first, second, third = (made.layers[name(i, 0)].impl for i in (1, 2, 3))
    assert first.index_group is not second.index_group
    for impl in (first, second):
        assert (impl.index_group_index, impl.index_group.num_layers) == (0, 1)
        assert impl.index_group.has_indexer is False
    assert third.index_group is alone


@pytest.mark.parametrize("made", [RunnerV2], indirect=True)
def test_a_request_that_takes_over_a_row_of_the_table_does_not_inherit_blocks(made):
    append = made.runner.block_tables.append_block_ids
    append(1, ([4, 5],), overwrite=True)
    append(1, ([6],), overwrite=False)
    append(1, ([8],), overwrite=True)
    append(1, ([9],), overwrite=False)
    made.forward.open(history=True)
    made.runner.prepare(np.array([1]), [8])
    assert made.forward.active.ids.tolist() == [8, 9]


@pytest.mark.parametrize("made", [RunnerV2], indirect=True)
def test_the_blocks_are_those_of_the_whole_batch_whatever_part_a_pcp_rank_works_on(made):
    append = made.runner.block_tables.append_block_ids
    append(2, ([3, 7],), overwrite=True)
    append(0, ([13],), overwrite=True)
    whole = SimpleNamespace(
        num_reqs=2, idx_mapping_np=np.array([2, 0]), seq_lens_cpu_upper_bound=torch.tensor([6, 2])
    )
    made.runner.pcp_manager = SimpleNamespace(global_batch=whole)
    made.forward.open(history=True)
    made.runner.prepare(np.array([0]), [1])
    assert made.forward.active.ids.tolist() == [3, 7, 13]


@pytest.mark.parametrize("made", [RunnerV2], indirect=True)
def test_dummy_runs_outside_of_steps_keep_their_numbers(made):
    made.runner.prepare(np.array([2, 0]), TOKENS)
    assert made.engine.armed_with is None
    assert {str(slots.tolist()) for slots in made.runner.slots_by_layer().values()} == {
        "[13, 52, -1]"
    }
