"""What it costs to find out how much of a long prompt is in the pool.

A prompt of many blocks, each of which is an object of every owner, through the scheduler side's own
look-up thread; and ``batch_is_exist`` of all these objects in one call of Mooncake's.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvpp_connect.bench.pool_rank import open_store, store_settings
from kvpp_connect.bench.rounds import Spread, spread
from kvpp_connect.connectors.ascend_store.backends.base import Buffer
from kvpp_connect.connectors.ascend_store.backends.mooncake import MooncakeStore
from kvpp_connect.connectors.ascend_store.health import StoreHealth
from kvpp_connect.connectors.ascend_store.lookups import LookupService
from kvpp_connect.connectors.ascend_store.shards import object_key
from kvpp_connect.connectors.ascend_store.staging import allocate
from kvpp_connect.errors import KvppError, PeerError

Found = Literal["all", "nothing"]

_SCOPE = "kvpp1:bench:lookup"
_OBJECT_BYTES = 64
_PUT_KEYS = 1000
_LIMIT_S = 60.0
_POLL_S = 0.0001


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupSetting:
    """Blocks of the prompt, and objects of each block."""

    blocks: int
    owners: int
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupCost:
    """Looking up one prompt.

    Attributes:
        found: "all": every object is there; "nothing": none is.
        asked_keys: keys that the store is asked for.
        lookup: from the question to its answer.
        raw: the store's own call on all keys.
    """

    found: Found
    keys: int
    asked_keys: int
    lookup: Spread
    raw: Spread


class _CountingStore(MooncakeStore):
    """Counts what it is asked for."""

    asked = 0

    def exists(self, keys: Sequence[str]) -> list[bool]:
        self.asked += len(keys)
        return super().exists(keys)


def measure_lookups(setting: LookupSetting, address: str) -> tuple[LookupCost, ...]:
    """Look up a prompt that is there, and one of which nothing is.

    Raises:
        KvppError: the store failed, or an answer is wrong.
    """
    shards = [f"s0-{owner}" for owner in range(setting.owners)]
    there, absent = (_names(word, setting.blocks) for word in ("there", "absent"))
    raw = open_store(address)
    _fill(raw, _keys(there, shards))
    asking = _CountingStore(
        store_settings(address), host="127.0.0.1", segment=False, protocol="tcp"
    )
    service = LookupService(asking, StoreHealth("mooncake (benchmark)"))
    service.ask_about(shards)
    costs: list[LookupCost] = []
    questions: tuple[tuple[Found, list[bytes]], ...] = (("all", there), ("nothing", absent))
    for found, names in questions:
        keys = _keys(names, shards)
        lookups: list[float] = []
        raws: list[float] = []
        for _ in range(setting.rounds + 1):  # the first one warms up
            asking.asked = 0
            expected = len(names) if found == "all" else 0
            lookups.append(_timed(lambda: _ask(service, names, expected)))  # noqa: B023 - called at once
            raws.append(_timed(lambda: raw.native.batch_is_exist(keys)))  # noqa: B023 - likewise
        costs.append(
            LookupCost(
                found=found,
                keys=len(keys),
                asked_keys=asking.asked,
                lookup=spread(lookups[1:]),
                raw=spread(raws[1:]),
            )
        )
    raw.remove_prefix(f"{_SCOPE}:")
    service.close()
    raw.close()
    return tuple(costs)


def _ask(service: LookupService, names: Sequence[bytes], expected: int) -> None:
    lookup = service.ask(_SCOPE, names)
    deadline = time.monotonic() + _LIMIT_S
    while lookup.blocks is None:
        if time.monotonic() > deadline:
            raise PeerError(f"a look-up was not answered within {_LIMIT_S:g} s")
        time.sleep(_POLL_S)
    if lookup.blocks != expected:
        raise KvppError(f"a look-up found {lookup.blocks} blocks, expected {expected}")


def _fill(store: MooncakeStore, keys: Sequence[str]) -> None:
    memory = allocate(_OBJECT_BYTES, pinned=False)
    store.register(Buffer(memory.data_ptr(), _OBJECT_BYTES))
    for start in range(0, len(keys), _PUT_KEYS):
        part = list(keys[start : start + _PUT_KEYS])
        addresses, sizes = [memory.data_ptr()] * len(part), [_OBJECT_BYTES] * len(part)
        codes = store.native.batch_put_from(part, addresses, sizes)
        if any(codes):
            raise KvppError(f"the pool cannot be filled (codes {sorted(set(codes))})")


def _names(word: str, blocks: int) -> list[bytes]:
    return [hashlib.sha256(f"{word}:{index}".encode()).digest() for index in range(blocks)]


def _keys(names: Sequence[bytes], shards: Sequence[str]) -> list[str]:
    return [object_key(_SCOPE, shard, name) for name in names for shard in shards]


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
