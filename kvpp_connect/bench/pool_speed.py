"""Goodput of a rank's puts and loads, beside Mooncake's own calls on as many bytes.

The rank owns some layers and goes all the way of the connector: from scattered blocks into staging,
sealed, looked for in the store, stored; and back, checked, into other blocks. Mooncake alone moves
objects of the same size between one contiguous, registered range of memory and the store, all in
one call. Both take turns, so that other load on the machine hits both alike; all bytes are compared
after each round.
"""

import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from kvpp_connect.bench.pool_rank import LAYER_BLOCK_BYTES, PoolRank, make_caches, open_store
from kvpp_connect.bench.rounds import Spread, spread
from kvpp_connect.connectors.ascend_store.backends.base import Buffer
from kvpp_connect.connectors.ascend_store.objects import object_bytes
from kvpp_connect.connectors.ascend_store.orders import BlockList, block_list
from kvpp_connect.connectors.ascend_store.staging import allocate
from kvpp_connect.errors import KvppError

Way = Literal["put", "load"]
_RAW = "kvpp1:bench:raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSetting:
    """What is moved: ``blocks`` of 64 tokens over ``layers`` of 1,284 bytes per token."""

    layers: int
    blocks: int
    rounds: int

    @property
    def kv_bytes(self) -> int:
        """KV that is moved each way, once."""
        return self.blocks * self.layers * LAYER_BLOCK_BYTES

    @property
    def object_bytes(self) -> int:
        """One block's object, header included."""
        return object_bytes(self.layers * LAYER_BLOCK_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpeed:
    """One direction.

    Attributes:
        path: until the last block is through, by the connector.
        raw: by one call of Mooncake's.
        in_store: mean seconds of a round in which the connector's threads are in calls of the
            store that move bytes, all threads added up.
        raw_ratio: goodput of the connector to Mooncake's.
    """

    way: Way
    kv_bytes_per_s: float
    path: Spread
    raw: Spread
    in_store_s: float
    raw_ratio: float


def measure_speed(setting: SpeedSetting, address: str) -> tuple[PoolSpeed, ...]:
    """Put and load in rounds, one more than asked for: the first warms up.

    Raises:
        KvppError: something failed, or bytes are wrong.
    """
    path, raw = _Path(setting, address), _Raw(setting, address)
    times: dict[tuple[Way, str], list[float]] = {}
    in_store = {"put": 0.0, "load": 0.0}
    for number in range(setting.rounds + 1):
        pair = (("path", path), ("raw", raw))
        for way in ("put", "load"):
            for name, mover in pair if number % 2 else pair[::-1]:
                work = mover.put if way == "put" else mover.load
                times.setdefault((way, name), []).append(_timed(work, number))
        path.check()
        raw.check()
        counts = path.rank.take_counts()
        if number:
            in_store["put"] += counts["pool_put_seconds"]
            in_store["load"] += counts["pool_load_seconds"]
        # Objects of a round that is over would only fill the pool.
        path.store.remove_prefix("kvpp1:bench:")
    path.rank.close()
    raw.close()
    return tuple(
        _speed(setting, way, times[way, "path"], times[way, "raw"], in_store[way])
        for way in ("put", "load")
    )


def _speed(
    setting: SpeedSetting, way: Way, path_s: list[float], raw_s: list[float], in_store_s: float
) -> PoolSpeed:
    path, raw = spread(path_s[1:]), spread(raw_s[1:])
    return PoolSpeed(
        way=way,
        kv_bytes_per_s=setting.kv_bytes / path.median_s,
        path=path,
        raw=raw,
        in_store_s=in_store_s / setting.rounds,
        raw_ratio=raw.median_s / path.median_s,
    )


def _timed(work: Callable[[int], None], number: int) -> float:
    begin = time.perf_counter()
    work(number)
    return time.perf_counter() - begin


class _Path:
    """The connector's way: half of the blocks hold KV, and it is loaded into the other half."""

    def __init__(self, setting: SpeedSetting, address: str) -> None:
        num_blocks = 2 * setting.blocks
        ids = list(range(num_blocks))
        random.Random(0).shuffle(ids)
        self._sources, self._targets = ids[: setting.blocks], ids[setting.blocks :]
        self._caches = make_caches(range(setting.layers), num_blocks)
        self.store = open_store(address)
        self.rank = PoolRank(address, self.store, num_blocks)
        self.rank.register(self._caches)

    def put(self, number: int) -> None:
        """Store the blocks under names of this round."""
        self.rank.put(self._blocks(number, self._sources))

    def load(self, number: int) -> None:
        """Load what this round stored."""
        self.rank.load(self._blocks(number, self._targets))

    def check(self) -> None:
        """Compare all bytes, then forget them."""
        sources, targets = torch.tensor(self._sources), torch.tensor(self._targets)
        for name, cache in self._caches.items():
            if not torch.equal(cache[sources], cache[targets]):
                raise KvppError(f"{name} was loaded wrong")
            cache[targets] = 0

    @staticmethod
    def _blocks(number: int, ids: list[int]) -> BlockList:
        return block_list(_names(number, len(ids)), ids)


class _Raw:
    """Mooncake's own calls."""

    def __init__(self, setting: SpeedSetting, address: str) -> None:
        size, count = setting.object_bytes, setting.blocks
        self._store = open_store(address)
        self._memory = allocate(2 * count * size, pinned=False)
        self._memory[: count * size].random_(0, 256)
        begin = self._memory.data_ptr()
        self._store.register(Buffer(begin, self._memory.numel()))
        self._sources = [begin + index * size for index in range(count)]
        self._targets = [begin + (count + index) * size for index in range(count)]
        self._sizes = [size] * count

    def put(self, number: int) -> None:
        """Store all objects."""
        codes = self._store.native.batch_put_from(self._keys(number), self._sources, self._sizes)
        if any(codes):
            raise KvppError(f"mooncake alone cannot put (codes {sorted(set(codes))})")

    def load(self, number: int) -> None:
        """Read what this round stored."""
        codes = self._store.native.batch_get_into(self._keys(number), self._targets, self._sizes)
        if codes != self._sizes:
            raise KvppError(f"mooncake alone cannot get (codes {sorted(set(codes))})")

    def check(self) -> None:
        """Compare all bytes, then forget them."""
        sources, targets = self._memory.chunk(2)
        if not torch.equal(sources, targets):
            raise KvppError("mooncake alone has read wrong bytes")
        targets.zero_()

    def close(self) -> None:
        """Leave the store."""
        self._store.close()

    def _keys(self, number: int) -> list[str]:
        return [f"{_RAW}:s0-0:{name.hex()}" for name in _names(number, len(self._sizes))]


def _names(number: int, blocks: int) -> list[bytes]:
    return [hashlib.sha256(f"{number}:{index}".encode()).digest() for index in range(blocks)]
