"""Ranks of an engine that uses a pool, without the engine: caches, a worker side, its orders.

The caches are as wide as a sparse MLA model keeps them in bfloat16 and FP8: 1,152 bytes of latent
and rope, 132 bytes of index keys and their scale, for each token and layer.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from kvpp_connect.connectors.ascend_store.backends.base import PoolStore
from kvpp_connect.connectors.ascend_store.backends.create import create_store
from kvpp_connect.connectors.ascend_store.backends.mooncake import MooncakeStore
from kvpp_connect.connectors.ascend_store.backends.settings import MooncakeSettings
from kvpp_connect.connectors.ascend_store.config import PoolConfig
from kvpp_connect.connectors.ascend_store.orders import (
    BlockList,
    LoadOrder,
    PoolOrders,
    PutOrder,
)
from kvpp_connect.connectors.ascend_store.worker_side import RankPlace, WorkerSide
from kvpp_connect.connectors.caches import BlockShape
from kvpp_connect.errors import KvppError, PeerError
from kvpp_connect.layout import TokenShard

MAIN_TOKEN_BYTES = 1152
INDEX_TOKEN_BYTES = 132
TOKEN_BYTES = MAIN_TOKEN_BYTES + INDEX_TOKEN_BYTES
BLOCK_TOKENS = 64
LAYER_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
SCOPE = "kvpp1:bench:path"
_LIMIT_S = 120.0
_POLL_S = 0.0002


def store_settings(address: str) -> MooncakeSettings:
    """Settings of a client that lends nothing."""
    return MooncakeSettings(master_server_address=address, protocol="tcp", global_segment_size=0)


def open_store(address: str) -> MooncakeStore:
    """A client of the master at ``address``."""
    store = create_store(store_settings(address), host="127.0.0.1", segment=False)
    assert isinstance(store, MooncakeStore), "the settings are Mooncake's"
    return store


def make_caches(layers: range, num_blocks: int) -> dict[str, torch.Tensor]:
    """Caches of some layers, full of bytes that differ everywhere."""
    caches: dict[str, torch.Tensor] = {}
    for layer in layers:
        name = f"model.layers.{layer}.self_attn"
        caches[f"{name}.attn"] = _random(layer, num_blocks, MAIN_TOKEN_BYTES)
        caches[f"{name}.indexer.k_cache"] = _random(-1 - layer, num_blocks, INDEX_TOKEN_BYTES)
    return caches


def _random(seed: int, num_blocks: int, token_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, 1, BLOCK_TOKENS, token_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


class PoolRank:
    """One rank's worker side, driven as a model's thread would drive it."""

    def __init__(
        self, address: str, store: PoolStore, num_blocks: int, staging_bytes: int | None = None
    ) -> None:
        """Use a store's client, which is closed with the first rank.

        Args:
            staging_bytes: ``None`` for the connector's default.
        """
        config = PoolConfig(store=store_settings(address), load_timeout_s=_LIMIT_S)
        if staging_bytes is not None:
            config = replace(config, staging_bytes=staging_bytes)
        self._side = WorkerSide(
            config=config,
            shape=BlockShape(num_blocks=num_blocks, block_tokens=BLOCK_TOKENS),
            open_store=lambda: store,
        )
        self._jobs = 0

    def register(
        self,
        caches: Mapping[str, torch.Tensor],
        *,
        rank: int = 0,
        gather: Callable[[bytes], list[bytes]] = lambda value: [value],
    ) -> None:
        """Take the caches that this rank holds. Collective, if ``gather`` is."""
        place = RankPlace(
            stage=0,
            rank=rank,
            gather=gather,
            placement=None,
            tokens=TokenShard(),
            set_gate=lambda _: None,  # nothing is broadcast
        )
        self._side.register(caches, place)

    def put(self, blocks: BlockList) -> None:
        """Store blocks; returns when all are through.

        Raises:
            KvppError: one could not be stored, or the time is up.
        """
        self._jobs += 1
        self._side.start_puts(
            PoolOrders(scope=SCOPE, puts=(PutOrder(job=self._jobs, blocks=blocks),))
        )
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            report = self._side.take_report()
            ended = report.puts.get(self._jobs) if report is not None else None
            if ended is not None and ended.ended:
                if ended.failed:
                    raise KvppError(
                        f"{len(ended.failed)} blocks could not be put; the log says why"
                    )
                return
            time.sleep(_POLL_S)
        raise PeerError(f"a put did not end within {_LIMIT_S:g} s")

    def load(self, blocks: BlockList) -> None:
        """Load blocks; returns when all are in the caches.

        Raises:
            KvppError: one could not be loaded.
        """
        order = LoadOrder(request_id="bench", blocks=blocks, in_step=True)
        self._side.start_loads(PoolOrders(scope=SCOPE, loads=(order,)))
        if bad := self._side.take_results().invalid_block_ids:
            raise KvppError(f"{len(bad)} blocks could not be loaded; the log says why")

    def take_counts(self) -> dict[str, float]:
        """The side's counters since the last call."""
        return self._side.take_counts()

    def close(self) -> None:
        """Stop, and leave the store."""
        self._side.close()


class ThreadGroup:
    """Lets threads of one process exchange bytes as ranks of a group do."""

    def __init__(self, ranks: int) -> None:
        self._rows = [b""] * ranks
        self._barrier = threading.Barrier(ranks)

    def gather_for(self, rank: int) -> Callable[[bytes], list[bytes]]:
        """The exchange as one rank calls it."""

        def gather(value: bytes) -> list[bytes]:
            self._rows[rank] = value
            self._barrier.wait(_LIMIT_S)
            rows = list(self._rows)
            self._barrier.wait(_LIMIT_S)
            return rows

        return gather
