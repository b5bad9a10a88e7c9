"""What the pool stores for each KV byte of a model with drafts, by the master's own figures.

All ranks of a KVPP group, each with the caches that it owns and those of the draft, in one process;
they agree on the shards and store the same blocks, as an engine's ranks do.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvpp_connect.bench.pool_rank import (
    LAYER_BLOCK_BYTES,
    PoolRank,
    ThreadGroup,
    make_caches,
    open_store,
)
from kvpp_connect.connectors.ascend_store.objects import HEADER_BYTES
from kvpp_connect.connectors.ascend_store.orders import block_list
from kvpp_connect.demo.pool_servers import PoolFigures
from kvpp_connect.layout import assign_owners

_STAGING_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesSetting:
    """A model of ``layers`` target layers and ``drafts`` draft layers, and blocks to store."""

    layers: int
    drafts: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBytes:
    """One group's blocks in the pool.

    Attributes:
        logical_bytes: KV of the blocks, all layers, once.
        header_share: of ``bytes_per_kv_byte``, what headers add.
        copied_drafts: what it would be if each rank stored its copy of the drafts.
    """

    owners: int
    blocks: int
    objects: int
    stored_bytes: int
    logical_bytes: int
    bytes_per_kv_byte: float
    header_share: float
    copied_drafts: float


def measure_bytes(
    setting: BytesSetting, owners: int, address: str, figures: Callable[[], PoolFigures]
) -> PoolBytes:
    """Store the blocks with a group of ``owners`` ranks.

    Args:
        figures: what the pool holds, as its master says.

    Raises:
        KvppError: something could not be stored.
    """
    before = figures()
    client = open_store(address)
    ranks = [PoolRank(address, client, setting.blocks, _STAGING_BYTES) for _ in range(owners)]
    group = ThreadGroup(owners)
    layer_owners = assign_owners([LAYER_BLOCK_BYTES] * setting.layers, owners)
    drafts = range(setting.layers, setting.layers + setting.drafts)
    names = [hashlib.sha256(f"{owners}:{n}".encode()).digest() for n in range(setting.blocks)]
    blocks = block_list(names, range(setting.blocks))

    def store(rank: int) -> None:
        owned = [layer for layer, owner in enumerate(layer_owners) if owner == rank]
        layers = range(owned[0], owned[-1] + 1) if owned else range(0)
        held = make_caches(layers, setting.blocks) | make_caches(drafts, setting.blocks)
        ranks[rank].register(held, rank=rank, gather=group.gather_for(rank))
        ranks[rank].put(blocks)

    with ThreadPoolExecutor(owners) as threads:
        list(threads.map(store, range(owners)))
    after = figures()
    for rank in ranks:
        rank.close()
    block_bytes = (setting.layers + setting.drafts) * LAYER_BLOCK_BYTES
    logical = setting.blocks * block_bytes
    objects = after.objects - before.objects
    copies = (owners - 1) * setting.drafts * LAYER_BLOCK_BYTES * setting.blocks
    stored = after.stored_bytes - before.stored_bytes
    return PoolBytes(
        owners=owners,
        blocks=setting.blocks,
        objects=objects,
        stored_bytes=stored,
        logical_bytes=logical,
        bytes_per_kv_byte=stored / logical,
        header_share=objects * HEADER_BYTES / logical,
        copied_drafts=(stored + copies) / logical,
    )
