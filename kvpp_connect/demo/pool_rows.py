"""The rows of `kvpp demo pool` as data, and what each of them must find in the pool."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvpp_connect.demo.pool_servers import PoolServers
from kvpp_connect.demo.rows import Launchable
from kvpp_connect.demo.servers import VllmServer

ENGINE_PORTS_NEEDED = 3
BLOCK_TOKENS = 16  # fixed by vLLM's CPU kernels
_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRowPlan:
    """One row of the table.

    Attributes:
        cut: rows of one cut share objects; empty for a server without pool.
        shards: objects that a block becomes.
    """

    name: str
    title: str
    server: Launchable
    cut: str = ""
    shards: int = 0


Stages = tuple[tuple[PoolRowPlan, ...], ...]
"""Servers of one stage run at the same time, and answer one after the other."""


class PoolRowPlanner(Protocol):
    """Makes the rows; the first is the one that the others are compared with."""

    def __call__(
        self, model: Path, ports: Sequence[int], pool: PoolServers, *, kv_cache_bytes: int
    ) -> Stages:
        """See plan_pool_rows()."""
        ...


def plan_pool_rows(
    model: Path, ports: Sequence[int], pool: PoolServers, *, kv_cache_bytes: int
) -> Stages:
    """The five rows: what fills the pool is gone when others hit it.

    Args:
        model: checkpoint directory.
        ports: ENGINE_PORTS_NEEDED of them, all different.
        kv_cache_bytes: per rank of every server.
    """
    plain, fill, single = ports
    # The second stage takes over ports that the first one holds: free ones get lost meanwhile.
    hit, off = plain, fill

    def server(name: str, port: int, ranks: int, *, kvpp: bool, pooled: bool = True) -> VllmServer:
        return VllmServer(
            name=name,
            model=model,
            port=port,
            tensor_parallel_size=ranks,
            kv_cache_bytes=kv_cache_bytes,
            additional_config={"enable_kvpp": True} if kvpp else None,
            kv_transfer_config=pool.kv_transfer_config() if pooled else None,
        )

    first = (
        PoolRowPlan(
            name="plain",
            title="plain vLLM, TP=2",
            server=server("plain", plain, _RANKS, kvpp=False, pooled=False),
        ),
        PoolRowPlan(
            name="fill",
            title="KVPP, TP=2: fills the pool",
            server=server("fill", fill, _RANKS, kvpp=True),
            cut="tp2",
            shards=_RANKS,
        ),
        PoolRowPlan(
            name="tp1",
            title="KVPP off, TP=1: another cut",
            server=server("tp1", single, 1, kvpp=False),
            cut="tp1",
            shards=1,
        ),
    )
    second = (
        PoolRowPlan(
            name="hit",
            title="KVPP, TP=2, a fresh instance",
            server=server("hit", hit, _RANKS, kvpp=True),
            cut="tp2",
            shards=_RANKS,
        ),
        PoolRowPlan(
            name="off",
            title="KVPP off, TP=2: the same cut",
            server=server("off", off, _RANKS, kvpp=False),
            cut="tp2",
            shards=_RANKS,
        ),
    )
    return first, second


@dataclass(slots=True)
class ExpectedPool:
    """What the pool holds if every computed block gets there and nothing is lost.

    Counted over tokens alone, with nothing of the connector: prefixes of whole blocks, by cut.
    """

    blocks: set[tuple[object, ...]] = field(default_factory=set)

    def hit_tokens(self, cut: str, prompt: Sequence[object]) -> int:
        """Tokens of a prompt that are there. Its last token is computed in any case."""
        found = 0
        while self._prefix(cut, prompt, found + 1) in self.blocks:
            found += 1
        return min(found, (len(prompt) - 1) // BLOCK_TOKENS) * BLOCK_TOKENS

    def add(self, cut: str, computed: Sequence[object]) -> None:
        """Take in the whole blocks of tokens whose KV a server has computed."""
        for count in range(1, len(computed) // BLOCK_TOKENS + 1):
            self.blocks.add(self._prefix(cut, computed, count))

    def count(self, cut: str) -> int:
        """Blocks of a cut."""
        return sum(prefix[0] == cut for prefix in self.blocks)

    @staticmethod
    def _prefix(cut: str, tokens: Sequence[object], blocks: int) -> tuple[object, ...]:
        size = blocks * BLOCK_TOKENS
        # A prompt that is too short has no such prefix.
        return (cut, *tokens[:size]) if len(tokens) >= size else ()
