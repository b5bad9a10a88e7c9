"""Which bytes of a bundle are broadcast."""

from typing import Protocol

import torch

from kvpp_connect.broadcast.active import ActiveBlocks
from kvpp_connect.broadcast.pages import PageGather
from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import RankPlacement


class BundlePayload(Protocol):
    """Gives the engine one contiguous byte tensor for each bundle, when its turn comes."""

    def bytes_of(self, ordinal: int) -> torch.Tensor:
        """Bytes of the ``ordinal``-th bundle: the source on its owner, the target elsewhere.

        They are not used for anything else until the bundle's broadcast is over.
        """
        ...

    def gather(self, ordinal: int) -> PageGather | None:
        """On the bundle's owner, how to collect those bytes; nothing where they are there."""
        ...


class FullPayload:
    """The complete bundle: all components, all blocks."""

    def __init__(self, placement: RankPlacement, memory: torch.Tensor) -> None:
        """Bind the plan to memory.

        Args:
            memory: the rank's allocation as bytes, at least ``placement.total_bytes`` of them.
        """
        check_memory(placement, memory)
        self._views = [memory[b.offset : b.offset + b.size] for b in placement.bundles]

    def bytes_of(self, ordinal: int) -> torch.Tensor:
        """The whole bundle where it lies."""
        return self._views[ordinal]

    def gather(self, ordinal: int) -> None:
        """Nothing to collect."""


class CompactPayload:
    """The active blocks of a bundle, as one range.

    The owner may gather them into its own scratch slot, which is free because it owns the layer; on
    the other ranks the broadcast fills the same slot. No staging buffer and no unused byte.
    """

    def __init__(self, placement: RankPlacement, memory: torch.Tensor) -> None:
        """Bind the plan to memory."""
        check_memory(placement, memory)
        self._placement = placement
        self._memory = memory
        self._active: ActiveBlocks | None = None

    def use(self, active: ActiveBlocks) -> None:
        """Set the blocks of the coming forward.

        Raises:
            LayoutError: more blocks than a slot holds; the scheduler should not have let them in.
        """
        if len(active) > self._placement.scratch_blocks:
            raise LayoutError(
                f"KVPP rank {self._placement.rank}: the forward uses {len(active)} blocks, scratch "
                f"holds {self._placement.scratch_blocks}"
            )
        self._active = active

    def bytes_of(self, ordinal: int) -> torch.Tensor:
        """Room for the active blocks in the bundle's scratch slot."""
        assert self._active is not None, "use() comes before the forward"
        return self._range(*self._placement.bundles[ordinal].used_range(len(self._active)))

    def gather(self, ordinal: int) -> PageGather | None:
        """The active blocks where the owner keeps them."""
        assert self._active is not None, "use() comes before the forward"
        bundle = self._placement.bundles[ordinal]
        if bundle.owner != self._placement.rank:
            return None
        caches = [
            self._range(kept.offset, kept.size).view(-1, kept.component.page_bytes)
            for kept in bundle.components
        ]
        return PageGather(caches, self._active.ids)

    def _range(self, offset: int, size: int) -> torch.Tensor:
        return self._memory[offset : offset + size]


def check_memory(placement: RankPlacement, memory: torch.Tensor) -> None:
    """Refuse memory that does not hold the placement.

    Raises:
        LayoutError: not one-dimensional bytes, or too few of them.
    """
    if memory.dtype not in (torch.uint8, torch.int8) or memory.dim() != 1:
        raise LayoutError(f"expected one-dimensional bytes, got {memory.dtype} {memory.shape}")
    if memory.numel() < placement.total_bytes:
        raise LayoutError(
            f"allocation of {memory.numel()} bytes on rank {placement.rank}, the placement "
            f"needs {placement.total_bytes}"
        )
