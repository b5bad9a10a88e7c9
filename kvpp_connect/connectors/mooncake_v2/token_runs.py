"""Where the tokens of a request lie in the blocks of two ranks. Pure.

A position counts tokens over all blocks of one rank: ``block * block_tokens + token in block``.
"""

from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from kvpp_connect.errors import PeerError
from kvpp_connect.layout import TokenShard

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BlockTable:
    """A request's blocks on one rank, from its first token on.

    ``block_tokens`` are the tokens that the rank keeps in one block; with a shard of ``count``
    ranks a block id stands for ``count`` times as many tokens of the request.
    """

    block_ids: Numbers
    block_tokens: int
    shard: TokenShard

    @property
    def unit_tokens(self) -> int:
        """Neighbouring tokens of the request that are certainly neighbours here."""
        if self.shard.count == 1:
            return self.block_tokens
        return gcd(self.block_tokens, self.shard.interleave_tokens)

    def holds(self, tokens: Numbers) -> npt.NDArray[np.bool_]:
        """Which of these tokens the rank keeps."""
        return tokens // self.shard.interleave_tokens % self.shard.count == self.shard.index

    def positions(self, tokens: Numbers) -> Numbers:
        """Positions of tokens that the rank keeps (the rule of vLLM's slot mappings for DCP)."""
        run, count = self.shard.interleave_tokens, self.shard.count
        kept = tokens // (run * count) * run + tokens % run if count > 1 else tokens
        return self.block_ids[kept // self.block_tokens] * self.block_tokens + (
            kept % self.block_tokens
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenRuns:
    """Tokens that are neighbours on both sides: parallel arrays, in the order of the request."""

    local: Numbers
    remote: Numbers
    tokens: Numbers


def common_runs(
    first: int,
    end: int,
    local: BlockTable,
    remote: BlockTable,
    *,
    cut_local: bool = False,
    cut_remote: bool = False,
) -> TokenRuns:
    """Cut the tokens ``[first, end)`` that both ranks keep into runs, as long as possible.

    Args:
        cut_local: end runs at the local blocks' borders, where neighbouring blocks do not touch.
        cut_remote: the same for the remote blocks.

    Raises:
        PeerError: the range begins inside a block.
    """
    unit = gcd(local.unit_tokens, remote.unit_tokens)
    if first % unit:
        raise PeerError(f"a pull begins at token {first}, inside a run of {unit} tokens")
    starts = np.arange(first, end, unit, dtype=np.int64)
    starts = starts[local.holds(starts) & remote.holds(starts)]
    lengths = np.minimum(unit, end - starts)
    here, there = local.positions(starts), remote.positions(starts)
    if not len(starts):
        return TokenRuns(local=here, remote=there, tokens=lengths)
    joined = (np.diff(here) == lengths[:-1]) & (np.diff(there) == lengths[:-1])
    if cut_local:
        joined &= here[1:] % local.block_tokens != 0
    if cut_remote:
        joined &= there[1:] % remote.block_tokens != 0
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    return TokenRuns(local=here[heads], remote=there[heads], tokens=np.add.reduceat(lengths, heads))
