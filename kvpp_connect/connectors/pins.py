"""What connectors need of vLLM's block pool."""

from collections.abc import Sequence
from typing import Protocol


class BlockPins(Protocol):
    """Reference counts of the block pool that belong to no request."""

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep blocks from being handed out, whoever frees them."""
        ...

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Take one pin back; blocks that nobody else holds become free."""
        ...
