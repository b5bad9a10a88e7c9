"""How many blocks a scratch slot holds.

In ``full`` mode a slot mirrors a whole layer. In ``compact`` mode it holds the blocks of running
requests only; the scheduler sees to it that requests never refer to more. Workers and scheduler
live in different processes and must arrive at the same number, so it is a function of the block
count, which both know, and of the configuration.
"""

from dataclasses import dataclass
from typing import Protocol

from kvpp_connect.errors import ConfigError


class ScratchSize(Protocol):
    """Scratch blocks for a number of blocks; never falls as the blocks rise."""

    def blocks(self, num_blocks: int) -> int:
        """Blocks of one scratch slot."""
        ...


@dataclass(frozen=True, slots=True)
class FullScratch:
    """A slot mirrors a whole layer."""

    def blocks(self, num_blocks: int) -> int:
        """All of them."""
        return num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningScratch:
    """A slot holds the blocks of running requests.

    ``least`` is what one request of maximum length needs, ``most`` what all request slots
    together can use; between them it is ``num_blocks // share_divisor``.
    """

    least: int
    most: int
    share_divisor: int = 4

    def blocks(self, num_blocks: int) -> int:
        """At least one longest request, at most all slots, never more than there are."""
        wanted = max(self.least, min(self.most, num_blocks // self.share_divisor))
        return min(wanted, num_blocks)


def running_scratch(
    *, block_tokens: int, max_model_tokens: int, max_requests: int, running_tokens: int | None
) -> RunningScratch:
    """Size the scratch of running requests.

    Args:
        block_tokens: tokens in a block.
        running_tokens: what the user asks for; ``None``: a quarter of the cache, at least one
            request of maximum length.

    Raises:
        ConfigError: a request of maximum length would not fit; says how much it needs.
    """
    # One more block: a request at its maximum length still has a slot for the next token.
    longest = -(-max_model_tokens // block_tokens) + 1
    if running_tokens is None:
        return RunningScratch(least=longest, most=longest * max_requests)
    asked = running_tokens // block_tokens
    if asked < longest:
        raise ConfigError(
            f"additional_config.kvpp.running_tokens is {running_tokens}; one request of "
            f"{max_model_tokens} tokens (--max-model-len) needs {longest * block_tokens}. Raise "
            "running_tokens or lower --max-model-len"
        )
    return RunningScratch(least=asked, most=asked)
