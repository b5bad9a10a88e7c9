"""The versioned description of one engine's readable KV cache, and the layout's digest.

A manifest names persistent caches only. Scratch is not in it, so a peer cannot ask for bytes that
belong to another layer.
"""

import hashlib
import json
from dataclasses import asdict, dataclass

from kvpp_connect.errors import LayoutError
from kvpp_connect.layout.placement import GroupLayout

WIRE_SCHEMA = 1
"""Version of these documents. 1: first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentAddress:
    """Where one cache component of one rank can be read.

    Block ``b`` is the ``page_bytes`` bytes from ``address + b * block_stride_bytes``. Where tokens
    lie one after the other inside a block, ``token_bytes`` is their size, else 0.
    """

    layer_name: str
    address: int
    page_bytes: int
    block_stride_bytes: int
    token_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.page_bytes <= self.block_stride_bytes:
            raise LayoutError(
                f"{self.layer_name}: a page of {self.page_bytes} bytes in blocks "
                f"{self.block_stride_bytes} bytes apart"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankManifest:
    """The persistent caches of one rank and the transfer engine that serves them.

    ``session`` is the transfer engine's ``host:port``.
    """

    pp_rank: int
    rank_in_group: int
    session: str
    components: tuple[ComponentAddress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineManifest:
    """Everything that a peer needs to read this engine's caches.

    ``block_tokens`` is the number of tokens in a block of the block ids that requests carry;
    ``incarnation`` differs between two starts of the same ``engine_id``.
    """

    engine_id: str
    incarnation: str
    block_tokens: int
    num_blocks: int
    cache_dtype: str
    ranks: tuple[RankManifest, ...]
    schema: int = WIRE_SCHEMA

    def holders(self) -> dict[str, tuple[RankManifest, ...]]:
        """Ranks that hold each layer, by layer name, in (stage, rank in group) order."""
        found: dict[str, list[RankManifest]] = {}
        for rank in sorted(self.ranks, key=lambda r: (r.pp_rank, r.rank_in_group)):
            for component in rank.components:
                found.setdefault(component.layer_name, []).append(rank)
        return {name: tuple(ranks) for name, ranks in found.items()}


def layout_digest(layout: GroupLayout) -> str:
    """Fingerprint of a group's plan, equal on every rank that plans alike (sha256, hex)."""
    canonical = json.dumps(asdict(layout), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
