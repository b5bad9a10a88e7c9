"""Compact mode in a model runner with vLLM's own attention groups and block zeroer."""

from types import MethodType, SimpleNamespace

import pytest
from builders import bundle_stage

pytest.importorskip("vllm")

import torch
from vllm.v1.attention.backends.mla.index_group import SparseMLAIndexGroup
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from kvpp_connect.broadcast.payload import CompactPayload
from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import RunningScratch, place_rank, plan_group
from kvpp_connect.seam.compact import CompactForward

BLOCK_TOKENS, NUM_BLOCKS, SCRATCH_BLOCKS = 4, 20, 6


class Builder:
    """Metadata is the block table and the slots that it was built from."""

    requires_block_table_width = False

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.supports_update_block_table = True

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


@pytest.fixture
def made():
    """Rank 0 of 2 over four layers: owned 0 and 1; layers 0, 1 and 3 have an indexer."""
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
    slots = {n: torch.tensor([13, 52, -1]) for n in layers}
    runner = SimpleNamespace(
        attn_groups=[groups],
        device=torch.device("cpu"),
        vllm_config=None,
        _kernel_block_sizes=[BLOCK_TOKENS],
        runner_only_attn_layers=set(),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        kv_cache_config=SimpleNamespace(
            num_blocks=NUM_BLOCKS,
            needs_kv_cache_zeroing=True,
            kv_cache_groups=[
                SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK_TOKENS))
            ],
        ),
        input_batch=SimpleNamespace(
            num_reqs=2,
            block_table=[
                SimpleNamespace(get_cpu_tensor=lambda: torch.tensor([[3, 7, 999], [13, 0, 0]]))
            ],
        ),
        optimistic_seq_lens_cpu=torch.tensor([6, 2, 77]),
        _get_slot_mappings=lambda: ({0: slots[name(0, 0)]}, dict(slots)),
    )
    for method in ("_init_kv_zero_meta", "_kv_cache_spec_attn_group_iterator"):
        setattr(runner, method, MethodType(getattr(GPUModelRunner, method), runner))
    engine = Engine()
    forward = CompactForward(placement, CompactPayload(placement, memory), engine, runner)
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


def test_each_layer_gets_the_numbers_of_the_place_where_its_cache_is(made):
    made.forward.open(history=True)
    _, slots = made.runner._get_slot_mappings()  # noqa: SLF001 - vLLM's name
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
    made.runner.input_batch.block_table[0].get_cpu_tensor = lambda: torch.arange(1, 19).view(2, 9)
    made.runner.optimistic_seq_lens_cpu = torch.tensor([16, 16])
    made.forward.open(history=True)
    with pytest.raises(LayoutError, match="uses 8 blocks, scratch holds 6"):
        made.runner._get_slot_mappings()  # noqa: SLF001 - vLLM's name


def test_new_blocks_are_zeroed_in_owned_caches_only(made):
    addresses = made.runner._kv_block_zeroer._meta[0].tolist()  # noqa: SLF001 - vLLM's names
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
    made.runner._get_slot_mappings = lambda: (None, None)  # noqa: SLF001 - vLLM's name
    payload = CompactPayload(
        made.placement, torch.zeros(made.placement.total_bytes, dtype=torch.uint8)
    )
    CompactForward(made.placement, payload, made.engine, made.runner)
    first, second, third = (made.layers[name(i, 0)].impl for i in (1, 2, 3))
    assert first.index_group is not second.index_group
    for impl in (first, second):
        assert (impl.index_group_index, impl.index_group.num_layers) == (0, 1)
        assert impl.index_group.has_indexer is False
    assert third.index_group is alone
