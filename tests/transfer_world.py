"""Memories of a prefill and a decode engine, token by token, for tests of the transfer planner.

A second, slow statement of where a token's bytes lie. Copies are carried out byte by byte.
"""

from dataclasses import dataclass

from kvpp_connect.connectors.mooncake_v2.routes import plan_routes
from kvpp_connect.connectors.mooncake_v2.transfer_plan import TokenRange, plan_reads
from kvpp_connect.layout import (
    ComponentAddress,
    EngineManifest,
    GroupManifest,
    RankManifest,
    TokenShard,
)


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A layer's cache by name; rows of tokens, or blocks that cannot be divided."""

    name: str
    token_bytes: int
    rows: bool = True


def engine(
    holders: dict[str, list[tuple[int, int]]],
    caches: list[Cache],
    *,
    side: str,
    block_tokens: int,
    num_blocks: int,
    gap_bytes: int = 0,
    shards: dict[tuple[int, int], TokenShard] | None = None,
) -> EngineManifest:
    """An engine whose (stage, rank) pairs hold the layers that ``holders`` gives to them.

    ``gap_bytes`` lie between neighbouring blocks of every second layer.
    """
    places = sorted({place for held in holders.values() for place in held})
    ranks = []
    for number, place in enumerate(places):
        components = []
        for i, cache in enumerate(caches):
            if place not in holders[cache.name]:
                continue
            page = cache.token_bytes * block_tokens
            components.append(
                ComponentAddress(
                    layer_name=cache.name,
                    address=1_000_000 * (number + 1) + 10_000 * i,
                    page_bytes=page,
                    block_stride_bytes=page + (gap_bytes if i % 2 else 0),
                    token_bytes=cache.token_bytes if cache.rows else 0,
                    dtype="float32",
                )
            )
        ranks.append(
            RankManifest(
                pp_rank=place[0],
                rank_in_group=place[1],
                session=f"{side}{number}",
                components=tuple(components),
                shard=(shards or {}).get(place, TokenShard()),
            )
        )
    return EngineManifest(
        engine_id=side,
        incarnation="one",
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        ranks=tuple(ranks),
    )


def stages(manifest: EngineManifest) -> list[GroupManifest]:
    """The decode groups of an engine, one per pipeline stage."""
    return [
        GroupManifest(
            num_blocks=manifest.num_blocks,
            block_tokens=manifest.block_tokens,
            ranks=tuple(rank for rank in manifest.ranks if rank.pp_rank == stage),
        )
        for stage in sorted({rank.pp_rank for rank in manifest.ranks})
    ]


def addresses_of_token(
    rank: RankManifest, cache: ComponentAddress, block_tokens: int, block_ids: list[int], token: int
) -> list[int]:
    """Addresses of one token's bytes on one rank; empty where the rank does not keep it."""
    shard = rank.shard
    kept = 0
    for earlier in range(token + 1):
        if earlier // shard.interleave_tokens % shard.count == shard.index:
            kept += 1
            mine = earlier
    if not kept or mine != token:
        return []
    size = cache.page_bytes // block_tokens
    block, row = divmod(kept - 1, block_tokens)
    begin = cache.address + block_ids[block] * cache.block_stride_bytes + row * size
    return [begin + i for i in range(size)]


def fill(
    manifest: EngineManifest, block_ids: list[int], tokens: range
) -> dict[tuple[str, int], tuple[str, int, int]]:
    """{(session, address): (layer, token, byte)} over all ranks of an engine."""
    return {
        (rank.session, where): (cache.layer_name, token, byte)
        for rank in manifest.ranks
        for cache in rank.components
        for token in tokens
        for byte, where in enumerate(
            addresses_of_token(rank, cache, manifest.block_tokens, block_ids, token)
        )
    }


class Transfer:
    """Carries out what the planner says for every rank of a decode engine."""

    def __init__(
        self, prefill: EngineManifest, decode: EngineManifest, mode: str, tokens: TokenRange
    ) -> None:
        self.prefill, self.decode, self.tokens = prefill, decode, tokens
        self.written: dict[tuple[str, int], tuple[str, int, int] | None] = {}
        self.bytes_sent: dict[str, int] = {}
        source = fill(prefill, list(tokens.remote_block_ids), range(tokens.end))
        for group in stages(decode):
            routes = plan_routes(prefill, group, mode)
            for rank in group.ranks:
                fetches = routes[rank.rank_in_group].from_producer
                self._copy(source, rank, fetches, group, prefill, tokens)
            within = TokenRange(
                first=tokens.first,
                end=tokens.end,
                local_block_ids=tokens.local_block_ids,
                remote_block_ids=tokens.local_block_ids,
            )
            arrived = dict(self.written)
            for rank in group.ranks:
                for fetches in routes[rank.rank_in_group].from_peers.values():
                    self._copy(arrived, rank, fetches, group, group, within)

    def _copy(self, memory, rank, fetches, group, remote, tokens):
        reads = plan_reads(fetches, tokens, local=group, remote=remote, shard=rank.shard)
        for read in reads:
            self.bytes_sent[read.session] = self.bytes_sent.get(read.session, 0) + read.total_bytes
            pieces = zip(
                read.local_addresses, read.remote_addresses, read.lengths_bytes, strict=True
            )
            for here, there, length in pieces:
                for i in range(length):
                    place = rank.session, int(here) + i
                    assert place not in self.written, "a byte is written twice"
                    self.written[place] = memory.get((read.session, int(there) + i))

    @property
    def bytes_from_prefill(self) -> int:
        sessions = {rank.session for rank in self.prefill.ranks}
        return sum(size for session, size in self.bytes_sent.items() if session in sessions)

    def wanted(self) -> dict[tuple[str, int], tuple[str, int, int]]:
        """What the decode engine needs, by the slow rule."""
        tokens = self.tokens
        return fill(self.decode, list(tokens.local_block_ids), range(tokens.first, tokens.end))
