"""vLLM's scheduler as far as the pool's scheduler side sees it: requests, block pool, look-ups."""

from collections import Counter
from dataclasses import dataclass, field

from clocks import Clock

from kvpp_connect.connectors.ascend_store.backends.settings import MooncakeSettings
from kvpp_connect.connectors.ascend_store.config import PoolConfig
from kvpp_connect.connectors.ascend_store.hashing import BlockChain
from kvpp_connect.connectors.ascend_store.lookups import Lookup
from kvpp_connect.connectors.ascend_store.orders import PoolReport, PutReport
from kvpp_connect.connectors.ascend_store.scheduler_side import EngineShape, SchedulerSide, Step
from kvpp_connect.connectors.ascend_store.shards import HeldCaches, PoolComponent, plan_stage

BLOCK_TOKENS = 4


class RecordingPins:
    """A block pool's pins, by block.

    Attributes:
        held: blocks that some request holds; only those may be pinned.
        pinned: pins on each block.
        unpinned: how often pins were taken back.
        forgotten: blocks that nobody may find any more.
    """

    num_blocks = 100
    hash_block_tokens = BLOCK_TOKENS

    def __init__(self, held=()):
        self.held = set(held)
        self.pinned = Counter()
        self.unpinned = 0
        self.forgotten = set()

    def pin(self, block_ids):
        assert set(block_ids) <= self.held, "a block is pinned that nobody holds"
        self.pinned.update(block_ids)

    def unpin(self, block_ids):
        self.unpinned += 1
        self.pinned.subtract(block_ids)
        assert min(self.pinned.values()) >= 0, "a pin is taken back twice"
        self.pinned = +self.pinned

    def forget(self, block_ids):
        self.forgotten.update(block_ids)


@dataclass(eq=False)
class FakeRequest:
    """What the pool reads of vLLM's request."""

    request_id: str
    prompt_token_ids: list[int] | None
    output: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    kv_transfer_params: dict | None = None
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    cache_salt: str | None = None
    lora_request: object = None
    prompt_embeds: object = None
    mm_features: tuple = ()
    is_named: bool = True  # whether vLLM names its blocks

    @property
    def all_token_ids(self):
        return [*self.prompt_token_ids, *self.output]

    @property
    def num_tokens(self):
        return len(self.prompt_token_ids) + len(self.output)

    @property
    def block_hashes(self):
        """Names that vLLM gives full blocks: here, of their tokens."""
        if not self.is_named:
            return []
        tokens = self.all_token_ids
        ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
        return [repr(tokens[:end]).encode().rjust(32) for end in ends]


class FakeLookups:
    """Look-ups that are answered when a test says so.

    Attributes:
        asked: all questions, in order.
        given_up, forgotten, shards: what it was told.
        is_good: whether the store works.
        closed: how often it was closed.
    """

    def __init__(self, clock):
        self._clock = clock
        self.asked = []
        self.given_up = []
        self.forgotten = []
        self.shards = []
        self.is_good = True
        self.closed = 0

    def ask_about(self, shards):
        self.shards = list(shards)

    def ask(self, scope, hashes):
        self.asked.append(Lookup(scope, tuple(hashes), self._clock()))
        return self.asked[-1]

    def answer(self, blocks, which=-1):
        lookup = self.asked[which]
        assert blocks <= len(lookup.hashes), "nobody asked about so many"
        lookup.blocks, lookup.answered_at = blocks, self._clock()

    def gave_up(self, lookup):
        lookup.cancelled = True
        self.given_up.append(lookup)

    def forget(self, scope):
        self.forgotten.append(scope)

    def take_counts(self):
        return {}

    def close(self):
        self.closed += 1


def stage_shards(stage=0, ranks=2):
    """What a stage's workers say of it: one layer on each rank."""
    layers = tuple(
        PoolComponent(layer_name=f"model.layers.{stage}{i}.attn", page_bytes=64, dtype="float32")
        for i in range(ranks)
    )
    return plan_stage(stage, [HeldCaches(rank=i, components=layers) for i in range(ranks)])


def prompt(blocks, extra=0, seed=0):
    """Tokens of so many full blocks and some more; another seed has other tokens."""
    return [1000 * seed + i for i in range(blocks * BLOCK_TOKENS + extra)]


def names_of(tokens):
    """The pool's names of the full blocks of a request without anything but tokens."""
    chain = BlockChain(BLOCK_TOKENS)
    chain.extend(tokens)
    return chain.hashes


class Scheduling:
    """A scheduler side, and what vLLM does around it.

    Attributes:
        tables: block ids by request id.
    """

    def __init__(
        self, *, stages=1, world_size=2, ordered=True, events=False, described=True, **settings
    ):
        self.clock = Clock()
        self.lookups = FakeLookups(self.clock)
        self.pins = RecordingPins(held=range(1, RecordingPins.num_blocks))
        self.tables = {}
        self._next_block = 1
        self.world_size = world_size
        self.side = SchedulerSide(
            config=PoolConfig(store=MooncakeSettings(master_server_address="a:1"), **settings),
            shape=EngineShape(
                block_tokens=BLOCK_TOKENS,
                stages=stages,
                world_size=world_size,
                steps_in_flight=1 if ordered else 2,
            ),
            identity="model",
            lookups=self.lookups,
            emits_events=events,
            clock=self.clock,
        )
        self.side.bind_pool(self.pins)
        if described:
            self.report(stages=[stage_shards(stage) for stage in range(stages)])

    def report(self, *, invalid=(), received=(), **report):
        self.side.take_in(PoolReport(**report), invalid, received)

    def arrive(self, request_id="r", tokens=(), **facts):
        request = FakeRequest(request_id, list(tokens), **facts)
        self.side.arrived(request)
        return request

    def admit(self, request, hit=0, local=0):
        """Give a request its blocks, with so many from the pool; answer what the pool said."""
        self.side.matched_tokens(request, local * BLOCK_TOKENS)
        if self.lookups.asked and self.lookups.asked[-1].blocks is None:
            self.lookups.answer(hit)
        tokens, in_background = self.side.matched_tokens(request, local * BLOCK_TOKENS)
        self.allocate(request)
        self.side.allocated(request, self.tables[request.request_id], tokens)
        request.num_computed_tokens = local * BLOCK_TOKENS + tokens
        return tokens, in_background

    def allocate(self, request, blocks=24):
        """A block table, longer than is needed."""
        first, self._next_block = self._next_block, self._next_block + blocks
        self.tables[request.request_id] = list(range(first, first + blocks))

    def step(self, scheduled=None, *, sync_loads=False):
        """Orders of a step; ``scheduled``: tokens by request."""
        tokens = {request.request_id: count for request, count in (scheduled or {}).items()}
        orders = self.side.take_orders(
            Step(
                scheduled=tokens,
                block_ids=lambda request_id: self.tables[request_id],
                has_sync_loads=sync_loads,
            )
        )
        for request, count in (scheduled or {}).items():
            request.num_computed_tokens += count
        return orders

    def stored(self, order, *, failed=()):
        """All ranks are through with a put."""
        ranks = self.world_size
        self.report(puts={order.job: PutReport(copied=ranks, ended=ranks, failed=set(failed))})
