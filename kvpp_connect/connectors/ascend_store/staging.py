"""Host memory through which objects go on their way between caches and the store.

A store reads and writes staging only, never a cache: blocks are free as soon as they are copied,
and a read that was given up cannot write into a block that belongs to another request by then. Each
object lies in one row; a slot is as many rows as fit, for one batch at a time.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvpp_connect.connectors.ascend_store.backends.base import Buffer
from kvpp_connect.errors import ConfigError

_ALIGNMENT = 64
_BATCH_BYTES = 8 << 20  # processors keep so much in their cache from copy to seal to store
_LEAST_SLOTS = 2


@dataclass(slots=True, eq=False)
class Slot:
    """A part of staging; ``memory`` is one-dimensional bytes on the host."""

    memory: torch.Tensor
    free_at: float = 0.0  # monotonic seconds

    def rows(self, count: int, size: int) -> torch.Tensor:
        """The first rows of a size in bytes: shape ``(count, size)``, each aligned."""
        return self.memory.as_strided((count, size), (_stride(size), 1))


def row_array(rows: torch.Tensor) -> NDArray[np.uint8]:
    """The same rows for numpy."""
    return rows.numpy()


def row_buffers(rows: torch.Tensor) -> list[Buffer]:
    """The same rows for a store."""
    begin, stride, size = rows.data_ptr(), rows.stride(0), rows.shape[1]
    return [Buffer(begin + i * stride, size) for i in range(rows.shape[0])]


class Staging:
    """Slots that batches take in turn. Thread-safe."""

    def __init__(
        self, memory: torch.Tensor, slots: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Cut memory, one-dimensional bytes on the host, into equal slots."""
        self._clock = clock
        size = memory.numel() // slots // _ALIGNMENT * _ALIGNMENT
        self._slot_bytes = size
        self._free = [Slot(memory[i * size : (i + 1) * size]) for i in range(slots)]
        self._condition = threading.Condition()

    def rows_for(self, sizes: Sequence[int]) -> int:
        """Objects in a batch, where they have one of these sizes in bytes.

        Raises:
            ConfigError: not one fits.
        """
        largest = max(sizes, default=1)
        rows = self._slot_bytes // _stride(largest)
        if rows < 1:
            raise ConfigError(
                f"AscendStoreConnector: objects of {largest} bytes do not fit into a staging slot "
                f"of {self._slot_bytes}; raise kv_connector_extra_config.staging_bytes"
            )
        return rows

    def take(self, timeout_s: float) -> Slot | None:
        """A free slot, or ``None`` if there is none in time."""
        deadline = self._clock() + timeout_s
        with self._condition:
            while True:
                now = self._clock()
                for slot in self._free:
                    if slot.free_at <= now:
                        self._free.remove(slot)
                        return slot
                if now >= deadline:
                    return None
                due = min((slot.free_at for slot in self._free), default=deadline)
                self._condition.wait(min(due, deadline) - now)

    def give_back(self, slot: Slot, held_s: float = 0.0) -> None:
        """Take a slot back. It may still be written for so many seconds: nobody gets it before."""
        slot.free_at = self._clock() + held_s if held_s else 0.0
        with self._condition:
            self._free.insert(0, slot)  # the processor still has it in its cache
            self._condition.notify()


def count_slots(memory_bytes: int, object_sizes: Sequence[int]) -> int:
    """Into how many slots to cut memory, for objects of these sizes in bytes.

    More slots than threads: one that may still be written does not hold the others up.
    """
    largest = max(map(_stride, object_sizes), default=1)
    return max(_LEAST_SLOTS, memory_bytes // max(_BATCH_BYTES, largest))


def allocate(size: int, *, pinned: bool) -> torch.Tensor:
    """Host memory for staging, aligned; ``pinned`` for copies from and to an accelerator."""
    memory = torch.zeros(size + _ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
    skip = -memory.data_ptr() % _ALIGNMENT
    return memory[skip : skip + size]


def _stride(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
