"""Attention reads the same bytes in full mode, in compact mode and without KVPP.

Real plans, payloads and engines of all ranks under made-up traffic; a token's bytes depend on
layer, component and everything before it, as in a model.
"""

import itertools
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from random import Random

import pytest
import torch
from builders import bundle_stage
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_traffic import BLOCK_TOKENS, Traffic

from kvpp_connect.broadcast.active import ActiveBlocks
from kvpp_connect.broadcast.engine import PrefetchEngine
from kvpp_connect.broadcast.payload import CompactPayload, FullPayload
from kvpp_connect.layout import RunningScratch, place_rank, plan_group
from kvpp_connect.platforms.cpu import CpuDevice

NUM_BLOCKS, RUNNING_BLOCKS, TABLE_WIDTH = 14, 8, 9
STALE = 10**6


@cache
def token_bytes(layer_name, tokens, count):
    """What the last of ``tokens`` leaves in a cache."""
    return torch.tensor(list(blake2b(f"{layer_name}{tokens}".encode(), digest_size=count).digest()))


class LockstepTransport:
    """Broadcasts between ranks of one process that run layer by layer in turn.

    The bytes move when the last rank has started, or as late as when one waits for them.
    """

    def __init__(self, group_size, seed):
        self._group_size = group_size
        self._random = Random(seed)
        self._started = {}
        self.moved_bytes = 0

    def of_rank(self, rank):
        return _RankTransport(self, rank, itertools.count())

    def start(self, number, rank, data, source_rank):
        ranks = self._started.setdefault(number, {})
        ranks[rank] = data
        assert len({part.numel() for part in ranks.values()}) == 1
        if len(ranks) == self._group_size and self._random.random() < 0.5:
            self.move(number, source_rank)

    def move(self, number, source_rank):
        ranks = self._started[number]
        source = ranks.pop(source_rank, None)
        if source is not None:
            assert len(ranks) == self._group_size - 1, "waited for before all had started"
            self.moved_bytes += source.numel()
            for target in ranks.values():
                target.copy_(source)


@dataclass
class _RankTransport:
    lockstep: LockstepTransport
    rank: int
    numbers: itertools.count

    def start(self, data, source_rank, gather=None):
        if gather is not None:
            gather.into(data)
        number = next(self.numbers)
        self.lockstep.start(number, self.rank, data, source_rank)
        return _Pending(self.lockstep, number, source_rank)


@dataclass
class _Pending:
    lockstep: LockstepTransport
    number: int
    source_rank: int

    def wait(self):
        self.lockstep.move(self.number, self.source_rank)


class Rank:
    """One rank's memory and engine, and vLLM's view of them: caches, block tables, slots."""

    def __init__(self, layout, rank, transport):
        self.placement = place_rank(layout, rank, NUM_BLOCKS)
        self._memory = torch.full((self.placement.total_bytes,), 0xEE, dtype=torch.uint8)
        self._compact = not layout.mirrors_layers
        kind = CompactPayload if self._compact else FullPayload
        self._payload = kind(self.placement, self._memory)
        self.engine = PrefetchEngine(
            self.placement, self._payload, transport.of_rank(rank), CpuDevice()
        )

    def begin(self, table, used):
        self._active = ActiveBlocks(table, used, NUM_BLOCKS)
        if self._compact:
            self._payload.use(self._active)

    def _cache(self, place):
        """A layer's cache, shape (blocks, tokens, bytes of a token)."""
        memory = self._memory[place.offset : place.offset + place.size]
        return memory.view(place.num_blocks, BLOCK_TOKENS, -1)

    def _first(self, place):
        return place.first_block(len(self._active))

    def write(self, place, slots, rows):
        if self._compact and not place.persistent:
            slots = self._active.renumber_slots(slots, BLOCK_TOKENS, self._first(place))
        used = slots >= 0
        self._cache(place).flatten(0, 1)[slots[used]] = rows[used]

    def read(self, place, table):
        """All blocks of each request, shape (requests, width, tokens, bytes)."""
        if self._compact and not place.persistent:
            table = self._active.renumber_table(table, self._first(place))
        return self._cache(place)[table.clamp(0, place.num_blocks - 1).long()]


