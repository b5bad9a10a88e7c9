"""Whoever holds blocks - requests, leases, puts, quarantine - lets go once, on vLLM's own pool.

A model of all holders walks beside the real books of both connectors: the lease book, the put
ledger, the quarantine and the pins, over a plain and over a guarded block pool.
"""

from collections import Counter

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.v1.core.block_pool import BlockPool

from kvpp_connect.connectors.ascend_store.holds import PutLedger
from kvpp_connect.connectors.ascend_store.orders import PutReport, block_list
from kvpp_connect.connectors.mooncake_v2.leases import LeaseBook
from kvpp_connect.connectors.mooncake_v2.quarantine import BlockQuarantine
from kvpp_connect.connectors.mooncake_v2.wire import LeaseState
from kvpp_connect.seam.api import PoolPins
from kvpp_connect.seam.pool_guard import GuardedBlockPool, guard_pool

BLOCKS, RUNNING, RANKS = 24, 12, 2
LEASE_S = 60.0

pick = strategies.integers(min_value=0, max_value=10**6)


class Holders(RuleBasedStateMachine):
    """Random lives of requests; after each step the pool must agree with the model."""

    @initialize(guarded=strategies.booleans())
    def begin(self, guarded):
        self.now = 0.0
        self.pool = BlockPool(num_gpu_blocks=BLOCKS + 1, enable_caching=True, hash_block_size=16)
        if guarded:
            guard_pool(self.pool, RUNNING)
        pins = PoolPins(self.pool)
        self.leases = LeaseBook("here", LEASE_S, 10 * LEASE_S, clock=lambda: self.now)
        self.ledger = PutLedger(RANKS)
        self.ledger.bind(pins)
        self.quarantine = BlockQuarantine(clock=lambda: self.now)
        self.quarantine.bind(pins)
        self.names = 0
        self.running = {}  # blocks by request
        self.leased = {}  # request: (blocks, lease)
        self.puts = {}  # job: [blocks, ranks that have copied, ranks that are through]
        self.quarantined = []  # (end, blocks)

    # Requests, as vLLM's scheduler serves them

    @rule(new=strategies.integers(1, 5), hits=strategies.integers(0, 4), seed=pick)
    def start(self, new, hits, seed):
        """A request hits blocks that others hold, and takes new ones; or it waits."""
        held = sorted(self.held())
        hit = [self.pool.blocks[b] for b in held[seed % (len(held) + 1) :][:hits]]
        if isinstance(self.pool, GuardedBlockPool):
            with self.pool.reserving_hits(hit):
                self.admit(new, hit)
        else:
            self.admit(new, hit)

    def admit(self, new, hit):
        if new > self.pool.get_num_free_blocks():
            return
        self.pool.touch(hit)
        taken = self.pool.get_new_blocks(new)
        before = self.held()
        assert not {block.block_id for block in taken} & before.keys(), "handed out while held"
        self.names += 1
        self.running[f"r{self.names}"] = [block.block_id for block in (*hit, *taken)]

    @precondition(lambda self: self.running)
    @rule(seed=pick)
    def let_go(self, seed):
        """Finished without a reader, aborted, or preempted: its references go at once."""
        self.free(self.running.pop(self.choose(self.running, seed)))

    @precondition(lambda self: self.running)
    @rule(seed=pick)
    def hand_over(self, seed):
        request = self.choose(self.running, seed)
        blocks = self.running.pop(request)
        lease = self.leases.grant(request)
        if isinstance(self.pool, GuardedBlockPool):
            self.pool.lease(blocks)
        self.leased[request] = (blocks, lease)

    # Leases: ended by their reader, more than once, or by nobody

    @precondition(lambda self: self.leased)
    @rule(seed=pick, times=strategies.integers(1, 2))
    def done(self, seed, times):
        _, lease = self.leased[self.choose(self.leased, seed)]
        before = self.leases.confirm(lease)
        ended = LeaseState.RELEASED if before is LeaseState.HELD else before
        assert [self.leases.release(lease) for _ in range(times)] == [ended] * times

    @precondition(lambda self: self.leased)
    @rule(seed=pick)
    def renew(self, seed):
        _, lease = self.leased[self.choose(self.leased, seed)]
        self.leases.extend(lease)

    @rule(seconds=strategies.sampled_from([1.0, LEASE_S / 2, LEASE_S + 1]))
    def time_passes(self, seconds):
        self.now += seconds

    # Puts: each rank copies, then stores; in any order

    @precondition(lambda self: self.running)
    @rule(seed=pick, count=strategies.integers(1, 4))
    def put(self, seed, count):
        blocks = self.running[self.choose(self.running, seed)][:count]
        hashes = [bytes([number]) for number in range(len(blocks))]
        order = self.ledger.open(block_list(hashes, blocks))
        self.puts[order.job] = [blocks, 0, 0]

    @precondition(lambda self: any(copied < RANKS for _, copied, _ in self.puts.values()))
    @rule(seed=pick)
    def copied(self, seed):
        waiting = {job: put for job, put in self.puts.items() if put[1] < RANKS}
        job = self.choose(waiting, seed)
        self.puts[job][1] += 1
        self.ledger.take_in({job: PutReport(copied=1)})

    @precondition(lambda self: any(ended < copied for _, copied, ended in self.puts.values()))
    @rule(seed=pick, failed=strategies.booleans())
    def stored(self, seed, failed):
        waiting = {job: put for job, put in self.puts.items() if put[2] < put[1]}
        job = self.choose(waiting, seed)
        put = self.puts[job]
        put[2] += 1
        report = PutReport(ended=1, failed={0} if failed else set())
        ended = self.ledger.take_in({job: report})
        assert [one.job for one in ended] == ([job] if put[2] == RANKS else [])
        if put[2] == RANKS:
            del self.puts[job]

    @precondition(lambda self: self.puts)
    @rule(seed=pick)
    def drop(self, seed):
        """A put that no rank was told of, since what it was computed from did not arrive."""
        untold = {job: put for job, put in self.puts.items() if put[1] == put[2] == 0}
        if untold:
            job = self.choose(untold, seed)
            del self.puts[job]
            self.ledger.drop(job)

    # Quarantine, of blocks that a given-up read may still write

    @precondition(lambda self: self.running)
    @rule(seed=pick, seconds=strategies.sampled_from([0.5, 30.0, 200.0]))
    def still_written(self, seed, seconds):
        blocks = self.running[self.choose(self.running, seed)]
        self.quarantine.hold(blocks, seconds)
        self.quarantined.append((self.now + seconds, list(blocks)))

    @rule()
    def step(self):
        """The scheduler's next step: it frees what has ended."""
        self.quarantine.end_due()
        self.quarantined = [one for one in self.quarantined if one[0] > self.now]
        for request in self.leases.take_ended():
            blocks, _ = self.leased.pop(request)  # a KeyError: ended twice
            if isinstance(self.pool, GuardedBlockPool):
                self.pool.end_lease(blocks)
            self.free(blocks)

    # The model

    def choose(self, things, seed):
        return sorted(things)[seed % len(things)]

    def free(self, blocks):
        self.pool.free_blocks(self.pool.blocks[block] for block in reversed(blocks))

    def held(self):
        """How many hold each block."""
        holders = Counter()
        for blocks in self.running.values():
            holders.update(blocks)
        for blocks, _ in self.leased.values():
            holders.update(blocks)
        for blocks, copied, _ in self.puts.values():
            holders.update(blocks if copied < RANKS else ())
        for _, blocks in self.quarantined:
            holders.update(blocks)
        return holders

    @invariant()
    def the_pool_agrees(self):
        if not hasattr(self, "pool"):
            return
        held = self.held()
        assert {b.block_id: b.ref_cnt for b in self.pool.blocks if b.ref_cnt and not b.is_null} == {
            block: count for block, count in held.items() if count
        }
        free = BLOCKS - len(+held)
        if isinstance(self.pool, GuardedBlockPool):
            running = {block for blocks in self.running.values() for block in blocks}
            free = min(free, RUNNING - len(running))
        assert self.pool.get_num_free_blocks() == free
        assert self.ledger.pinned_blocks == sum(
            len(blocks) for blocks, copied, _ in self.puts.values() if copied < RANKS
        )

    def teardown(self):
        """Everybody lets go: nothing is left behind."""
        if not hasattr(self, "pool"):
            return
        for request in list(self.running):
            self.free(self.running.pop(request))
        for job, (_, copied, ended) in list(self.puts.items()):
            self.ledger.take_in({job: PutReport(copied=RANKS - copied, ended=RANKS - ended)})
        self.puts = {}
        self.now += 1000 * LEASE_S
        self.step()
        assert not self.leased
        self.the_pool_agrees()
        assert self.pool.get_usage() == 0


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
