"""Which objects a block becomes in the pool, who writes them, and under which keys.

One object holds one token block of one shard: some caches of one pipeline stage, one after the
other. Under KVPP a shard is what one rank owns. Where every rank holds every cache, the layers are
cut among them as KVPP would cut them, so that each byte is stored once and all ranks share the
work; such an engine and one with KVPP on can use each other's objects. Caches that all ranks hold
beside owned ones, those of drafts, are a shard of their own, written by one rank.

Everything that decides what an object's bytes mean is in the scope, the part that all keys of an
engine have in common. Another layout has other keys.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import TokenShard, assign_owners

KEY_SCHEMA = 1
"""Version of keys and objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolComponent:
    """One cache of a layer: ``page_bytes`` of one block, values of ``dtype``."""

    layer_name: str
    page_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCaches:
    """The caches that one rank really holds, never scratch, and which tokens of each block."""

    rank: int
    components: tuple[PoolComponent, ...]
    tokens: TokenShard = field(default_factory=TokenShard)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One object's worth of every block. ``writer`` is the rank in the group that stores it."""

    name: str
    writer: int
    components: tuple[PoolComponent, ...]
    tokens: TokenShard

    @property
    def payload_bytes(self) -> int:
        """KV bytes of one block."""
        return sum(component.page_bytes for component in self.components)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShards:
    """All shards of one pipeline stage, the same on every rank of its group."""

    stage: int
    group_size: int
    shards: tuple[Shard, ...]

    def written_by(self, rank: int) -> tuple[Shard, ...]:
        """Shards that a rank stores."""
        return tuple(shard for shard in self.shards if shard.writer == rank)

    def held_by(self, held: HeldCaches) -> tuple[Shard, ...]:
        """Shards that a rank has to load: those whose caches it holds."""
        names = {component.layer_name for component in held.components}
        return tuple(
            shard
            for shard in self.shards
            if shard.tokens == held.tokens and shard.components[0].layer_name in names
        )


def plan_stage(stage: int, ranks: Sequence[HeldCaches]) -> StageShards:
    """Cut one stage's caches into shards.

    Args:
        ranks: what each rank of the group holds, in the order of their ranks.

    Raises:
        LayoutError: a cache is held by some of the ranks, neither by one nor by all, or two ranks
            describe it differently.
    """
    shards: list[Shard] = []
    shares = sorted({held.tokens.index for held in ranks})
    for index in shares:
        holders = [held for held in ranks if held.tokens.index == index]
        prefix = f"s{stage}" if len(shares) == 1 else f"s{stage}t{index}"
        shards += _cut(prefix, holders)
    return StageShards(stage=stage, group_size=len(ranks), shards=tuple(shards))


def _cut(prefix: str, ranks: Sequence[HeldCaches]) -> list[Shard]:
    """Shards of ranks that keep the same tokens."""
    components = _merge(ranks)
    holders = {
        name: [held.rank for held in ranks if name in {c.layer_name for c in held.components}]
        for name in components
    }
    for name, who in holders.items():
        if len(who) not in (1, len(ranks)):
            raise LayoutError(f"cache {name} is held by ranks {who} of {len(ranks)}")
    common = [name for name in components if len(holders[name]) == len(ranks)]
    owned = [name for name in components if name not in set(common)]
    if not owned:
        owned, common = common, []
        owners = _spread([components[name] for name in owned], [held.rank for held in ranks])
    else:
        owners = {name: holders[name][0] for name in owned}
    tokens = ranks[0].tokens
    shards = [
        Shard(
            name=f"{prefix}-{rank}",
            writer=rank,
            components=tuple(components[name] for name in owned if owners[name] == rank),
            tokens=tokens,
        )
        for rank in sorted(set(owners.values()))
    ]
    if common:
        drafts = tuple(components[name] for name in common)
        writer = _least_loaded([held.rank for held in ranks], shards)
        shards.append(Shard(name=f"{prefix}-d", writer=writer, components=drafts, tokens=tokens))
    return shards


def _merge(ranks: Sequence[HeldCaches]) -> dict[str, PoolComponent]:
    """All caches by name, in the order of layers."""
    found: dict[str, PoolComponent] = {}
    for held in ranks:
        for component in held.components:
            known = found.setdefault(component.layer_name, component)
            if known != component:
                raise LayoutError(
                    f"cache {component.layer_name}: rank {held.rank} holds {component}, another "
                    f"one {known}"
                )
    return {name: found[name] for name in sorted(found, key=_natural)}


def _spread(components: Sequence[PoolComponent], ranks: Sequence[int]) -> dict[str, int]:
    """Owners for caches that every rank holds: what KVPP's planner would say."""
    layers: dict[str, list[PoolComponent]] = {}
    for component in components:
        layers.setdefault(layer_of(component.layer_name), []).append(component)
    owners = assign_owners(
        [sum(c.page_bytes for c in layer) for layer in layers.values()], len(ranks)
    )
    return {
        component.layer_name: ranks[owner]
        for owner, layer in zip(owners, layers.values(), strict=True)
        for component in layer
    }


def _least_loaded(ranks: Sequence[int], shards: Iterable[Shard]) -> int:
    load = dict.fromkeys(ranks, 0)
    for shard in shards:
        load[shard.writer] += shard.payload_bytes
    return min(ranks, key=lambda rank: (load[rank], rank))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def layer_of(name: str) -> str:
    """What the caches of one decoder layer have in common: the name up to its number."""
    match = re.match(r".*?\.\d+(?=\.|$)", name)
    return match.group() if match else name


def layout_digest(stages: Sequence[StageShards], block_tokens: int) -> str:
    """Fingerprint of an engine's cut: sha256, the first 32 hex digits.

    It covers the versions of keys and objects, block size, group size, pipeline cut, owners,
    drafts, and the size and dtype of every cache.
    """
    document = {
        "schema": KEY_SCHEMA,
        "block_tokens": block_tokens,
        "stages": [asdict(stage) for stage in sorted(stages, key=lambda stage: stage.stage)],
    }
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def key_scope(identity: str, layout: str) -> str:
    """The part that all keys of an engine have in common.

    Args:
        identity: fingerprint of the model and what else decides about KV values.
        layout: what :func:`layout_digest` says.
    """
    return f"kvpp{KEY_SCHEMA}:{identity}:{layout}"


def object_key(scope: str, shard: str, block_hash: bytes) -> str:
    """Key of one object. It is shorter than 255 characters of the alphabet that all stores take."""
    return f"{scope}:{shard}:{block_hash.hex()}"
