"""A whole group stores its blocks, another engine loads them: every byte, and nothing else."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from fake_store import FakePool, FakeStore
from pool_rank import hashes, until

from kvpp_connect.connectors.ascend_store.backends.settings import MooncakeSettings
from kvpp_connect.connectors.ascend_store.config import PoolConfig
from kvpp_connect.connectors.ascend_store.loader import Loader
from kvpp_connect.connectors.ascend_store.orders import (
    LoadOrder,
    PoolOrders,
    PoolReport,
    PutOrder,
    block_list,
)
from kvpp_connect.connectors.ascend_store.shards import layout_digest
from kvpp_connect.connectors.ascend_store.worker_side import RankPlace, WorkerSide
from kvpp_connect.connectors.caches import BlockShape
from kvpp_connect.errors import ConfigError
from kvpp_connect.layout import CacheComponent, TokenShard, place_rank, plan_group, stage_layers

TOKENS = 4
WIDTHS = {"attn": 6, "indexer": 2}
SCOPE = "kvpp1:model:layout"


def name_of(layer, part):
    return f"model.layers.{layer}.self_attn.{part}"


def page_bytes(part):
    return 4 * TOKENS * WIDTHS[part]


class Gather:
    """Exchanges bytes between the threads that play a group's ranks."""

    def __init__(self, ranks):
        self._rows = [b""] * ranks
        self._barrier = Barrier(ranks)

    def __call__(self, rank, row):
        self._rows[rank] = row
        self._barrier.wait(timeout=30)
        return list(self._rows)


