"""Who of a decode group reads each layer from whom. Pure; depends on the two layouts only.

Layers are matched by name. In ``shared`` mode every layer enters a decode group once: one of the
ranks that need it reads it from the producer, the others take it from that rank, which is usually
on the same machine. In ``direct`` mode every rank reads all that it needs from the producer.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvpp_connect.errors import PeerError
from kvpp_connect.layout import (
    WIRE_SCHEMA,
    ComponentAddress,
    EngineManifest,
    GroupManifest,
    RankManifest,
    TokenShard,
)

PullMode = Literal["shared", "direct"]
_Keeper = tuple[RankManifest, ComponentAddress]
_Side = tuple[ComponentAddress, int, TokenShard]  # the int: tokens that a block holds on one rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """One layer's cache, read from ``source``, which keeps it as ``remote``."""

    local: ComponentAddress
    remote: ComponentAddress
    source: RankManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What one rank of a decode group reads.

    Attributes:
        from_producer: read from the prefill node.
        from_peers: read, by rank in group, from the rank that got it from the prefill node.
        for_peers: ranks in group that wait for what this one reads from the prefill node.
    """

    from_producer: tuple[Fetch, ...]
    from_peers: dict[int, tuple[Fetch, ...]]
    for_peers: tuple[int, ...]


def check_compatible(manifest: EngineManifest, group: GroupManifest) -> None:
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
    theirs, ours = manifest.block_tokens, group.block_tokens
    if max(theirs, ours) % min(theirs, ours):
        raise PeerError(
            f"{who} has blocks of {theirs} tokens, this engine of {ours}; start both with the "
            "same --block-size, or with one that divides the other"
        )
    holders = _holders(manifest)
    for rank in group.ranks:
        for component in rank.components:
            if component.layer_name not in holders:
                raise PeerError(
                    f"{who} holds no layer {component.layer_name!r} ({len(holders)} layers "
                    "known); do both serve the same model with the same --speculative-config?"
                )
            for source, remote in holders[component.layer_name]:
                _check_component(who, (component, ours, rank.shard), (remote, theirs, source.shard))


def _check_component(who: str, local: _Side, remote: _Side) -> None:
    (here, our_tokens, our_shard), (there, their_tokens, their_shard) = local, remote
    name = here.layer_name
    if here.dtype != there.dtype:
        raise PeerError(
            f"{who} keeps {name!r} as {there.dtype}, this engine as {here.dtype}; start both with "
            "the same --dtype and --kv-cache-dtype"
        )
    if here.page_bytes * their_tokens != there.page_bytes * our_tokens:
        raise PeerError(
            f"{who} has {there.page_bytes} bytes in a block of {their_tokens} tokens of {name!r}, "
            f"this engine {here.page_bytes} in one of {our_tokens}; do both serve the same model?"
        )
    whole = not (here.token_bytes and there.token_bytes)
    if whole and (our_tokens != their_tokens or our_shard.count > 1 or their_shard.count > 1):
        raise PeerError(
            f"{name!r} can be copied in whole blocks only, and {who} has blocks of "
            f"{their_tokens} tokens over {their_shard.count} rank(s), this engine of {our_tokens} "
            f"over {our_shard.count}; start both with the same --block-size and without DCP"
        )


def plan_routes(manifest: EngineManifest, group: GroupManifest, mode: PullMode) -> dict[int, Route]:
    """Who of a decode group reads each layer from whom; the same on every rank that asks.

    In ``shared`` mode ranks that keep the same tokens of a layer take turns to read it from the
    producer, balanced by bytes. Of several producer ranks that hold a layer, the one with the
    least to send is asked.

    Returns:
        The routes by rank in group.

    Raises:
        PeerError: no producer rank holds some tokens of a layer.
    """
    holders = _holders(manifest)
    sent: defaultdict[str, int] = defaultdict(int)
    read: defaultdict[int, int] = defaultdict(int)
    producer: defaultdict[int, list[Fetch]] = defaultdict(list)
    peers: defaultdict[tuple[int, int], list[Fetch]] = defaultdict(list)
    for keepers in _keepers(group):
        shared = mode == "shared"
        first = min(keepers, key=lambda keeper: read[keeper[0].rank_in_group])
        for rank, component in [first] if shared else keepers:
            read[rank.rank_in_group] += component.page_bytes
            sources = _sources(component, holders[component.layer_name], sent)
            producer[rank.rank_in_group] += sources
        for rank, component in keepers if shared else ():
            if rank is not first[0]:
                fetch = Fetch(local=component, remote=first[1], source=first[0])
                peers[rank.rank_in_group, first[0].rank_in_group].append(fetch)
    numbers = [rank.rank_in_group for rank in group.ranks]
    return {
        number: Route(
            from_producer=tuple(producer[number]),
            from_peers={n: tuple(peers[number, n]) for n in numbers if (number, n) in peers},
            for_peers=tuple(n for n in numbers if (n, number) in peers),
        )
        for number in numbers
    }


def _holders(manifest: EngineManifest) -> dict[str, list[_Keeper]]:
    """Ranks that hold each layer, in (stage, rank in group) order."""
    found: defaultdict[str, list[_Keeper]] = defaultdict(list)
    for rank in sorted(manifest.ranks, key=lambda r: (r.pp_rank, r.rank_in_group)):
        for component in rank.components:
            found[component.layer_name].append((rank, component))
    return dict(found)


def _keepers(group: GroupManifest) -> list[list[_Keeper]]:
    """Ranks that keep the same tokens of the same layer, one list for each."""
    found: defaultdict[tuple[str, TokenShard], list[_Keeper]] = defaultdict(list)
    for rank in group.ranks:
        for component in rank.components:
            found[component.layer_name, rank.shard].append((rank, component))
    return list(found.values())


def _sources(
    local: ComponentAddress, holders: Sequence[_Keeper], sent: defaultdict[str, int]
) -> list[Fetch]:
    """Fetches that together bring all tokens of a layer: one for each shard of the producer."""
    replicas: defaultdict[TokenShard, list[_Keeper]] = defaultdict(list)
    for keeper in holders:
        replicas[keeper[0].shard].append(keeper)
    missing = set(range(max(shard.count for shard in replicas))) - {s.index for s in replicas}
    if missing:
        raise PeerError(
            f"no prefill rank holds shard {min(missing)} of the tokens of {local.layer_name!r}"
        )
    fetches: list[Fetch] = []
    for same in replicas.values():
        source, remote = min(same, key=lambda keeper: sent[keeper[0].session])
        sent[source.session] += remote.page_bytes
        fetches.append(Fetch(local=local, remote=remote, source=source))
    return fetches
