"""Ranks of engines on a real pool, without a model: each cache's bytes tell its layer and block."""

import threading
import time

import torch
from builders import equal_stage

from kvpp_connect.connectors.ascend_store.backends.create import create_store
from kvpp_connect.connectors.ascend_store.config import parse_extra_config
from kvpp_connect.connectors.ascend_store.orders import (
    LoadOrder,
    PoolOrders,
    PoolReport,
    PutOrder,
    block_list,
)
from kvpp_connect.connectors.ascend_store.shards import key_scope, layout_digest
from kvpp_connect.connectors.ascend_store.worker_side import RankPlace, WorkerSide
from kvpp_connect.connectors.caches import BlockShape
from kvpp_connect.layout import TokenShard, place_rank, plan_group

LAYERS, WIDTH = 7, 32
SHAPE = BlockShape(num_blocks=12, block_tokens=16)
PAGE_BYTES = SHAPE.block_tokens * WIDTH * 4
STAGE = equal_stage(LAYERS, page_bytes=PAGE_BYTES)
NAMES = [bundle.components[0].layer_name for bundle in STAGE.targets]
HASHES = tuple(bytes([i]) * 32 for i in range(5))
STORED_IN, LOADED_INTO = (9, 2, 3, 0, 7), (1, 11, 4, 5, 10)
UNTOUCHED = -1.0


def value(layer, place):
    """What the block at a place of the prompt holds in a layer."""
    return float(100 * (layer + 1) + place)


class PoolRank:
    """One rank: real memory, the real worker side, a real store client."""

    def __init__(self, address, rank, ranks, *, kvpp):
        extra = {
            "master_server_address": address,
            "global_segment_size": "32MB",
            "local_buffer_size": "1MB",
            "load_async": False,
            "load_timeout_s": 60,
            "staging_bytes": 1 << 20,
        }
        config = parse_extra_config(extra)
        self._rank = rank
        self._placement = None
        if kvpp:
            self._placement = place_rank(plan_group(STAGE, ranks), rank, SHAPE.num_blocks)
        self.memory, self.caches = self._make_caches()
        held = self._placement.persistent_layers if kvpp else NAMES
        self.held = {i: self.caches[name] for i, name in enumerate(NAMES) if name in held}
        self.worker = WorkerSide(
            config=config,
            shape=SHAPE,
            open_store=lambda: create_store(config.store, host="127.0.0.1", segment=True),
        )

    def register(self, gather):
        """Meet the group; answers what the scheduler side is told."""
        place = RankPlace(
            stage=0,
            rank=self._rank,
            gather=gather,
            placement=self._placement,
            tokens=TokenShard(),
            set_gate=lambda gate: None,
        )
        self.worker.register(self.caches, place)
        return self.worker.take_report() or PoolReport()

    def store(self, scope):
        """Store the prompt's blocks; answers the report and the counters."""
        for layer, cache in self.held.items():
            for place, block in enumerate(STORED_IN):
                cache[block] = value(layer, place)
        blocks = block_list(HASHES, STORED_IN)
        self.worker.start_puts(PoolOrders(scope=scope, puts=(PutOrder(job=0, blocks=blocks),)))
        deadline = time.monotonic() + 60
        while not (report := self.worker.take_report()) or not report.puts[0].ended:
            assert time.monotonic() < deadline, "a put takes more than a minute"
            time.sleep(0.01)
        return report.puts[0], self.worker.take_counts()

    def load(self, scope):
        """Load the prompt's blocks; answers those that failed."""
        order = LoadOrder(request_id="r", blocks=block_list(HASHES, LOADED_INTO), in_step=True)
        self.worker.start_loads(PoolOrders(scope=scope, loads=(order,)))
        return self.worker.take_results().invalid_block_ids

    def assert_loaded(self):
        """Every byte: the prompt's blocks are there, and nothing else was written."""
        wanted = torch.full_like(self.memory, UNTOUCHED)
        for layer, cache in self.held.items():
            begin = cache.storage_offset()
            view = wanted[begin : begin + cache.numel()].view(cache.shape)
            for place, block in enumerate(LOADED_INTO):
                view[block] = value(layer, place)
        assert torch.equal(self.memory, wanted)

    def _make_caches(self):
        shape = (SHAPE.num_blocks, 1, SHAPE.block_tokens, WIDTH)
        size = SHAPE.num_blocks * PAGE_BYTES // 4
        if self._placement is None:
            starts = {name: i * size for i, name in enumerate(NAMES)}
            total = size * LAYERS
        else:
            placed = self._placement.components
            starts = {p.component.layer_name: p.offset // 4 for p in placed}
            total = self._placement.total_bytes // 4
        memory = torch.full((total,), UNTOUCHED)
        return memory, {n: memory[at : at + size].view(shape) for n, at in starts.items()}


def scope_of(stage):
    """Where the keys of an engine with this cut begin."""
    return key_scope("0" * 32, layout_digest([stage], SHAPE.block_tokens))


def storing_rank(pipe, address, rank, ranks):
    """Body of a process: a rank under KVPP that stores the prompt. The driver gathers."""

    def gather(mine):
        pipe.send(mine)
        return pipe.recv()

    me = PoolRank(address, rank, ranks, kvpp=True)
    pipe.send(me.register(gather).stages)
    pipe.send(me.store(pipe.recv()))
    pipe.recv()


class Engine:
    """Ranks in this process, which meet in threads."""

    def __init__(self, address, ranks, *, kvpp):
        self.ranks = [PoolRank(address, i, ranks, kvpp=kvpp) for i in range(ranks)]
        rows, barrier = [b""] * ranks, threading.Barrier(ranks)
        reports = [None] * ranks

        def meet(i):
            def gather(mine):
                rows[i] = mine
                barrier.wait(60)
                return list(rows)

            reports[i] = self.ranks[i].register(gather)

        threads = [threading.Thread(target=meet, args=(i,)) for i in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [self.stage] = [stage for report in reports for stage in report.stages]
        self.scope = scope_of(self.stage)

    def close(self):
        for rank in self.ranks:
            rank.worker.close()
