"""The requests that every row of the demo answers.

Two waves: the second sends some prompts of the first again and extends others, so that caches of
the first wave are met. Prompts hold no lower-case letters: with the demo's tokenizer one character
is one token, and lengths are exact.
"""

import random
from dataclasses import dataclass

MAX_TOKENS = 24
CONCURRENCY = 4
_SYMBOLS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,;:!?+-*/=()<>"
# Around the borders of KV blocks of 16 and of 128 tokens, and well beyond them.
_FRESH_TOKENS = (5, 16, 33, 128, 257, 515, 900, 1500)
_EXTENDED_BY_TOKENS = 60


@dataclass(frozen=True, slots=True)
class Wave:
    """Prompts that are sent together; the next wave waits for all of them."""

    prompts: tuple[str, ...]


def make_waves(seed: int = 0) -> tuple[Wave, ...]:
    """A dozen prompts of 5 to 1,500 tokens in two waves."""
    rng = random.Random(seed)

    def text(tokens: int) -> str:
        return "".join(rng.choices(_SYMBOLS, k=tokens))

    fresh = {tokens: text(tokens) for tokens in _FRESH_TOKENS}
    again = (fresh[33], fresh[515])
    extended = (fresh[257] + text(_EXTENDED_BY_TOKENS), fresh[900] + text(_EXTENDED_BY_TOKENS))
    return Wave(tuple(fresh.values())), Wave(again + extended)
