"""The versioned description of one engine's readable KV cache, and the layout's digest.

A manifest names persistent caches only. Scratch is not in it, so a peer cannot ask for bytes that
belong to another layer.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field

from kvpp_connect.errors import LayoutError
from kvpp_connect.layout.placement import GroupLayout

WIRE_SCHEMA = 2
"""Version of these documents. 1: first one. 2: a dtype per component, token shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShard:
    """Which tokens of a request one rank keeps, under decode context parallelism (DCP).

    Runs of ``interleave_tokens`` tokens go to the ``count`` ranks in turn; without DCP a rank
    keeps all.
    """

    index: int = 0
    count: int = 1
    interleave_tokens: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count or self.interleave_tokens < 1:
            raise LayoutError(
                f"token shard {self.index} of {self.count} with runs of {self.interleave_tokens}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentAddress:
    """Where one cache component of one rank can be read.

    Block ``b`` is the ``page_bytes`` bytes from ``address + b * block_stride_bytes``. Where tokens
    lie one after the other inside a block, ``token_bytes`` is their size, else 0: such a block
    can be copied as a whole only.
    """

    layer_name: str
    address: int
    page_bytes: int
    block_stride_bytes: int
    token_bytes: int
    dtype: str

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
    shard: TokenShard = field(default_factory=TokenShard)

    @property
    def name(self) -> str:
        """The rank in messages."""
        return f"pp{self.pp_rank}/rank{self.rank_in_group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupManifest:
    """What the ranks of one KVPP group hold.

    ``block_tokens`` is the number of tokens that one block holds on one rank. A block id of a
    request stands for that many times ``shard.count`` tokens.
    """

    num_blocks: int
    block_tokens: int
    ranks: tuple[RankManifest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineManifest(GroupManifest):
    """Everything that a peer needs to read this engine's caches, over all pipeline stages.

    ``incarnation`` differs between two starts of the same ``engine_id``.
    """

    engine_id: str
    incarnation: str
    schema: int = WIRE_SCHEMA

    @property
    def request_block_tokens(self) -> int:
        """Tokens of a request for which one of its block ids stands."""
        return self.block_tokens * max((rank.shard.count for rank in self.ranks), default=1)


def layout_digest(layout: GroupLayout) -> str:
    """Fingerprint of a group's plan, equal on every rank that plans alike (sha256, hex)."""
    canonical = json.dumps(asdict(layout), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
