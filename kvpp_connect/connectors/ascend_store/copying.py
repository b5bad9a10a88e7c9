"""Copies between the blocks of caches and rows of staging."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from kvpp_connect.connectors.ascend_store.objects import HEADER_BYTES
from kvpp_connect.layout import ComponentAddress
from kvpp_connect.platforms.device import Device, StreamEvent


def byte_blocks(cache: torch.Tensor, address: ComponentAddress, num_blocks: int) -> torch.Tensor:
    """A cache as bytes: shape ``(num_blocks, page_bytes)``, blocks a stride apart."""
    storage = cache.untyped_storage()
    offset = address.address - storage.data_ptr()
    blocks = torch.empty(0, dtype=torch.uint8, device=cache.device)
    shape = (num_blocks, address.page_bytes)
    blocks.set_(storage, offset, shape, (address.block_stride_bytes, 1))  # type: ignore[call-overload] - torch's stub
    return blocks


class BlockCopier(Protocol):
    """Moves blocks of several caches. Thread-safe."""

    def enter_thread(self) -> None:
        """Called first in each thread that copies, or moves copied bytes."""
        ...

    def mark(self) -> StreamEvent | None:
        """Mark the work that the model has been given up to now."""
        ...

    def gather(
        self,
        caches: Sequence[torch.Tensor],
        block_ids: Sequence[int],
        rows: torch.Tensor,
        after: StreamEvent | None,
    ) -> None:
        """Copy blocks into rows, behind their headers; returns when the bytes are there.

        Args:
            caches: what an object holds, in its order; see :func:`byte_blocks`.
            rows: shape ``(blocks, object bytes)``.
            after: the mark of the forward that wrote the blocks.
        """
        ...

    def scatter(
        self,
        rows: torch.Tensor,
        caches: Sequence[torch.Tensor],
        block_ids: Sequence[int],
        begin: int = HEADER_BYTES,
    ) -> None:
        """The way back; returns when the bytes are in the caches.

        Args:
            begin: where in its row the first cache's page lies.
        """
        ...


class HostCopier:
    """Caches in host memory, where a forward is over when it returns."""

    def enter_thread(self) -> None:
        """Nothing to do."""

    def mark(self) -> StreamEvent | None:
        """Nothing is under way."""
        return None

    def gather(
        self,
        caches: Sequence[torch.Tensor],
        block_ids: Sequence[int],
        rows: torch.Tensor,
        after: StreamEvent | None,
    ) -> None:
        """Copy blocks into rows."""
        del after
        ids = torch.tensor(block_ids)
        for cache, part in _parts(caches, rows):
            torch.index_select(cache, 0, ids, out=part)

    def scatter(
        self,
        rows: torch.Tensor,
        caches: Sequence[torch.Tensor],
        block_ids: Sequence[int],
        begin: int = HEADER_BYTES,
    ) -> None:
        """Copy rows into blocks."""
        ids = np.array(block_ids)
        for cache, part in _parts(caches, rows, begin):
            cache.numpy()[ids] = part.numpy()  # torch's own way is several times slower


class DeviceCopier:
    """Caches on an accelerator, over a transfer stream that nobody else uses.

    Between host and device each object goes as one range of pinned memory: rows have gaps between
    them, and torch takes copies with gaps through memory that is not pinned, twice as far.
    """

    def __init__(self, device: Device, memory: torch.device) -> None:
        """Args: memory: where the caches lie."""
        self._device = device
        self._memory = memory

    def enter_thread(self) -> None:
        """Make the device current: else torch opens the first one in each rank's process."""
        torch.get_device_module(self._memory).set_device(self._memory)

    def mark(self) -> StreamEvent | None:
        """Mark the work of the model's stream."""
        event = self._device.event()
        event.record()
        return event

    def gather(
        self,
        caches: Sequence[torch.Tensor],
        block_ids: Sequence[int],
        rows: torch.Tensor,
        after: StreamEvent | None,
    ) -> None:
        """Copy blocks into rows."""
        with self._device.transfers():
            if after is not None:
                after.wait()
            ids = torch.tensor(block_ids, device=self._memory)
            packed = torch.cat([cache.index_select(0, ids) for cache in caches], dim=1)
            ranges = rows[:, HEADER_BYTES : HEADER_BYTES + packed.shape[1]]
            for row, range_ in zip(packed, ranges, strict=True):
                range_.copy_(row, non_blocking=True)
            self._device.finish_transfers()

    def scatter(
        self,
        rows: torch.Tensor,
        caches: Sequence[torch.Tensor],
        block_ids: Sequence[int],
        begin: int = HEADER_BYTES,
    ) -> None:
        """Copy rows into blocks."""
        with self._device.transfers():
            ids = torch.tensor(block_ids, device=self._memory)
            width = sum(cache.shape[1] for cache in caches)
            packed = torch.empty((len(rows), width), dtype=torch.uint8, device=self._memory)
            for row, range_ in zip(packed, rows[:, begin : begin + width], strict=True):
                row.copy_(range_, non_blocking=True)
            for cache, part in _parts(caches, packed, begin=0):
                cache.index_copy_(0, ids, part)
            self._device.finish_transfers()


def _parts(
    caches: Sequence[torch.Tensor], rows: torch.Tensor, begin: int = HEADER_BYTES
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each cache with its columns of the rows."""
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for cache in caches:
        end = begin + cache.shape[1]
        parts.append((cache, rows[:, begin:end]))
        begin = end
    return parts
