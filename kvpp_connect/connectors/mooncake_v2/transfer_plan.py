"""Turns a route and one request's blocks into addresses. Pure.

Neighbouring tokens that are neighbours on both sides become one piece, and the last block is read
only as far as it is filled.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvpp_connect.connectors.mooncake_v2.routes import Fetch
from kvpp_connect.connectors.mooncake_v2.token_runs import (
    BlockTable,
    Numbers,
    TokenRuns,
    common_runs,
)
from kvpp_connect.errors import PeerError
from kvpp_connect.layout import ComponentAddress, GroupManifest, TokenShard

_Pieces = tuple[Numbers, Numbers, Numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRange:
    """Tokens ``[first, end)`` of a request, and its block ids on both sides from token 0 on."""

    first: int
    end: int
    local_block_ids: Sequence[int]
    remote_block_ids: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SourceReads:
    """What to read from one rank: parallel arrays of addresses and lengths in bytes.

    ``exact``: nothing beyond the last token is written, which blocks read as a whole cannot avoid.
    """

    session: str
    exact: bool
    local_addresses: Numbers
    remote_addresses: Numbers
    lengths_bytes: Numbers

    @property
    def pieces(self) -> int:
        """Number of contiguous pieces."""
        return len(self.lengths_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes over all pieces."""
        return int(self.lengths_bytes.sum())

    def batches(self, limit_bytes: int, limit_pieces: int) -> Iterator["SourceReads"]:
        """Cut into batches that respect both limits; a piece over the limit is a batch."""
        ends = np.cumsum(self.lengths_bytes)
        begin = 0
        while begin < self.pieces:
            done = int(ends[begin - 1]) if begin else 0
            end = int(np.searchsorted(ends, done + limit_bytes, side="right"))
            end = min(max(end, begin + 1), begin + limit_pieces)
            yield SourceReads(
                session=self.session,
                exact=self.exact,
                local_addresses=self.local_addresses[begin:end],
                remote_addresses=self.remote_addresses[begin:end],
                lengths_bytes=self.lengths_bytes[begin:end],
            )
            begin = end


def plan_reads(
    fetches: Sequence[Fetch],
    tokens: TokenRange,
    *,
    local: GroupManifest,
    remote: GroupManifest,
    shard: TokenShard,
) -> tuple[SourceReads, ...]:
    """Plan the reads that bring a range of tokens into this rank's caches.

    Args:
        fetches: layers to read, all from ranks of ``remote``.
        shard: the tokens that this rank keeps.

    Returns:
        One entry per source rank with something to read, in order of first use.

    Raises:
        PeerError: the block ids do not cover the tokens, or do not exist on a side.
    """
    found: defaultdict[str, list[_Pieces]] = defaultdict(list)
    inexact: set[str] = set()
    known: dict[tuple[object, ...], TokenRuns] = {}
    for fetch in fetches:
        sides = _Sides(fetch, local.block_tokens, remote.block_tokens)
        key = (fetch.source.shard, *sides.shape)
        if key not in known:
            here = _table("local", tokens.local_block_ids, tokens.end, local, shard)
            there = _table(
                "remote", tokens.remote_block_ids, tokens.end, remote, fetch.source.shard
            )
            known[key] = sides.runs(tokens, here, there)
        if len(known[key].tokens):
            found[fetch.source.session].append(sides.pieces(known[key]))
            inexact |= {fetch.source.session} if sides.reads_beyond(tokens.end) else set()
    return tuple(
        SourceReads(
            session=session,
            exact=session not in inexact,
            local_addresses=np.concatenate([here for here, _, _ in pieces]),
            remote_addresses=np.concatenate([there for _, there, _ in pieces]),
            lengths_bytes=np.concatenate([length for _, _, length in pieces]),
        )
        for session, pieces in found.items()
    )


class _Sides:
    """How the blocks of one layer lie on both sides of a fetch."""

    def __init__(self, fetch: Fetch, local_tokens: int, remote_tokens: int) -> None:
        here, there = fetch.local, fetch.remote
        self._here, self._there = here, there
        self._local_tokens, self._remote_tokens = local_tokens, remote_tokens
        self._whole_blocks = not (here.token_bytes and there.token_bytes)
        self._cut_local = here.block_stride_bytes != here.page_bytes
        self._cut_remote = there.block_stride_bytes != there.page_bytes

    @property
    def shape(self) -> tuple[bool, bool, bool]:
        """Layers of one shape have the same runs."""
        return self._whole_blocks, self._cut_local, self._cut_remote

    def reads_beyond(self, end: int) -> bool:
        """Whether tokens up to ``end`` are read together with what follows them."""
        return self._whole_blocks and end % self._local_tokens != 0

    def runs(self, tokens: TokenRange, here: BlockTable, there: BlockTable) -> TokenRuns:
        """The tokens as runs; up to the end of the last block where blocks are indivisible."""
        end = tokens.end
        if self._whole_blocks:
            end = -(-end // self._local_tokens) * self._local_tokens
        return common_runs(
            tokens.first,
            end,
            here,
            there,
            cut_local=self._cut_local,
            cut_remote=self._cut_remote,
        )

    def pieces(self, runs: TokenRuns) -> _Pieces:
        """Local addresses, remote addresses and lengths in bytes of some runs."""
        lengths = runs.tokens * self._here.token_bytes
        if self._whole_blocks:
            lengths = runs.tokens // self._local_tokens * self._here.page_bytes
        return (
            _addresses(self._here, runs.local, self._local_tokens),
            _addresses(self._there, runs.remote, self._remote_tokens),
            lengths,
        )


def _addresses(component: ComponentAddress, positions: Numbers, block_tokens: int) -> Numbers:
    if component.token_bytes and component.block_stride_bytes == component.page_bytes:
        return component.address + positions * component.token_bytes
    blocks, rows = np.divmod(positions, block_tokens)
    return component.address + blocks * component.block_stride_bytes + rows * component.token_bytes


def _table(
    side: str, block_ids: Sequence[int], tokens: int, group: GroupManifest, shard: TokenShard
) -> BlockTable:
    needed = -(-tokens // (group.block_tokens * shard.count))
    if len(block_ids) < needed:
        raise PeerError(
            f"{tokens} tokens need {needed} blocks, {len(block_ids)} {side} ones are given"
        )
    ids = np.asarray(block_ids[:needed], dtype=np.int64)
    strangers = ids[(ids < 0) | (ids >= group.num_blocks)]
    if len(strangers):
        raise PeerError(
            f"{side} block {strangers[0]} is outside the {group.num_blocks} blocks there"
        )
    return BlockTable(block_ids=ids, block_tokens=group.block_tokens, shard=shard)
