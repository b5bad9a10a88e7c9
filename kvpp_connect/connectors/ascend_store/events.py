"""KV events for routers: each block once, when the pool has it as a whole, and when it is lost."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvpp_connect.seam.api import KVCacheEvent
from kvpp_connect.seam.kv_events import removed_event

_MOST_BLOCKS = 1 << 18


@dataclass(slots=True)
class _Expected:
    name: bytes | int
    event: KVCacheEvent
    puts: int = 0  # that may still bring it into the pool


class PoolEvents:
    """What this engine has told of the pool. Driven by the scheduler's thread."""

    def __init__(self) -> None:
        self._pending: dict[bytes, _Expected] = {}
        self._told: OrderedDict[bytes, bytes | int] = OrderedDict()
        self._events: list[KVCacheEvent] = []

    def is_told(self, block: bytes) -> bool:
        """Whether the block's event is out."""
        return block in self._told

    def expect(self, block: bytes, name: bytes | int, event: KVCacheEvent) -> None:
        """A block is being stored, by one more put.

        Args:
            name: what routers call the block.
            event: what to tell once it is in the pool.
        """
        self._pending.setdefault(block, _Expected(name, event)).puts += 1

    def stored(self, blocks: Iterable[bytes]) -> None:
        """Blocks are in the pool, all their objects."""
        for block in blocks:
            if (waiting := self._pending.pop(block, None)) is None:
                continue
            self._told[block] = waiting.name
            self._events.append(waiting.event)
            if len(self._told) > _MOST_BLOCKS:
                self._told.popitem(last=False)

    def failed(self, blocks: Iterable[bytes]) -> None:
        """A put did not store these blocks."""
        for block in blocks:
            if (waiting := self._pending.get(block)) is None:
                continue
            waiting.puts -= 1
            if not waiting.puts:
                del self._pending[block]

    def lost(self, blocks: Iterable[bytes]) -> None:
        """Blocks were looked for and not there."""
        names = [self._told.pop(block) for block in blocks if block in self._told]
        if names:
            self._events.append(removed_event(names))

    def reset(self) -> None:
        """The pool holds nothing for this engine any more."""
        self._pending.clear()
        self.lost(list(self._told))

    @property
    def has_news(self) -> bool:
        """Whether there is something to take."""
        return bool(self._events)

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events
