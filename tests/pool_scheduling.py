"""vLLM's scheduler as far as the pool's scheduler side sees it: requests, block pool, look-ups."""

from collections import Counter
from dataclasses import dataclass, field

from kvpp_connect.connectors.ascend_store.lookups import Lookup

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

    @property
    def all_token_ids(self):
        return [*self.prompt_token_ids, *self.output]

    @property
    def num_tokens(self):
        return len(self.prompt_token_ids) + len(self.output)

    @property
    def block_hashes(self):
        """Names that vLLM gives full blocks: here, of their tokens."""
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
