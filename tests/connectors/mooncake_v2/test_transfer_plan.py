"""Plans are carried out on byte arrays: every wanted byte arrives once, and no other is written."""

from dataclasses import replace

import pytest
from builders import address, manifest, rank_manifest
from hypothesis import given
from hypothesis import strategies as st

from kvpp_connect.connectors.mooncake_v2.transfer_plan import (
    LocalCaches,
    TokenRange,
    check_compatible,
    plan_pull,
)
from kvpp_connect.errors import PeerError

BLOCK_TOKENS = 4
TOKEN_BYTES = 3
PAGE = BLOCK_TOKENS * TOKEN_BYTES
BLOCKS = 12
LAYERS = ("model.0", "model.1", "model.2", "model.10")


def local_caches(stride=PAGE, layers=LAYERS, page=PAGE, token_bytes=TOKEN_BYTES, **changes):
    fields = {"block_tokens": BLOCK_TOKENS, "cache_dtype": "torch.float32"} | changes
    return LocalCaches(
        components=tuple(
            address(name, 1_000_000 * (i + 1), page, token_bytes, stride)
            for i, name in enumerate(layers)
        ),
        **fields,
    )


def producer(owners, stride=PAGE, page=PAGE):
    """A manifest whose rank ``r`` holds the layers that ``owners`` give to ``r``."""
    ranks = sorted({rank for held in owners.values() for rank in held})
    return manifest(
        *(
            rank_manifest(
                rank,
                *(
                    address(name, 10**9 * (rank + 1) + 10**6 * i, page, TOKEN_BYTES, stride)
                    for i, (name, held) in enumerate(owners.items())
                    if rank in held
                ),
            )
            for rank in ranks
        ),
        block_tokens=BLOCK_TOKENS,
        num_blocks=BLOCKS,
    )


OWNED = {"model.0": [0], "model.1": [0], "model.2": [1], "model.10": [1]}


def carry_out(document, local, tokens, reads):
    """Copy byte by byte and return {local address: (source layer, source token, byte)}."""
    origin = {}
    for rank in document.ranks:
        for c in rank.components:
            for block in range(BLOCKS):
                for byte in range(c.page_bytes):
                    where = c.address + block * c.block_stride_bytes + byte
                    origin[rank.session, where] = (c.layer_name, block, byte)
    written = {}
    for read in reads:
        pieces = zip(read.local_addresses, read.remote_addresses, read.lengths_bytes, strict=True)
        for here, there, length in pieces:
            for i in range(length):
                assert here + i not in written, "a byte is written twice"
                written[here + i] = origin[read.session, there + i]
    return written


def wanted(local, tokens):
    """{local address: (layer, remote block, byte in block)} for every byte of the token range."""
    found = {}
    for token in range(tokens.first, tokens.end):
        index, inside = divmod(token, BLOCK_TOKENS)
        for c in local.components:
            base = c.address + tokens.local_block_ids[index] * c.block_stride_bytes
            for i in range(TOKEN_BYTES):
                byte = inside * TOKEN_BYTES + i
                found[base + byte] = (c.layer_name, tokens.remote_block_ids[index], byte)
    return found


block_lists = st.permutations(range(BLOCKS)).map(lambda ids: tuple(ids[:8]))


@given(
    local_ids=block_lists | st.just(tuple(range(8))),
    remote_ids=block_lists | st.just(tuple(range(2, 10))),
    first_block=st.integers(0, 7),
    end=st.integers(1, 32),
    local_stride=st.sampled_from([PAGE, PAGE + 5]),
    remote_stride=st.sampled_from([PAGE, PAGE + 2]),
    reader=st.integers(0, 3),
    replicated=st.booleans(),
)
def test_every_wanted_byte_is_copied_once_and_nothing_else_is_written(
    local_ids, remote_ids, first_block, end, local_stride, remote_stride, reader, replicated
):
    first = first_block * BLOCK_TOKENS
    if first >= end:
        return
    owners = {name: [0, 1] for name in LAYERS} if replicated else OWNED
    document = producer(owners, remote_stride)
    local = local_caches(local_stride)
    tokens = TokenRange(
        first=first, end=end, local_block_ids=local_ids, remote_block_ids=remote_ids
    )
    reads = plan_pull(document, local, tokens, reader)
    assert carry_out(document, local, tokens, reads) == wanted(local, tokens)


