"""Plans are carried out on byte arrays: every wanted byte arrives once, and no other is written."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_world import Cache, Transfer, engine, stages

from kvpp_connect.connectors.mooncake_v2.routes import plan_routes
from kvpp_connect.connectors.mooncake_v2.transfer_plan import SourceReads, TokenRange, plan_reads
from kvpp_connect.errors import PeerError
from kvpp_connect.layout import TokenShard

CACHES = [Cache(name=f"model.{i}", token_bytes=size) for i, size in enumerate([3, 1, 3, 5])]
NAMES = [cache.name for cache in CACHES]
TOKENS = 45
BLOCK_IDS = 64


def held_by_all(stages_, ranks):
    """Plain ranks: every rank of a stage holds every layer of the stage."""
    cut = len(NAMES) // stages_
    return {
        name: [(min(i // cut, stages_ - 1), rank) for rank in range(ranks)]
        for i, name in enumerate(NAMES)
    }


def owned(stages_, ranks, draft=None):
    """KVPP: one rank of the stage owns each layer; a draft is held by all."""
    cut = len(NAMES) // stages_
    return {
        name: (
            [(stages_ - 1, rank) for rank in range(ranks)]
            if name == draft
            else [(min(i // cut, stages_ - 1), i % ranks)]
        )
        for i, name in enumerate(NAMES)
    }


layouts = st.one_of(
    st.builds(held_by_all, st.sampled_from([1, 2]), st.integers(1, 4)),
    st.builds(
        owned, st.sampled_from([1, 2]), st.integers(1, 4), st.sampled_from([None, NAMES[-1]])
    ),
)


@st.composite
def sides(draw, side, block_tokens):
    """An engine; sharded by tokens only where every rank holds all layers."""
    count = draw(st.sampled_from([1, 1, 2]))
    if count > 1:
        replicas = draw(st.sampled_from([1, 2]))
        holders = held_by_all(1, count * replicas)
        run = draw(st.sampled_from([1, 2, block_tokens]))
        shards = {
            (0, rank): TokenShard(index=rank % count, count=count, interleave_tokens=run)
            for rank in range(count * replicas)
        }
    else:
        holders, shards = draw(layouts), None
    return engine(
        holders,
        CACHES,
        side=side,
        block_tokens=block_tokens,
        num_blocks=BLOCK_IDS,
        gap_bytes=draw(st.sampled_from([0, 2])),
        shards=shards,
    )


@st.composite
def worlds(draw):
    small = draw(st.sampled_from([2, 4]))
    sizes = draw(st.permutations([small, small * draw(st.sampled_from([1, 2, 4]))]))
    prefill, decode = draw(sides("p", sizes[0])), draw(sides("d", sizes[1]))
    ids = st.one_of(
        st.permutations(range(BLOCK_IDS)),
        st.integers(0, 20).map(lambda n: [*range(n, BLOCK_IDS), *range(n)]),
    )
    block = decode.request_block_tokens
    end = draw(st.integers(1, TOKENS))
    tokens = TokenRange(
        first=draw(st.integers(0, (end - 1) // block)) * block,
        end=end,
        local_block_ids=draw(ids),
        remote_block_ids=draw(ids),
    )
    return prefill, decode, tokens


@settings(max_examples=150, deadline=None)
@given(worlds(), st.sampled_from(["shared", "direct"]))
def test_every_wanted_byte_is_copied_once_and_nothing_else_is_written(world, mode):
    prefill, decode, tokens = world
    transfer = Transfer(prefill, decode, mode, tokens)
    assert transfer.written == transfer.wanted()


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_in_shared_mode_each_byte_leaves_the_prefill_node_once(world):
    prefill, decode, tokens = world
    transfer = Transfer(prefill, decode, "shared", tokens)
    logical = sum(cache.token_bytes for cache in CACHES) * (tokens.end - tokens.first)
    assert transfer.bytes_from_prefill == logical


@pytest.mark.parametrize("side", ["p", "d"])
def test_pieces_end_at_the_gaps_between_blocks(side):
    gaps = {name: 2 if name == side else 0 for name in ("p", "d")}
    prefill, decode = (
        engine(owned(1, 1), CACHES, side=name, block_tokens=4, num_blocks=8, gap_bytes=gaps[name])
        for name in ("p", "d")
    )
    tokens = TokenRange(first=0, end=11, local_block_ids=range(3), remote_block_ids=range(4, 7))
    transfer = Transfer(prefill, decode, "direct", tokens)
    assert transfer.written == transfer.wanted()


def test_in_direct_mode_each_rank_reads_all_that_it_keeps():
    prefill = engine(owned(1, 2), CACHES, side="p", block_tokens=4, num_blocks=8)
    decode = engine(held_by_all(1, 3), CACHES, side="d", block_tokens=4, num_blocks=8)
    tokens = TokenRange(first=0, end=9, local_block_ids=range(3), remote_block_ids=range(3))
    assert Transfer(prefill, decode, "direct", tokens).bytes_from_prefill == 3 * 9 * 12


def reads_of(prefill, decode, tokens, rank=0):
    (group,) = stages(decode)
    fetches = plan_routes(prefill, group, "shared")[rank].from_producer
    return plan_reads(fetches, tokens, local=group, remote=prefill, shard=group.ranks[rank].shard)


def plain(side, ranks=1, caches=CACHES, block_tokens=4, num_blocks=12):
    names = {cache.name for cache in caches}
    holders = {name: held for name, held in held_by_all(1, ranks).items() if name in names}
    return engine(holders, caches, side=side, block_tokens=block_tokens, num_blocks=num_blocks)


def test_contiguous_blocks_become_one_piece_per_layer_whatever_their_size():
    tokens = TokenRange(first=0, end=30, local_block_ids=range(2, 6), remote_block_ids=range(3, 11))
    (read,) = reads_of(plain("p"), plain("d", block_tokens=8), tokens)
    assert read.lengths_bytes.tolist() == [30 * cache.token_bytes for cache in CACHES]


def test_layers_that_the_reader_does_not_hold_are_not_read():
    tokens = TokenRange(first=0, end=4, local_block_ids=[0], remote_block_ids=[0])
    (read,) = reads_of(plain("p"), plain("d", caches=CACHES[2:3]), tokens)
    assert read.total_bytes == 4 * CACHES[2].token_bytes


def test_replicated_layers_are_spread_by_bytes_over_the_ranks_that_hold_them():
    caches = [Cache(name=name, token_bytes=2) for name in NAMES]
    tokens = TokenRange(first=0, end=4, local_block_ids=[0], remote_block_ids=[0])
    reads = reads_of(plain("p", ranks=2, caches=caches), plain("d", caches=caches), tokens)
    assert [read.total_bytes for read in reads] == [16, 16]


def test_whole_blocks_are_read_where_tokens_do_not_lie_in_rows():
    caches = [Cache(name="model.0", token_bytes=3, rows=False)]
    tokens = TokenRange(first=4, end=9, local_block_ids=range(3), remote_block_ids=[3, 5, 6])
    (read,) = reads_of(plain("p", caches=caches), plain("d", caches=caches), tokens)
    assert read.lengths_bytes.tolist() == [2 * 12]
    assert not read.exact


@pytest.mark.parametrize(("rows", "end", "exact"), [(False, 8, True), (True, 7, True)])
def test_reads_are_exact_where_nothing_lies_behind_the_last_token(rows, end, exact):
    caches = [Cache(name="model.0", token_bytes=3, rows=rows)]
    tokens = TokenRange(first=0, end=end, local_block_ids=range(2), remote_block_ids=range(2))
    (read,) = reads_of(plain("p", caches=caches), plain("d", caches=caches), tokens)
    assert read.exact is exact


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({"first": 1, "end": 4}, "inside a run of 4"),
        ({"first": 0, "end": 9}, "9 tokens need 3 blocks, 2 local"),
        ({"first": 0, "end": 8, "remote_block_ids": (0,)}, "8 tokens need 2 blocks, 1 remote"),
        ({"first": 0, "end": 8, "remote_block_ids": (0, 12)}, "remote block 12 is outside"),
        ({"first": 0, "end": 8, "remote_block_ids": (0, -1)}, "remote block -1 is outside"),
    ],
)
def test_block_ids_that_do_not_fit_are_refused(tokens, message):
    fields = {"local_block_ids": (0, 1), "remote_block_ids": (0, 1)} | tokens
    with pytest.raises(PeerError, match=message):
        reads_of(plain("p"), plain("d"), TokenRange(**fields))


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.integers(1, 120),
    st.integers(1, 7),
)
def test_batches_keep_the_order_and_both_limits(lengths, limit_bytes, limit_pieces):
    numbers = np.arange(len(lengths))
    reads = SourceReads(
        session="p0",
        exact=True,
        local_addresses=numbers,
        remote_addresses=numbers + 1000,
        lengths_bytes=np.array(lengths),
    )
    batches = list(reads.batches(limit_bytes, limit_pieces))
    for name in ("local_addresses", "remote_addresses", "lengths_bytes"):
        joined = np.concatenate([getattr(batch, name) for batch in batches])
        assert (joined == getattr(reads, name)).all()
    for batch in batches:
        assert batch.pieces <= limit_pieces
        assert batch.total_bytes <= limit_bytes or batch.pieces == 1
