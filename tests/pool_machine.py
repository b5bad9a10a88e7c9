"""An engine around the pool's scheduler side, whose requests, ranks and store do what chance says.

Blocks have contents: for each token what was computed from, so that a block which is stored, or
read by a forward, with anything else in it is noticed. vLLM's own block pool counts references.
"""

from collections import Counter
from dataclasses import dataclass, field

from clocks import Clock
from pool_scheduling import BLOCK_TOKENS, FakeLookups, FakeRequest, names_of, stage_shards
from vllm.v1.core.block_pool import BlockPool

from kvpp_connect.connectors.ascend_store.backends.settings import MooncakeSettings
from kvpp_connect.connectors.ascend_store.config import PoolConfig
from kvpp_connect.connectors.ascend_store.orders import PoolReport, PutReport
from kvpp_connect.connectors.ascend_store.scheduler_side import EngineShape, SchedulerSide, Step
from kvpp_connect.seam.api import PoolPins

NUM_BLOCKS = 25
SAMPLED = 7000  # + its place: the token that the model says


class CountingPins(PoolPins):
    """vLLM's block pool, and who holds on to what.

    Attributes:
        pinned: pins on each block.
    """

    def __init__(self, pool):
        super().__init__(pool)
        self._blocks = pool.blocks
        self.pinned = Counter()

    def pin(self, block_ids):
        assert all(self._blocks[b].ref_cnt > 0 for b in block_ids), "pinned by nobody"
        super().pin(block_ids)
        self.pinned.update(block_ids)

    def unpin(self, block_ids):
        self.pinned.subtract(block_ids)
        assert min(self.pinned.values(), default=0) >= 0, "a pin is taken back twice"
        self.pinned = +self.pinned
        super().unpin(block_ids)


@dataclass(eq=False)
class Life:
    """A request in vLLM's scheduler."""

    request: FakeRequest
    wanted: int  # tokens to generate
    blocks: list = field(default_factory=list)
    state: str = "waiting"  # or loading, running
    is_received: bool = False
    placeholders: int = 0  # tokens that steps in flight will bring
    in_flight: int = 0

    @property
    def name(self):
        return self.request.request_id

    @property
    def table(self):
        return [block.block_id for block in self.blocks]

    @property
    def left(self):
        """Tokens to compute that are known or will be."""
        known = self.request.num_tokens + self.placeholders
        return known - self.request.num_computed_tokens

    def token(self, place):
        tokens = self.request.all_token_ids
        return tokens[place] if place < len(tokens) else SAMPLED + place


@dataclass
class Flight:
    """A step whose results are not taken in yet."""

    scheduled: dict
    drafts: dict  # by request: whether each drafted token is right
    samples: set
    report: PoolReport
    received: set
    invalid: set


@dataclass
class RankPut:
    """What a rank has still to do for one put."""

    order: object
    scope: str
    is_copied: bool = False


