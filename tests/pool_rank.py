"""One rank's caches and what its loads and puts need, around a fake store."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import torch
from clocks import Clock
from fake_store import FakePool, FakeStore

from kvpp_connect.connectors.ascend_store.backends.base import Buffer
from kvpp_connect.connectors.ascend_store.copying import HostCopier
from kvpp_connect.connectors.ascend_store.counters import PoolCounters
from kvpp_connect.connectors.ascend_store.health import StoreHealth
from kvpp_connect.connectors.ascend_store.loader import Loader, LoadTools
from kvpp_connect.connectors.ascend_store.objects import seal
from kvpp_connect.connectors.ascend_store.putter import Putter
from kvpp_connect.connectors.ascend_store.shard_caches import ShardCaches
from kvpp_connect.connectors.ascend_store.shards import PoolComponent, Shard, object_key
from kvpp_connect.connectors.ascend_store.staging import Staging, allocate
from kvpp_connect.layout import TokenShard

SCOPE = "kvpp1:model:layout"
PAGES = (24, 40)
"""Bytes of a block in each of a shard's two caches."""
OBJECT_BYTES = 64 + sum(PAGES)
BLOCKS = 12
ROW_BYTES = 128  # in staging


def hashes(count, seed=0):
    return tuple(bytes([seed, i]) * 16 for i in range(count))


def shard(name, writer=0):
    components = tuple(
        PoolComponent(layer_name=f"{name}.layers.{i}.attn", page_bytes=page, dtype="uint8")
        for i, page in enumerate(PAGES)
    )
    return Shard(name=name, writer=writer, components=components, tokens=TokenShard())


def key(name, block):
    return object_key(SCOPE, name, block)


def payload(name, block):
    """What a block's object holds beside its header; nothing else holds the same."""
    rng = np.random.default_rng([*block[:2], *name.encode()])
    return rng.integers(0, 256, sum(PAGES), np.uint8)


def sealed(name, block):
    """A block's whole object."""
    row = np.zeros((1, OBJECT_BYTES), np.uint8)
    row[0, 64:] = payload(name, block)
    seal(row, [key(name, block)])
    return row.tobytes()


def until(condition, what="did not happen"):
    deadline = time.monotonic() + 30
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.001)
    return value


class EnteredCopier(HostCopier):
    """Copies in threads that were entered, as a device's copier has to."""

    def __init__(self):
        self._thread = threading.local()

    def enter_thread(self):
        self._thread.entered = True

    def gather(self, *arguments):
        assert self._thread.entered
        super().gather(*arguments)

    def scatter(self, *arguments):
        assert self._thread.entered
        super().scatter(*arguments)


class Rank:
    """One rank with some shards.

    Attributes:
        memory: by shard, the allocation behind its caches.
        views: by shard, its caches; blocks lie further apart than they are long.
    """

    def __init__(self, *names, pool=None, rows=2, slots=2, threads=2):
        """Args: rows: objects in a batch."""
        self.clock = Clock()
        self.pool = pool or FakePool()
        self.store = FakeStore(self.pool)
        self.health = StoreHealth("fake", self.clock)
        self.counters = PoolCounters()
        self.copier = EnteredCopier()
        self.memory, self.views = {}, {}
        for name in names:
            memory = torch.full((len(PAGES), BLOCKS, 48), 0xEE, dtype=torch.uint8)
            self.memory[name] = memory
            self.views[name] = tuple(memory[i, :, :page] for i, page in enumerate(PAGES))
        self.shards = [ShardCaches(shard=shard(n), caches=self.views[n]) for n in names]
        size = slots * rows * ROW_BYTES
        self._memory = allocate(size, pinned=False)
        self.store.register(Buffer(self._memory.data_ptr(), size))
        self.staging = Staging(self._memory, slots, self.clock)
        self._slots = slots
        self._threads = threads
        self._parts = []

    def _arguments(self, timeout_s):
        return {
            "store": self.store,
            "shards": self.shards,
            "copier": self.copier,
            "staging": self.staging,
            "health": self.health,
            "counters": self.counters,
            "timeout_s": timeout_s,
            "threads": self._threads,
            "clock": self.clock,
        }

    def loader(self, timeout_s=10.0, verify=True):
        tools = LoadTools(
            store=self.store,
            copier=self.copier,
            staging=self.staging,
            health=self.health,
            counters=self.counters,
            timeout_s=timeout_s,
            verify=verify,
            clock=self.clock,
        )
        loader = Loader(tools, self.shards, self._threads)
        loader.take_lost = tools.take_lost
        self._parts.append(loader)
        return loader

    def putter(self, timeout_s=10.0):
        self._parts.append(Putter(**self._arguments(timeout_s)))
        return self._parts[-1]

    def close(self):
        self.store.release()
        for part in self._parts:
            part.close()

    def wait_for_staging(self):
        """Return when no batch is under way."""
        slots = [until(lambda: self.staging.take(0)) for _ in range(self._slots)]
        for slot in slots:
            self.staging.give_back(slot)

    def fill(self, blocks):
        """Write what the blocks of these hashes hold; ``blocks``: place by hash."""
        for name, views in self.views.items():
            for block, place in blocks.items():
                content = torch.from_numpy(payload(name, block))
                views[0][place], views[1][place] = content[: PAGES[0]], content[PAGES[0] :]

    def read(self, name, place):
        return bytes(torch.cat([view[place] for view in self.views[name]]).tolist())

    @staticmethod
    def read_payload(name, block):
        return payload(name, block).tobytes()

    def holds(self, name, block, place):
        return self.read(name, place) == payload(name, block).tobytes()

    def untouched(self, name, place):
        return set(self.read(name, place)) == {0xEE}

    def assert_nothing_else_was_written(self, name, places):
        """Args: places: blocks that may have been written."""
        rest = self.memory[name].clone()
        for i, page in enumerate(PAGES):
            for place in places:
                rest[i, place, :page] = 0xEE
        assert rest.eq(0xEE).all()

    def counts(self):
        return SimpleNamespace(
            **{
                name.replace("pool_", "").replace("/", "_"): value
                for name, value in self.counters.take().items()
            }
        )


def store_blocks(pool, names, blocks):
    """Put right objects into a pool without a putter."""
    for name in names:
        for block in blocks:
            pool.objects[key(name, block)] = sealed(name, block)
