"""Compact numbering against plain paging: in any batch a layer addresses the same rows."""

import pytest
import torch
from builders import bundle_stage, equal_stage
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpp_connect.broadcast.active import ActiveBlocks
from kvpp_connect.broadcast.payload import CompactPayload
from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import RunningScratch, place_rank, plan_group

BLOCKS = 24
BLOCK_TOKENS = 4


@st.composite
def batches(draw):
    """Requests as (block ids, tokens); prefixes are shared, later blocks are a request's own."""
    ids = draw(st.permutations(range(1, BLOCKS)))
    prefix = ids[: draw(st.integers(0, 4))]
    free = list(ids[len(prefix) :])
    requests = []
    for _ in range(draw(st.integers(1, 5))):
        shared = list(prefix[: draw(st.integers(0, len(prefix)))])
        own = [free.pop() for _ in range(draw(st.integers(0 if shared else 1, 3)))]
        blocks = shared + own
        tokens = draw(st.integers((len(blocks) - 1) * BLOCK_TOKENS + 1, len(blocks) * BLOCK_TOKENS))
        requests.append((blocks, tokens))
    return requests


def as_table(requests, stale):
    """vLLM's block table: rows of one width with stale ids behind the used part."""
    table = torch.full((len(requests), 10), stale, dtype=torch.int32)
    for row, (blocks, _) in enumerate(requests):
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    return table


@settings(deadline=None)
@given(requests=batches(), stale=st.sampled_from([0, 7, BLOCKS - 1, 10**6, -1]))
def test_renumbered_tables_and_slots_address_the_same_rows(requests, stale):
    table = as_table(requests, stale)
    used = torch.tensor([len(blocks) for blocks, _ in requests])
    active = ActiveBlocks(table, used, BLOCKS)
    assert active.ids.tolist() == sorted({b for blocks, _ in requests for b in blocks})

    cache = torch.arange(BLOCKS * BLOCK_TOKENS).view(BLOCKS, BLOCK_TOKENS)
    compact = cache[active.ids]
    renumbered = active.renumber_table(table)
    assert renumbered.dtype == table.dtype
    assert renumbered.shape == table.shape
    assert ((renumbered >= 0) & (renumbered < max(len(active), 1))).all()
    for row, (blocks, _) in enumerate(requests):
        positions = renumbered[row, : len(blocks)].long()
        assert torch.equal(compact[positions], cache[torch.tensor(blocks)])

    slots = torch.tensor(
        [blocks[-1] * BLOCK_TOKENS + (tokens - 1) % BLOCK_TOKENS for blocks, tokens in requests]
        + [-1]
    )
    moved = active.renumber_slots(slots, BLOCK_TOKENS)
    assert moved[-1] == -1
    assert torch.equal(compact.flatten()[moved[:-1]], cache.flatten()[slots[:-1]])


def compact_rank(rank, stage=None, scratch_blocks=6, num_blocks=BLOCKS):
    scratch = RunningScratch(least=scratch_blocks, most=scratch_blocks)
    placement = place_rank(plan_group(stage or equal_stage(4, 8), 2, 1, scratch), rank, num_blocks)
    memory = torch.zeros(placement.total_bytes, dtype=torch.uint8)
    return CompactPayload(placement, memory), placement, memory


def active_blocks(*ids):
    return ActiveBlocks(torch.tensor([ids]), torch.tensor([len(ids)]), BLOCKS)


def test_the_owner_sends_exactly_the_active_blocks_out_of_its_own_slot():
    payload, placement, memory = compact_rank(0)
    bundle = placement.bundles[0]
    blocks = memory[bundle.offset : bundle.offset + bundle.size].view(BLOCKS, 8)
    blocks[:] = torch.arange(BLOCKS, dtype=torch.uint8).unsqueeze(1)
    payload.use(active_blocks(9, 2, 17))
    (piece,) = payload.pieces(0)
    sent = piece.data
    piece.gather.into(sent)
    assert sent.view(3, 8)[:, 0].tolist() == [2, 9, 17]
    assert sent.data_ptr() - memory.data_ptr() == bundle.slot_offset
    assert blocks[:, 0].tolist() == list(range(BLOCKS))


def test_the_others_receive_into_the_place_where_the_layer_looks():
    payload, placement, memory = compact_rank(1)
    payload.use(active_blocks(9, 2, 17))
    (piece,) = payload.pieces(0)
    received = piece.data
    assert piece.gather is None
    assert received.numel() == 3 * 8
    place = placement.by_layer_name["model.layers.0.self_attn.c0"]
    assert received.data_ptr() - memory.data_ptr() == place.offset


def test_more_active_blocks_than_scratch_holds_are_refused_with_both_numbers():
    payload, _, _ = compact_rank(0, scratch_blocks=2)
    with pytest.raises(LayoutError, match="uses 3 blocks, scratch holds 2"):
        payload.use(active_blocks(1, 2, 3))


def test_two_components_travel_as_one_range_and_arrive_where_the_layer_looks():
    stage = bundle_stage([[8, 3], [8, 3]])
    sender, there, source = compact_rank(0, stage)
    receiver, here, memory = compact_rank(1, stage)
    for place, sign in zip(there.bundles[0].components, (1, 100), strict=True):
        pages = source[place.offset : place.offset + place.size].view(BLOCKS, -1)
        pages[:] = (torch.arange(BLOCKS, dtype=torch.uint8) + sign).unsqueeze(1)
    active = active_blocks(9, 2, 17)
    sender.use(active)
    receiver.use(active)
    (piece,) = sender.pieces(0)
    sent = piece.data
    piece.gather.into(sent)
    assert sent.numel() == 3 * (8 + 3)
    receiver.pieces(0)[0].data.copy_(sent)
    for name, sign in (("c0", 1), ("c1", 100)):
        place = here.by_layer_name[f"model.layers.0.self_attn.{name}"]
        blocks = memory[place.offset : place.offset + place.size].view(place.num_blocks, -1)
        first = place.first_block(3)
        rows = active.renumber_table(torch.tensor([[17, 9, 2]]), first)[0]
        assert blocks[rows.long()].unique(dim=1).flatten().tolist() == [
            17 + sign,
            9 + sign,
            2 + sign,
        ]
