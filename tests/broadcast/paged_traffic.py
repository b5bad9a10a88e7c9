"""Made-up traffic of an engine with a paged cache: what a forward reads and writes, step by step.

Requests come and go, share prefixes, grow in chunks, are preempted and come back. Blocks that
nobody refers to keep their tokens for later requests until they are handed out again.
"""

from dataclasses import dataclass, field
from random import Random

BLOCK_TOKENS = 4
ALPHABET = 3  # few tokens, so that prompts often begin alike


@dataclass
class Request:
    """``computed`` of its tokens are in the cache, in ``blocks``."""

    tokens: list
    blocks: list = field(default_factory=list)
    computed: int = 0


@dataclass
class Step:
    """One forward: per request its block ids, tokens so far, and how many of those are new."""

    rows: list

    @property
    def history(self):
        return any(len(tokens) > new for _, tokens, new in self.rows)


class Traffic:
    """A scheduler over ``num_blocks`` blocks, of which requests refer to ``most`` at once."""

    def __init__(self, seed, num_blocks, most):
        self._random = Random(seed)
        self._most = most
        self._running = []
        self._waiting = []
        self._references = dict.fromkeys(range(1, num_blocks), 0)  # block 0 is vLLM's null block
        self._free = list(self._references)
        self._cached = {}  # tokens up to a full block's end -> the block
        self._prefixes = [self._draw(10) for _ in range(2)]
        self.preemptions = self.hits = 0

    def _draw(self, count):
        return [self._random.randrange(ALPHABET) for _ in range(count)]

    def step(self):
        """Let time pass; answer what is computed, which may be nothing."""
        random = self._random
        while len(self._running) + len(self._waiting) < 4:
            prefix = random.choice(self._prefixes)[: random.randint(0, 10)]
            self._waiting.append(Request(prefix + self._draw(random.randint(1, 6))))
        if self._waiting:
            self._admit(self._waiting[0])
        for request in list(self._running):
            if random.random() < 0.08:
                self._drop(request)
            elif random.random() < 0.08:
                self._drop(request)
                self._waiting.append(request)
                self.preemptions += 1
        return Step([row for request in list(self._running) if (row := self._grow(request))])

    def _admit(self, request):
        """Take a request in, with as many blocks of its prefix as are still there."""
        hits = []
        for end in range(BLOCK_TOKENS, len(request.tokens), BLOCK_TOKENS):
            block = self._cached.get(tuple(request.tokens[:end]))
            if block is None:
                break
            hits.append(block)
        fresh = sum(self._references[block] == 0 for block in hits)
        if self._in_use() + fresh + 1 > self._most:
            return
        self._waiting.remove(request)
        self.hits += len(hits)
        for block in hits:
            self._references[block] += 1
            if block in self._free:
                self._free.remove(block)
        request.blocks, request.computed = hits, len(hits) * BLOCK_TOKENS
        self._running.append(request)

    def _in_use(self):
        return sum(count > 0 for count in self._references.values())

    def _grow(self, request):
        """Compute a chunk of the prompt, or one more token; preempt the last where blocks lack."""
        if request.computed == len(request.tokens):
            request.tokens += self._draw(1)
        new = min(self._random.randint(1, 6), len(request.tokens) - request.computed)
        end = request.computed + new
        while len(request.blocks) * BLOCK_TOKENS < end:
            if self._in_use() == self._most or not self._free:
                self._drop(request)
                self._waiting.append(request)
                self.preemptions += 1
                return None
            request.blocks.append(self._take())
        request.computed = end
        for full in range(BLOCK_TOKENS, end + 1, BLOCK_TOKENS):
            block = request.blocks[full // BLOCK_TOKENS - 1]
            self._cached.setdefault(tuple(request.tokens[:full]), block)
        return list(request.blocks), list(request.tokens[:end]), new

    def _take(self):
        block = self._free.pop(0)
        self._references[block] = 1
        self._cached = {tokens: b for tokens, b in self._cached.items() if b != block}
        return block

    def _drop(self, request):
        self._running.remove(request)
        for block in reversed(request.blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
        request.blocks, request.computed = [], 0
