"""One rank's part of the pool: shards, and the caches behind them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvpp_connect.connectors.ascend_store.objects import object_bytes
from kvpp_connect.connectors.ascend_store.shards import Shard


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardCaches:
    """A shard whose caches this rank holds: one tensor a component, in the shard's order."""

    shard: Shard
    caches: tuple[torch.Tensor, ...]

    @property
    def object_bytes(self) -> int:
        """Size of one block's object."""
        return object_bytes(self.shard.payload_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Blocks ``[start, end)`` of an order, for one shard."""

    caches: ShardCaches
    start: int
    end: int


def cut_batches(shards: Sequence[ShardCaches], blocks: int, rows: int) -> list[Batch]:
    """Cut an order of so many blocks into batches of at most ``rows`` objects.

    The batches of the first blocks come first, whatever their shard.
    """
    return [
        Batch(caches, start, min(start + rows, blocks))
        for start in range(0, blocks, rows)
        for caches in shards
    ]