class PoolMachine:
    """Everything that random orders of events need. Each method that chooses takes ``rng``."""

    def __init__(self, *, load_mode, ordered, world_size, events):
        self.clock = Clock()
        self.pool = BlockPool(
            num_gpu_blocks=NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK_TOKENS
        )
        self.pins = CountingPins(self.pool)
        self.lookups = FakeLookups(self.clock)
        config = PoolConfig(
            store=MooncakeSettings(master_server_address="a:1"), load_mode=load_mode
        )
        self.side = SchedulerSide(
            config=config,
            shape=EngineShape(
                block_tokens=BLOCK_TOKENS,
                stages=1,
                world_size=world_size,
                steps_in_flight=1 if ordered else 2,
            ),
            identity="model",
            lookups=self.lookups,
            emits_events=events,
            clock=self.clock,
        )
        self.side.bind_pool(self.pins)
        self.ordered, self.background = ordered, load_mode == "async"
        self.ranks = range(world_size)
        self.lives, self.orphans, self.flights = {}, {}, []
        self.count = 0
        self.version = 0  # of the weights; a reset makes another
        self.versions = {}  # by scope
        self.names = {}  # tokens by block name
        self.contents = [[[None] * BLOCK_TOKENS for _ in range(NUM_BLOCKS)] for _ in self.ranks]
        self.objects = set()  # (version, rank, block name)
        self.puts = [[] for _ in self.ranks]
        self.loads = [{} for _ in self.ranks]  # (order, scope) by request
        self.news = PoolReport(stages=[stage_shards(0, world_size)])
        self.received, self.invalid = Counter(), set()
        self.held = {}  # by job: its blocks
        self.uncopied = {}  # by job: ranks of which the scheduler has not heard that they copied

    # Requests

    def arrive(self, seed, tokens, wanted):
        self.count += 1
        request = FakeRequest(f"r{self.count}", [100 * seed + i for i in range(tokens)])
        self.lives[request.request_id] = Life(request, wanted)
        self.side.arrived(request)

    def abort(self, rng):
        if not self.lives:
            return
        life = self.lives.pop(rng.choice(sorted(self.lives)))
        self.side.finished(life.request)
        if life.state == "loading" and not life.is_received:
            self.orphans[life.name] = life
        else:
            self._free(life)

    def _free(self, life):
        self.pool.free_blocks(reversed(life.blocks))
        life.blocks = []

    def _reserve(self, life, tokens):
        need = -(-tokens // BLOCK_TOKENS) - len(life.blocks)
        if need > self.pool.get_num_free_blocks():
            return False
        if need > 0:
            life.blocks += self.pool.get_new_blocks(need)
        return True

    # A step

    def step(self, rng):
        """Schedule and run a step; answer whether it loads."""
        while len(self.flights) > (0 if self.ordered else 1):
            self.collect()
        scheduled, drafts, admitted = {}, {}, {}
        for life in [life for life in self.lives.values() if life.state == "running"]:
            if rng.random() < 0.08 and not life.in_flight:
                self._preempt(life)
            elif life.left > 0 and rng.random() < 0.8:
                self._schedule(life, rng, scheduled, drafts)
        for life in [life for life in self.lives.values() if life.state != "running"]:
            self._admit(life, rng, scheduled, drafts, admitted)
        for life in self.lives.values():
            tokens = life.request.all_token_ids
            for i, name in enumerate(names_of(tokens)):
                self.names[name] = tuple(tokens[: (i + 1) * BLOCK_TOKENS])
        orders = self.side.take_orders(
            Step(
                scheduled=dict(scheduled),
                block_ids=lambda name: self.lives[name].table,
                has_sync_loads=bool(admitted) and not self.background,
            )
        )
        self.versions.setdefault(orders.scope, self.version)
        assert Counter(load.request_id for load in orders.loads) == Counter(admitted)
        self._run(orders, scheduled, drafts, rng)
        if self.ordered:
            self.collect()
        return bool(orders.loads)

    def _preempt(self, life):
        self._free(life)
        life.state, life.request.num_computed_tokens, life.placeholders = "waiting", 0, 0

    def _schedule(self, life, rng, scheduled, drafts):
        tokens = min(life.left, rng.randint(1, 12))
        guesses = []
        if self.ordered and tokens == life.left:
            guesses = [rng.random() < 0.6 for _ in range(rng.choice((0, 0, 1, 3)))]
        if self._reserve(life, life.request.num_computed_tokens + tokens + len(guesses)):
            scheduled[life.name] = tokens + len(guesses)
            drafts[life.name] = guesses
            life.state = "running"

    def _admit(self, life, rng, scheduled, drafts, admitted):
        request = life.request
        if life.state == "loading":
            if not life.is_received:
                return
            life.state = "waiting"
            if not request.num_computed_tokens:
                self._free(life)
        if not request.num_computed_tokens:
            tokens, in_background = self.side.matched_tokens(request, 0)
            if tokens is None:
                return
            assert tokens % BLOCK_TOKENS == 0
            assert tokens < request.num_tokens
            more = 0 if in_background else 1
            if not self._reserve(life, tokens + more):
                return
            self.side.allocated(request, life.table, tokens)
            request.num_computed_tokens = tokens
            if tokens:
                admitted[life.name] = 1
            if in_background:
                life.state, life.is_received = "loading", False
                return
        else:
            self.side.allocated(request, life.table, 0)
        life.state = "running"
        self._schedule(life, rng, scheduled, drafts)
        if life.name in scheduled:
            return
        if life.name in admitted:
            scheduled[life.name] = 1  # for which there is room
        else:
            self._preempt(life)

    # What the ranks do in a step

    def _run(self, orders, scheduled, drafts, rng):
        for rank in self.ranks:
            for name in orders.cancelled:
                if name in self.loads[rank]:
                    self._end_load(rank, name, 0)
            for load in orders.loads:
                assert self.versions[orders.scope] == self.version, "an old scope is read"
                self.loads[rank][load.request_id] = (load, orders.scope)
                if load.in_step:
                    self._load(rank, load.request_id, rng)
        samples = set()
        for name, tokens in scheduled.items():
            life = self.lives[name]
            self._forward(life, tokens, drafts.get(name, ()))
            life.request.num_computed_tokens += tokens
            life.in_flight += 1
            if life.left <= 0:
                samples.add(name)
                life.placeholders += not self.ordered
        for order in orders.puts:
            assert order.job not in self.held, "a number for two puts"
            self.held[order.job] = order.blocks.block_ids
            self.uncopied[order.job] = len(self.ranks)
            for rank in self.ranks:
                self._check(rank, order, orders.scope)
                self.puts[rank].append(RankPut(order, orders.scope))
        received = {n for n, ranks in self.received.items() if ranks == len(self.ranks)}
        for name in received:
            del self.received[name]
        flight = Flight(dict(scheduled), drafts, samples, self.news, received, self.invalid)
        self.news, self.invalid = PoolReport(), set()
        self.flights.append(flight)

    def _forward(self, life, tokens, guesses):
        start = life.request.num_computed_tokens
        known = start + tokens - len(guesses)
        row = [life.token(p) for p in range(known)]
        row += [SAMPLED + known + i if right else -1 for i, right in enumerate(guesses)]
        right = all(
            self._entry(rank, life, p) == (self.version, tuple(row[: p + 1]))
            for rank in self.ranks
            for p in range(start)
        )
        for p in range(start, start + tokens):
            entry = (self.version, tuple(row[: p + 1])) if right else "computed from garbage"
            for rank in self.ranks:
                block = self.contents[rank][life.table[p // BLOCK_TOKENS]]
                block[p % BLOCK_TOKENS] = entry

    def _entry(self, rank, life, place):
        return self.contents[rank][life.table[place // BLOCK_TOKENS]][place % BLOCK_TOKENS]

    def _check(self, rank, order, scope):
        """A put's blocks hold what their names say, under the weights that the keys stand for."""
        for name, block in zip(order.blocks.hashes, order.blocks.block_ids, strict=True):
            assert self.pins.pinned[block], "a block that is to be stored is not held"
            assert self.contents[rank][block] == self._right(name, scope), "wrong KV is stored"

    def _right(self, name, scope):
        tokens, version = self.names[name], self.versions[scope]
        ends = range(len(tokens) - BLOCK_TOKENS + 1, len(tokens) + 1)
        return [(version, tokens[:end]) for end in ends]

    def collect(self):
        """Take in the oldest step's results, as vLLM does."""
        if not self.flights:
            return
        flight = self.flights.pop(0)
        failed = self._take_invalid(flight)
        for name in flight.scheduled:
            life = self.lives.get(name)
            if life is None:
                continue
            life.in_flight -= 1
            if name in flight.samples and name not in failed:
                self._sample(life, flight.drafts.get(name, ()))
        self.side.take_in(flight.report or None, flight.invalid, flight.received)
        for job, report in flight.report.puts.items():
            self.uncopied[job] -= report.copied
        for name in flight.received:
            if life := self.orphans.pop(name, None):
                self._free(life)
            else:
                self.lives[name].is_received = True
        self.side.take_events()

    def _take_invalid(self, flight):
        failed = set()
        for life in list(self.lives.values()) if flight.invalid else ():
            before = life.request.num_computed_tokens - flight.scheduled.get(life.name, 0)
            table = life.table[: -(-before // BLOCK_TOKENS)]
            first = next((i for i, b in enumerate(table) if b in flight.invalid), None)
            if first is not None and life.state in ("loading", "running"):
                life.request.num_computed_tokens = first * BLOCK_TOKENS
                failed.add(life.name)
        return failed

    def _sample(self, life, guesses):
        accepted = next((i for i, right in enumerate(guesses) if not right), len(guesses))
        life.request.num_computed_tokens -= len(guesses) - accepted
        life.placeholders -= not self.ordered
        for _ in range(accepted + 1):
            life.request.output.append(SAMPLED + life.request.num_tokens)
        if len(life.request.output) >= life.wanted:
            del self.lives[life.name]
            self.side.finished(life.request)
            self._free(life)

    # What ranks do in their own time

    def rank_works(self, rng):
        rank = rng.choice(list(self.ranks))
        if self.loads[rank] and rng.random() < 0.5:
            self._load(rank, rng.choice(sorted(self.loads[rank])), rng)
        elif self.puts[rank]:
            put = rng.choice(self.puts[rank])
            if not put.is_copied:
                self._check(rank, put.order, put.scope)
                put.is_copied = True
                self._tell(put.order.job, PutReport(copied=1))
            if rng.random() < 0.5:
                self._end_put(rank, put, rng)

    def _end_put(self, rank, put, rng):
        self.puts[rank].remove(put)
        chance = rng.choice((0, 0, 0.4))
        failed = {i for i in range(len(put.order.blocks)) if rng.random() < chance}
        for i, name in enumerate(put.order.blocks.hashes):
            if i not in failed:
                self.objects.add((self.versions[put.scope], rank, name))
        self._tell(put.order.job, PutReport(ended=1, failed=failed))

    def _tell(self, job, report):
        self.news.puts.setdefault(job, PutReport()).add(report)

    def _load(self, rank, name, rng):
        order, scope = self.loads[rank][name]
        chance = rng.choice((0, 0, 0.4))
        first_bad = len(order.blocks)
        for i, block in enumerate(order.blocks.hashes):
            is_there = (self.versions[scope], rank, block) in self.objects
            if not is_there:
                self.news.lost.add(block)
            if not is_there or rng.random() < chance:
                first_bad = i
                break
            self.contents[rank][order.blocks.block_ids[i]] = self._right(block, scope)
        self._end_load(rank, name, first_bad)

    def _end_load(self, rank, name, first_bad):
        order, _ = self.loads[rank].pop(name)
        self.invalid.update(order.blocks.block_ids[first_bad:])
        for block in order.blocks.block_ids[first_bad:]:
            self.contents[rank][block] = ["not loaded"] * BLOCK_TOKENS
        if not order.in_step:
            self.received[name] += 1

    # The store

    def answer(self, rng):
        asked = [lookup for lookup in self.lookups.asked if lookup.blocks is None]
        if asked:
            self._answer(rng.choice(asked))

    def _answer(self, lookup):
        version = self.versions.get(lookup.scope)

        def whole(name):
            return all((version, rank, name) in self.objects for rank in self.ranks)

        found = next((i for i, n in enumerate(lookup.hashes) if not whole(n)), len(lookup.hashes))
        lookup.blocks, lookup.answered_at = found, self.clock()

    def lose(self, rng):
        """Drop some objects, of one rank or of all."""
        if self.objects:
            version, rank, name = rng.choice(sorted(self.objects))
            ranks = [rank] if rng.random() < 0.5 else self.ranks
            self.objects -= {(version, each, name) for each in ranks}

    def reset(self):
        loading = any(life.state == "loading" for life in self.lives.values())
        if self.side.reset():
            self.version += 1
        else:
            assert loading

    # Checks

    def check(self):
        due = Counter()
        for job, blocks in self.held.items():
            if self.uncopied[job]:
                due.update(blocks)
        for block, count in due.items():
            assert self.pins.pinned[block] >= count, "let go before all ranks have copied"
        for block, count in self.pins.pinned.items():
            assert self.pool.blocks[block].ref_cnt >= count

    def finish(self, rng):
        """Serve what is there to its end; nothing is held afterwards."""
        self.lookups.is_good = True
        for _ in range(400):
            for lookup in self.lookups.asked:
                if lookup.blocks is None:
                    self._answer(lookup)
            self.step(rng)
            for _ in range(8):
                self.rank_works(rng)
            self.check()
            is_idle = not any((self.lives, self.orphans, *self.puts, *self.loads))
            if is_idle and not self.side.has_pending_work:
                break
        while self.flights:
            self.collect()
        assert not self.lives, "requests that never end"
        assert not self.orphans
        assert not self.side.has_pending_work
        assert not self.pins.pinned
        assert self.pool.get_num_free_blocks() == NUM_BLOCKS - 1, "a block has leaked"
