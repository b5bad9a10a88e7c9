"""KV events for routers: each block once, when the pool has it as a whole, and when it is lost."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvpp_connect.seam.api import KVCacheEvent
from kvpp_connect.seam.kv_events import removed_event

_MOST_BLOCKS = 1 << 18

StoredEvent = Callable[[], KVCacheEvent]


class PoolEvents:
    """What this engine has told of the pool. Driven by the scheduler's thread."""

    def __init__(self) -> None:
        self._pending: dict[bytes, tuple[bytes | int, KVCacheEvent]] = {}
        self._told: OrderedDict[bytes, bytes | int] = OrderedDict()
        self._events: list[KVCacheEvent] = []

    def is_told(self, block: bytes) -> bool:
        """Whether the block's event is out, or waits for its put."""
        return block in self._told or block in self._pending

    def expect(self, block: bytes, name: bytes | int, event: KVCacheEvent) -> None:
        """A block is being stored.

        Args:
            name: what routers call the block.
            event: what to tell once it is in the pool.
        """
        self._pending[block] = (name, event)

    def stored(self, blocks: Iterable[bytes]) -> None:
        """Blocks are in the pool, all their objects."""
        for block in blocks:
            if (waiting := self._pending.pop(block, None)) is None:
                continue
            name, event = waiting
            self._told[block] = name
            self._events.append(event)
            if len(self._told) > _MOST_BLOCKS:
                self._told.popitem(last=False)

    def failed(self, blocks: Iterable[bytes]) -> None:
        """Blocks were not stored."""
        for block in blocks:
            self._pending.pop(block, None)

    def lost(self, blocks: Iterable[bytes]) -> None:
        """Blocks were looked for and not there."""
        names = [self._told.pop(block) for block in blocks if block in self._told]
        if names:
            self._events.append(removed_event(names))

    def reset(self) -> None:
        """The pool holds nothing for this engine any more."""
        self._pending.clear()
        self.lost(list(self._told))

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events