def batch(step):
    """vLLM's tensors of a step: block table, blocks used, slots with padding at the end."""
    table = torch.full((len(step.rows), TABLE_WIDTH), STALE, dtype=torch.int32)
    used, slots = [], []
    for row, (blocks, tokens, new) in enumerate(step.rows):
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        used.append(-(-len(tokens) // BLOCK_TOKENS))
        slots += [
            blocks[i // BLOCK_TOKENS] * BLOCK_TOKENS + i % BLOCK_TOKENS
            for i in range(len(tokens) - new, len(tokens))
        ]
    return table, torch.tensor(used), torch.tensor([*slots, -1])


def new_rows(step, component):
    count = component.page_bytes // BLOCK_TOKENS
    rows = [
        token_bytes(component.layer_name, tuple(tokens[: i + 1]), count)
        for _, tokens, new in step.rows
        for i in range(len(tokens) - new, len(tokens))
    ]
    return torch.stack([*rows, torch.full((count,), 0xAA)]).to(torch.uint8)


def expected(step, component):
    count = component.page_bytes // BLOCK_TOKENS
    return [
        torch.stack(
            [
                token_bytes(component.layer_name, tuple(tokens[: i + 1]), count)
                for i in range(len(tokens))
            ]
        )
        for _, tokens, _ in step.rows
    ]


def run_step(ranks, step):
    table, used, slots = batch(step)
    for rank in ranks:
        rank.begin(table, used)
    if step.history:
        for rank in ranks:
            rank.engine.arm()
    for ordinal in range(len(ranks[0].placement.bundles)):
        if step.history:
            for rank in ranks:
                rank.engine.acquire(ordinal)
        for rank in ranks:
            for place in rank.placement.bundles[ordinal].components:
                rank.write(place, slots, new_rows(step, place.component))
                found = rank.read(place, table)
                for row, right in enumerate(expected(step, place.component)):
                    assert torch.equal(
                        found[row].flatten(0, 1)[: len(right)], right.to(torch.uint8)
                    )
        if step.history:
            for rank in ranks:
                rank.engine.release(ordinal)
    if step.history:
        for rank in ranks:
            rank.engine.finish()


SCRATCH = RunningScratch(least=RUNNING_BLOCKS, most=RUNNING_BLOCKS)


@pytest.mark.parametrize("mode", ["plain", "full", "compact"])
@settings(deadline=None, max_examples=25)
@given(
    bundles=st.lists(
        st.lists(st.sampled_from([8, 12, 20]), min_size=1, max_size=2), min_size=1, max_size=5
    ),
    group_size=st.integers(2, 4),
    alignment=st.sampled_from([1, 64]),
    seed=st.integers(0, 10**6),
)
def test_each_request_reads_its_own_tokens_in_every_layer(
    mode, bundles, group_size, alignment, seed
):
    size = 1 if mode == "plain" else group_size
    check_traffic(
        plan_group(bundle_stage(bundles), size, alignment, SCRATCH if mode == "compact" else None),
        seed,
    )


@settings(deadline=None, max_examples=25)
@given(
    bundles=st.lists(
        st.lists(st.sampled_from([8, 12, 20]), min_size=1, max_size=4), min_size=1, max_size=5
    ),
    group_size=st.integers(2, 4),
    alignment=st.sampled_from([1, 64]),
    seed=st.integers(0, 10**6),
)
def test_so_it_does_where_all_caches_of_a_layer_have_the_same_block_numbers(
    bundles, group_size, alignment, seed
):
    layout = plan_group(bundle_stage(bundles), group_size, alignment, SCRATCH, "layer")
    check_traffic(layout, seed)


def check_traffic(layout, seed):
    size = layout.group_size
    transport = LockstepTransport(size, seed)
    ranks = [Rank(layout, rank, transport) for rank in range(size)]
    traffic = Traffic(seed, NUM_BLOCKS, RUNNING_BLOCKS)
    for _ in range(12):
        step = traffic.step()
        if step.rows:
            run_step(ranks, step)


def test_the_traffic_has_what_makes_it_hard():
    """Shared blocks in one batch, prefix hits, blocks used again, preemptions, full scratch."""
    shared = hits = reused = full = preemptions = 0
    for seed in range(20):
        traffic, owners = Traffic(seed, NUM_BLOCKS, RUNNING_BLOCKS), {}
        for _ in range(12):
            step = traffic.step()
            ids = [block for blocks, _, _ in step.rows for block in blocks]
            shared += len(ids) > len(set(ids))
            full += len(set(ids)) == RUNNING_BLOCKS
            for blocks, tokens, _ in step.rows:
                for i, block in enumerate(blocks):
                    content = tuple(tokens[: (i + 1) * BLOCK_TOKENS])
                    before = owners.get(block, content)
                    reused += before[: len(content)] != content[: len(before)]
                    owners[block] = content
        hits += traffic.hits
        preemptions += traffic.preemptions
    assert min(shared, hits, reused, full, preemptions) > 5
