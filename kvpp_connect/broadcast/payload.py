"""Which bytes of a bundle are broadcast."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvpp_connect.broadcast.active import ActiveBlocks
from kvpp_connect.broadcast.pages import PageGather
from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import ComponentPlace, RankPlacement


@dataclass(frozen=True, slots=True)
class Piece:
    """What one broadcast moves: ``data``, one-dimensional bytes, source or target.

    ``gather`` tells the owner how to collect those bytes; nothing where they are there.
    """

    data: torch.Tensor
    gather: PageGather | None = None


class BundlePayload(Protocol):
    """Gives the engine the bytes of each bundle, when its turn comes."""

    def pieces(self, ordinal: int) -> Sequence[Piece]:
        """The ``ordinal``-th bundle, one broadcast each; as many on every rank.

        Their bytes are not used for anything else until the bundle's broadcasts are over.
        """
        ...


class FullPayload:
    """The complete bundle: all components, all blocks."""

    def __init__(self, placement: RankPlacement, memory: torch.Tensor) -> None:
        """Bind the plan to memory.

        Args:
            memory: the rank's allocation as bytes, at least ``placement.total_bytes`` of them.
        """
        check_memory(placement, memory)
        views = [memory[b.offset : b.offset + b.size] for b in placement.bundles]
        self._pieces = [(Piece(view),) for view in views]

    def pieces(self, ordinal: int) -> Sequence[Piece]:
        """The whole bundle where it lies."""
        return self._pieces[ordinal]


class CompactPayload:
    """The active blocks of a bundle: one range for components whose blocks touch in the slot.

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

    def pieces(self, ordinal: int) -> Sequence[Piece]:
        """Room for the active blocks in the bundle's slot, and where its owner keeps them."""
        assert self._active is not None, "use() comes before the forward"
        bundle, used = self._placement.bundles[ordinal], len(self._active)
        owned = bundle.owner == self._placement.rank
        return tuple(
            Piece(
                self._range(*bundle.used_range(run, used)),
                self._gather(bundle.components[run]) if owned else None,
            )
            for run in bundle.runs
        )

    def _gather(self, kept: Sequence[ComponentPlace]) -> PageGather:
        assert self._active is not None, "use() comes before the forward"
        caches = [
            self._range(place.offset, place.size).view(-1, place.component.page_bytes)
            for place in kept
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
