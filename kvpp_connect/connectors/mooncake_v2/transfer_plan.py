"""Which bytes a reader copies from which rank of a producer. Pure.

A pull covers a range of tokens of one request. Layers are matched by name; each is read from one
rank that holds it. Neighbouring blocks that are neighbours on both sides become one piece, and
the last block is read only as far as it is filled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpp_connect.errors import PeerError
from kvpp_connect.layout import WIRE_SCHEMA, ComponentAddress, EngineManifest, RankManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCaches:
    """The reader's side: caches that this rank holds, and the shape of its blocks."""

    block_tokens: int
    cache_dtype: str
    components: tuple[ComponentAddress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRange:
    """Tokens ``[first, end)`` of a request, and its block ids on both sides from token 0 on."""

    first: int
    end: int
    local_block_ids: Sequence[int]
    remote_block_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReads:
    """What to read from one rank: parallel lists of addresses and lengths in bytes."""

    session: str
    local_addresses: tuple[int, ...]
    remote_addresses: tuple[int, ...]
    lengths_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes over all pieces."""
        return sum(self.lengths_bytes)


@dataclass(frozen=True, slots=True)
class _Run:
    # Blocks [local, local + blocks) hold what the remote blocks [remote, remote + blocks) hold;
    # the last of them is filled with tail_tokens tokens.
    local: int
    remote: int
    blocks: int
    tail_tokens: int


def check_compatible(manifest: EngineManifest, local: LocalCaches) -> None:
    """Refuse a producer whose caches cannot be copied into ours byte by byte.

    Raises:
        PeerError: names the first difference, with both values.
    """
    who = f"prefill engine {manifest.engine_id}"
    if manifest.schema != WIRE_SCHEMA:
        raise PeerError(
            f"{who} describes its caches in schema {manifest.schema}, this engine knows "
            f"{WIRE_SCHEMA}; run the same kvpp-connect on both"
        )
    if manifest.block_tokens != local.block_tokens:
        raise PeerError(
            f"{who} has blocks of {manifest.block_tokens} tokens, this engine of "
            f"{local.block_tokens}; start both with the same --block-size"
        )
    if manifest.cache_dtype != local.cache_dtype:
        raise PeerError(
            f"{who} keeps its KV cache as {manifest.cache_dtype}, this engine as "
            f"{local.cache_dtype}; start both with the same --dtype and --kv-cache-dtype"
        )
    remote = {c.layer_name: c for rank in manifest.ranks for c in rank.components}
    for component in local.components:
        name = component.layer_name
        if name not in remote:
            raise PeerError(
                f"{who} holds no layer {name!r} ({len(remote)} layers known); do both serve the "
                "same model?"
            )
        if remote[name].page_bytes != component.page_bytes:
            raise PeerError(
                f"{who} has {remote[name].page_bytes} bytes in a block of {name!r}, this engine "
                f"{component.page_bytes}; do both serve the same model?"
            )


def choose_sources(
    holders: Mapping[str, tuple[RankManifest, ...]],
    local: LocalCaches,
    reader_rank: int,
) -> dict[str, RankManifest]:
    """Pick the rank to read each layer from; replicas are spread over layers and readers."""
    return {
        component.layer_name: holders[component.layer_name][
            (index + reader_rank) % len(holders[component.layer_name])
        ]
        for index, component in enumerate(local.components)
    }


def plan_pull(
    manifest: EngineManifest, local: LocalCaches, tokens: TokenRange, reader_rank: int
) -> tuple[SourceReads, ...]:
    """Plan the reads that bring a range of tokens into this rank's caches.

    Args:
        reader_rank: this rank's number among the readers, to spread replicated layers.

    Returns:
        One entry per source rank, in order of first use.

    Raises:
        PeerError: the block ids do not cover the tokens, or do not exist on a side.
    """
    runs = _runs(tokens, local.block_tokens, manifest.num_blocks)
    sources = choose_sources(manifest.holders(), local, reader_rank)
    pieces: dict[str, list[tuple[int, int, int]]] = {}
    for component in local.components:
        source = sources[component.layer_name]
        remote = next(c for c in source.components if c.layer_name == component.layer_name)
        pieces.setdefault(source.session, []).extend(
            piece for run in runs for piece in _pieces(run, component, remote)
        )
    return tuple(
        SourceReads(
            session=session,
            local_addresses=tuple(piece[0] for piece in found),
            remote_addresses=tuple(piece[1] for piece in found),
            lengths_bytes=tuple(piece[2] for piece in found),
        )
        for session, found in pieces.items()
    )


def _runs(tokens: TokenRange, block_tokens: int, remote_blocks: int) -> list[_Run]:
    first_block, end_block = tokens.first // block_tokens, -(-tokens.end // block_tokens)
    if tokens.first % block_tokens:
        raise PeerError(
            f"a pull begins at token {tokens.first}, inside a block of {block_tokens} tokens"
        )
    for side, ids in (("local", tokens.local_block_ids), ("remote", tokens.remote_block_ids)):
        if len(ids) < end_block:
            raise PeerError(
                f"{tokens.end} tokens need {end_block} blocks, {len(ids)} {side} ones are given"
            )
    strangers = [b for b in tokens.remote_block_ids[:end_block] if not 0 <= b < remote_blocks]
    if strangers:
        raise PeerError(f"block {strangers[0]} is outside the producer's {remote_blocks} blocks")
    runs: list[_Run] = []
    for index in range(first_block, end_block):
        here, there = tokens.local_block_ids[index], tokens.remote_block_ids[index]
        filled = min(block_tokens, tokens.end - index * block_tokens)
        last = runs[-1] if runs else None
        if last and here == last.local + last.blocks and there == last.remote + last.blocks:
            runs[-1] = _Run(last.local, last.remote, last.blocks + 1, filled)
        else:
            runs.append(_Run(here, there, 1, filled))
    return runs


def _pieces(
    run: _Run, local: ComponentAddress, remote: ComponentAddress
) -> list[tuple[int, int, int]]:
    """Pieces of a run for one layer: (local address, remote address, bytes)."""
    page = local.page_bytes
    trimmable = local.token_bytes > 0 and local.token_bytes == remote.token_bytes
    tail = run.tail_tokens * local.token_bytes if trimmable else page
    here = local.address + run.local * local.block_stride_bytes
    there = remote.address + run.remote * remote.block_stride_bytes
    if local.block_stride_bytes == page and remote.block_stride_bytes == page:
        return [(here, there, (run.blocks - 1) * page + tail)]
    return [
        (
            here + i * local.block_stride_bytes,
            there + i * remote.block_stride_bytes,
            page if i < run.blocks - 1 else tail,
        )
        for i in range(run.blocks)
    ]