def test_contiguous_blocks_become_one_piece_per_layer():
    tokens = TokenRange(
        first=0, end=30, local_block_ids=tuple(range(8)), remote_block_ids=tuple(range(3, 11))
    )
    reads = plan_pull(producer(OWNED), local_caches(), tokens, 0)
    assert [len(r.lengths_bytes) for r in reads] == [2, 2]
    assert sum(r.total_bytes for r in reads) == 30 * TOKEN_BYTES * len(LAYERS)


def test_each_layer_is_read_from_the_rank_that_owns_it():
    tokens = TokenRange(first=0, end=4, local_block_ids=(0,), remote_block_ids=(0,))
    reads = plan_pull(producer(OWNED), local_caches(), tokens, 0)
    assert [r.session for r in reads] == ["127.0.0.1:1000", "127.0.0.1:1001"]


def test_layers_that_the_reader_does_not_hold_are_not_read():
    tokens = TokenRange(first=0, end=4, local_block_ids=(0,), remote_block_ids=(0,))
    reads = plan_pull(producer(OWNED), local_caches(layers=("model.2",)), tokens, 0)
    assert [r.session for r in reads] == ["127.0.0.1:1001"]
    assert sum(r.total_bytes for r in reads) == PAGE


def test_replicated_layers_are_spread_over_the_ranks_that_hold_them():
    document = producer({name: [0, 1] for name in LAYERS})
    tokens = TokenRange(first=0, end=4, local_block_ids=(0,), remote_block_ids=(0,))
    for reader in (0, 1):
        reads = plan_pull(document, local_caches(), tokens, reader)
        assert sorted(r.total_bytes for r in reads) == [2 * PAGE, 2 * PAGE]


def test_whole_blocks_are_read_where_tokens_do_not_lie_in_rows():
    tokens = TokenRange(first=0, end=1, local_block_ids=(0,), remote_block_ids=(0,))
    reads = plan_pull(producer(OWNED), local_caches(token_bytes=0), tokens, 0)
    assert {length for r in reads for length in r.lengths_bytes} == {PAGE}


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({"first": 1, "end": 4}, "inside a block"),
        ({"first": 0, "end": 9}, "9 tokens need 3 blocks, 2 local"),
        ({"first": 0, "end": 8, "remote_block_ids": (0,)}, "8 tokens need 2 blocks, 1 remote"),
        ({"first": 0, "end": 8, "remote_block_ids": (0, BLOCKS)}, "block 12 is outside"),
        ({"first": 0, "end": 8, "remote_block_ids": (0, -1)}, "block -1 is outside"),
    ],
)
def test_block_ids_that_do_not_fit_are_refused(tokens, message):
    fields = {"local_block_ids": (0, 1), "remote_block_ids": (0, 1)} | tokens
    with pytest.raises(PeerError, match=message):
        plan_pull(producer(OWNED), local_caches(), TokenRange(**fields), 0)


def test_different_layouts_are_refused_with_both_values():
    document = producer(OWNED)
    check_compatible(document, local_caches())
    with pytest.raises(PeerError, match="schema 2, this engine knows 1"):
        check_compatible(replace(document, schema=2), local_caches())
    with pytest.raises(PeerError, match="blocks of 4 tokens, this engine of 8"):
        check_compatible(document, local_caches(block_tokens=8))
    with pytest.raises(PeerError, match=r"torch\.float32, this engine as torch\.bfloat16"):
        check_compatible(document, local_caches(cache_dtype="torch.bfloat16"))
    with pytest.raises(PeerError, match=r"no layer 'model\.99'"):
        check_compatible(document, local_caches(layers=("model.99",)))
    with pytest.raises(PeerError, match=r"12 bytes in a block of 'model\.0', this engine 24"):
        check_compatible(document, local_caches(page=24, stride=24))
