"""What the pool asks of a store: whole objects under string keys, from and to host memory.

Objects are immutable: a key names its bytes for good. So a store may keep the first write of a
key, or take the last one. It may drop any object at any time.

Implementors: calls may come from several threads at once. Each call answers one outcome per key, in
order, whatever became of the others. What the store as a whole cannot do raises ``StoreError``. A
call should end within the store's own time-outs; the callers do not rely on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvpp_connect.errors import KvppError

MAX_KEY_LENGTH = 255
KEY_ALPHABET = "A-Z a-z 0-9 - _ : @ #"
"""Length and characters of keys that all stores take."""


class StoreError(KvppError):
    """The store as a whole did not answer, or refused: unreachable, shut down, out of order."""


class PutOutcome(Enum):
    """What became of one object that was put."""

    STORED = "stored"
    PRESENT = "present"  # was there before; not written again
    FULL = "full"  # no room, at least for now
    FAILED = "failed"


class GetOutcome(Enum):
    """What became of one object that was asked for."""

    READ = "read"
    MISSING = "missing"  # never stored, evicted or removed
    SHORT = "short"  # there, with another size than asked for
    FAILED = "failed"  # the destination may still be written


@dataclass(frozen=True, slots=True)
class Buffer:
    """A range of this process's memory: ``address`` and ``size`` in bytes."""

    address: int
    size: int


class PoolStore(Protocol):
    """A store's client. Life cycle: made connected; ``register`` once; calls; ``close``."""

    def register(self, memory: Buffer) -> None:
        """Announce memory from which objects are put and into which they are read.

        Raises:
            ConfigError: the store cannot use it.
        """
        ...

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Whether each object is there, as a whole, now.

        Raises:
            StoreError: the store does not answer.
        """
        ...

    def put(self, keys: Sequence[str], sources: Sequence[Buffer]) -> list[PutOutcome]:
        """Store objects. The sources may be changed as soon as this returns.

        Raises:
            StoreError: the store does not answer; nothing counts as stored.
        """
        ...

    def get(self, keys: Sequence[str], targets: Sequence[Buffer]) -> list[GetOutcome]:
        """Read whole objects, each exactly as large as its target.

        Raises:
            StoreError: the store does not answer. The targets may still be written.
        """
        ...

    def get_ranges(
        self, keys: Sequence[str], targets: Sequence[Buffer], offset: int
    ) -> list[GetOutcome]:
        """Read the part of each object that begins at byte ``offset`` and fills its target.

        Only where ``supports_ranges``. Raises as ``get`` does.
        """
        ...

    @property
    def supports_ranges(self) -> bool:
        """Whether parts of objects can be read."""
        ...

    def remove_prefix(self, prefix: str) -> int:
        """Remove objects whose keys begin with ``prefix``, in use or not; answer how many.

        Best effort: a store that cannot list its keys removes nothing and answers 0.

        Raises:
            StoreError: the store does not answer.
        """
        ...

    def close(self) -> None:
        """Leave the store. Idempotent."""
        ...
