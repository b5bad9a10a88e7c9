"""Keeps blocks that a given-up read may still write out of circulation on the decode node.

Mooncake may go on writing the destination of a read that it reported as failed. Where the read was
repeated, the request can go on at once, since as long as the lease holds the late bytes equal the
right ones; but its blocks must not become another request's. Preemption frees a request's blocks
without asking the connector, so they are pinned in the block pool.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpp_connect.connectors.pins import BlockPins


@dataclass(frozen=True, slots=True)
class _Held:
    until: float  # monotonic seconds
    block_ids: tuple[int, ...]


class BlockQuarantine:
    """Pins with an end. Driven by the scheduler's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pins: BlockPins | None = None
        self._held: list[_Held] = []

    def bind(self, pins: BlockPins) -> None:
        """Take the pool, once the scheduler has made it."""
        self._pins = pins

    def hold(self, block_ids: Sequence[int], seconds: float) -> None:
        """Pin blocks for a time."""
        assert self._pins is not None, "vLLM binds the block pool before the first request"
        self._pins.pin(block_ids)
        self._held.append(_Held(self._clock() + seconds, tuple(block_ids)))

    def end_due(self) -> None:
        """Unpin what has been held long enough."""
        now = self._clock()
        for held in self._held:
            if held.until <= now and self._pins is not None:
                self._pins.unpin(held.block_ids)
        self._held = [held for held in self._held if held.until > now]