class Engine:
    """One pipeline stage of an engine, all its ranks in this process.

    Attributes:
        memory: by rank, the allocation behind its caches.
        caches: by rank, its cache tensors by layer name, scratch included.
        held: by rank, the layers whose caches it really holds.
    """

    def __init__(self, pool, ranks, *, kvpp, layers=5, drafts=1, blocks=10, **settings):
        self.blocks = blocks
        self.ranks = ranks
        targets = {
            i: [part for part in WIDTHS if part == "attn" or i % 2 == 0] for i in range(layers)
        }
        names = [name_of(i, part) for i, parts in targets.items() for part in parts]
        draft_names = [name_of(100 + i, "attn") for i in range(drafts)]
        placements = [None] * ranks
        if kvpp:
            placements = self._plan(targets, draft_names)
        self.memory, self.caches, self.held = [], [], []
        for rank in range(ranks):
            self._allocate(names + draft_names, placements[rank])
        config = PoolConfig(
            store=MooncakeSettings(master_server_address="a:1"),
            staging_bytes=1 << 20,
            **{"load_timeout_s": 600.0, **settings},
        )
        self.stores = [FakeStore(pool) for _ in range(ranks)]
        self.sides = [
            WorkerSide(
                config=config,
                shape=BlockShape(num_blocks=blocks, block_tokens=TOKENS),
                open_store=lambda rank=rank: self.stores[rank],
            )
            for rank in range(ranks)
        ]
        self._register(placements)

    def _plan(self, targets, draft_names):
        stage = stage_layers(
            targets={
                i: [
                    CacheComponent(layer_name=name_of(i, part), page_bytes=page_bytes(part))
                    for part in parts
                ]
                for i, parts in targets.items()
            },
            drafts=[
                CacheComponent(layer_name=name, page_bytes=page_bytes("attn"))
                for name in draft_names
            ],
        )
        layout = plan_group(stage, self.ranks)
        return [place_rank(layout, rank, self.blocks) for rank in range(self.ranks)]

    def _allocate(self, names, placement):
        if placement is None:
            offsets = dict(
                zip(
                    names,
                    itertools.accumulate(
                        (self.blocks * page_bytes(n.rsplit(".")[-1]) for n in names), initial=0
                    ),
                    strict=False,
                )
            )
            size = sum(self.blocks * page_bytes(n.rsplit(".")[-1]) for n in names)
        else:
            offsets = {name: place.offset for name, place in placement.by_layer_name.items()}
            size = placement.total_bytes
        memory = torch.zeros(size // 4, dtype=torch.float32)
        self.memory.append(memory.view(torch.uint8))
        self.memory[-1].fill_(0x77)
        self.caches.append({name: self._view(memory, name, offsets[name]) for name in names})
        self.held.append(set(names) if placement is None else set(placement.persistent_layers))

    def _view(self, memory, name, offset):
        width = WIDTHS[name.rsplit(".")[-1]]
        shape = (self.blocks, 1, TOKENS, width)
        return memory.as_strided(shape, (TOKENS * width, TOKENS * width, width, 1), offset // 4)

    def _register(self, placements):
        gather = Gather(self.ranks)

        def register(rank):
            self.sides[rank].register(
                self.caches[rank],
                RankPlace(
                    stage=0,
                    rank=rank,
                    gather=lambda row: gather(rank, row),
                    placement=placements[rank],
                    tokens=TokenShard(),
                    set_gate=lambda gate: None,
                ),
            )

        with ThreadPoolExecutor(self.ranks) as threads:
            list(threads.map(register, range(self.ranks)))

    def fill(self, blocks):
        """Write into each rank's own caches what the blocks hold; ``blocks``: place by hash."""
        for rank in range(self.ranks):
            for layer in self.held[rank]:
                for block, place in blocks.items():
                    self.page(rank, layer, place).copy_(content(layer, block))

    def page(self, rank, layer, place):
        return self.caches[rank][layer][place].reshape(-1).view(torch.uint8)

    def put(self, blocks, job=0):
        """Let all ranks store blocks; answer what they say together."""
        orders = PoolOrders(scope=SCOPE, puts=(PutOrder(job=job, blocks=as_list(blocks)),))
        for side in self.sides:
            side.start_puts(orders)
        whole = PoolReport()

        def is_through():
            for side in self.sides:
                whole.add(side.take_report() or PoolReport())
            return job in whole.puts and whole.puts[job].ended == self.ranks

        until(is_through)
        return whole

    def load(self, blocks, *, in_step=False, request_id="r"):
        """Load blocks on all ranks; answer invalid blocks, and how many ranks said it ended."""
        self.begin_load(blocks, in_step=in_step, request_id=request_id)
        if in_step:
            return set().union(*(side.take_results().invalid_block_ids for side in self.sides)), 0
        return self.results(request_id)

    def begin_load(self, blocks, *, in_step=False, request_id="r"):
        load = LoadOrder(request_id=request_id, blocks=as_list(blocks), in_step=in_step)
        for side in self.sides:
            side.start_loads(PoolOrders(scope=SCOPE, loads=(load,)))

    def results(self, request_id="r"):
        invalid, ended = set(), []

        def is_through():
            for side in self.sides:
                results = side.take_results()
                invalid.update(results.invalid_block_ids)
                ended.extend(results.received)
            return len(ended) >= self.ranks

        until(is_through)
        assert ended == [request_id] * self.ranks
        return invalid, len(ended)

    def assert_holds(self, blocks, before):
        """Each own (layer, block) holds the right bytes, and all else is as it was before."""
        for rank in range(self.ranks):
            expected = before[rank].clone()
            base = self.memory[rank].data_ptr()
            for layer in self.held[rank]:
                for block, place in blocks.items():
                    begin = self.page(rank, layer, place).data_ptr() - base
                    size = page_bytes(layer.rsplit(".")[-1])
                    expected[begin : begin + size] = content(layer, block)
            assert self.memory[rank].equal(expected), f"rank {rank}"

    def snapshot(self):
        return [memory.clone() for memory in self.memory]

    def close(self):
        for store, side in zip(self.stores, self.sides, strict=True):
            store.release()
            side.close()


def as_list(blocks):
    return block_list(list(blocks), list(blocks.values()))


def content(layer, block):
    """Bytes of a (layer, block); no two hold the same."""
    rng = np.random.default_rng([*block[:2], *layer.encode()])
    size = page_bytes(layer.rsplit(".")[-1])
    return torch.from_numpy(rng.integers(0, 256, size, np.uint8))


STORED = dict(zip(hashes(5), [3, 1, 8, 0, 6], strict=True))
LOADED = dict(zip(hashes(5), [2, 9, 1, 7, 4], strict=True))


@pytest.fixture
def pool():
    return FakePool()


@pytest.fixture
def make_engine(pool):
    engines = []

    def make(ranks, **options):
        engines.append(Engine(pool, ranks, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def filled(make_engine, ranks=3, **options):
    """An engine that has stored its blocks."""
    engine = make_engine(ranks, **options)
    engine.fill(STORED)
    report = engine.put(STORED)
    assert report.puts[0].failed == set()
    return engine


@pytest.mark.parametrize(
    ("from_kvpp", "to_kvpp", "drafts"),
    [
        (True, True, 0),
        (True, True, 1),
        (True, True, 2),
        (False, False, 0),
        (False, False, 2),
        # With drafts, which KVPP stores in a shard of their own, these have different layouts.
        (True, False, 0),
        (False, True, 0),
    ],
)
def test_what_one_engine_stores_another_loads_byte_for_byte_and_nothing_else(
    make_engine, from_kvpp, to_kvpp, drafts
):
    filled(make_engine, kvpp=from_kvpp, drafts=drafts)
    target = make_engine(3, kvpp=to_kvpp, drafts=drafts)
    before = target.snapshot()
    assert target.load(LOADED) == (set(), 3)
    target.assert_holds(LOADED, before)


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_engines_of_any_size_store_each_byte_once(make_engine, pool, ranks):
    engine = filled(make_engine, ranks=ranks, kvpp=ranks > 1, layers=5, drafts=1)
    caches = set().union(*engine.held)
    payload = sum(page_bytes(layer.rsplit(".")[-1]) for layer in caches)
    assert sum(len(content) - 64 for content in pool.objects.values()) == 5 * payload
    # Each object is one rank's business.
    assert sum(store.keys["exists"] for store in engine.stores) == len(pool.objects)
    before = engine.snapshot()
    assert engine.load(LOADED) == (set(), ranks)
    engine.assert_holds(LOADED, before)


def test_replicas_share_the_work(make_engine):
    engine = filled(make_engine, kvpp=False, layers=6, drafts=0)
    assert all(store.keys["put"] == 5 for store in engine.stores)


def test_a_load_in_the_step_has_ended_when_the_call_returns(make_engine):
    filled(make_engine, kvpp=True)
    target = make_engine(3, kvpp=True)
    before = target.snapshot()
    assert target.load(LOADED, in_step=True) == (set(), 0)
    target.assert_holds(LOADED, before)


def keys_of(pool, block):
    return [key for key in sorted(pool.objects) if key.endswith(block.hex())]


@pytest.mark.parametrize("in_step", [False, True])
def test_one_missing_object_makes_its_block_and_all_behind_it_invalid(make_engine, pool, in_step):
    filled(make_engine, kvpp=True)
    pool.lose(keys_of(pool, hashes(5)[2])[:1])
    target = make_engine(3, kvpp=True)
    invalid, _ = target.load(LOADED, in_step=in_step)
    assert invalid == {1, 7, 4}
    lost = set()
    for side in target.sides:
        lost |= (side.take_report() or PoolReport()).lost
    assert lost == {hashes(5)[2]}


def test_a_result_is_told_once(make_engine):
    filled(make_engine, kvpp=True)
    target = make_engine(3, kvpp=True)
    target.load(LOADED)
    for side in target.sides:
        again = side.take_results()
        assert (again.received, again.invalid_block_ids) == (set(), set())


def test_a_load_that_fails_while_results_are_taken_is_not_told_as_loaded(
    make_engine, pool, monkeypatch
):
    target = make_engine(1, kvpp=False)  # nothing is in the pool
    (side,), (store,) = target.sides, target.stores
    store.block("get")
    target.begin_load(LOADED)
    assert store.waiting.wait(30)
    is_due = Loader.is_due

    def ends_behind(loader, load):
        due = is_due(loader, load)
        store.release()
        assert load.ended.wait(30)
        return due

    monkeypatch.setattr(Loader, "is_due", ends_behind)
    first, second = side.take_results(), side.take_results()
    for results in (first, second):
        assert bool(results.received) == bool(results.invalid_block_ids)
    assert first.received | second.received == {"r"}
    assert first.invalid_block_ids | second.invalid_block_ids == set(LOADED.values())


def test_a_cancelled_load_ends_at_once_and_writes_nothing(make_engine):
    filled(make_engine, kvpp=True)
    target = make_engine(3, kvpp=True)
    before = target.snapshot()
    for store in target.stores:
        store.block("get")
    target.begin_load(LOADED)
    for store in target.stores:
        assert store.waiting.wait(30)
    for side in target.sides:
        side.start_loads(PoolOrders(scope=SCOPE, cancelled=frozenset({"r", "unknown"})))
        assert side.take_results().received == {"r"}, "without waiting for the store"
    for store in target.stores:
        store.release()
    # A second load, into other blocks, is behind the first one.
    behind = {hashes(5)[0]: 0}
    target.load(behind, request_id="second")
    target.assert_holds(behind, before)


def test_one_rank_of_a_stage_describes_it_and_once(make_engine):
    engine = make_engine(3, kvpp=True)
    told = [side.take_report() for side in engine.sides]
    assert told[1:] == [None, None]
    (stage,) = told[0].stages
    assert (stage.stage, stage.group_size) == (0, 3)
    assert [shard.name for shard in stage.shards] == ["s0-0", "s0-1", "s0-2", "s0-d"]
    assert engine.sides[0].take_report() is None


def stage_of(engine):
    return engine.sides[0].take_report().stages[0]


def test_an_engine_with_kvpp_and_one_without_have_the_same_layout(make_engine):
    digests = {
        layout_digest([stage_of(make_engine(3, kvpp=kvpp, drafts=0))], TOKENS)
        for kvpp in (True, False)
    }
    assert len(digests) == 1


def test_a_failed_object_is_told_by_the_rank_that_failed(make_engine, pool):
    engine = make_engine(2, kvpp=True)
    engine.fill(STORED)
    engine.put(STORED)
    victim = keys_of(pool, hashes(5)[3])[-1]
    pool.objects.clear()
    pool.failing.add(victim)
    assert engine.put(STORED, job=1).puts[1].failed == {3}


def test_a_rank_that_owns_nothing_takes_part(make_engine):
    engine = filled(make_engine, ranks=4, kvpp=True, layers=2, drafts=0)
    assert engine.held[3] == set()
    before = engine.snapshot()
    assert engine.load(LOADED) == (set(), 4)
    engine.assert_holds(LOADED, before)


def test_staging_that_is_too_small_for_an_object_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"raise kv_connector_extra_config\.staging_bytes"):
        LargeEngine()


class LargeEngine(Engine):
    """Staging is made for blocks of 1 MiB at most."""

    def __init__(self):
        super().__init__(FakePool(), 1, kvpp=False, layers=4, drafts=0, blocks=2)

    def _view(self, memory, name, offset):
        del memory, offset
        return torch.zeros((self.blocks, 1, TOKENS, 1 << 15), dtype=torch.float32)


def test_closing_twice_leaves_the_store(make_engine):
    engine = make_engine(2, kvpp=True)
    for side in engine.sides:
        side.close()
        side.close()
    assert all(store.calls["close"] for store in engine.stores)


def test_a_side_that_was_never_registered_has_no_news():
    side = WorkerSide(
        config=PoolConfig(store=MooncakeSettings(master_server_address="a:1")),
        shape=BlockShape(num_blocks=1, block_tokens=TOKENS),
        open_store=FakeStore,
    )
    side.start_loads(PoolOrders())
    side.start_puts(PoolOrders())
    assert side.take_report() is None
    assert side.take_results().received == set()
    assert side.take_counts() == {}
    side.close()
