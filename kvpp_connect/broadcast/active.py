"""The blocks that one forward uses, numbered compactly.

Every rank of the group derives the same sorted list from the scheduled requests' block tables, so
a block that several requests share travels once and no list has to be exchanged. Layers whose cache
lies in scratch then run with block tables and slots renumbered to positions in that list.
"""

import torch


class ActiveBlocks:
    """Sorted ids of the active blocks, shape ``(active,)``, and the way from id to position."""

    def __init__(
        self, block_table: torch.Tensor, blocks_used: torch.Tensor, num_blocks: int
    ) -> None:
        """Collect the blocks of a batch.

        Args:
            block_table: block ids, shape ``(requests, width)``; a row is stale beyond its used
                part.
            blocks_used: leading entries of each row that count, shape ``(requests,)``.
            num_blocks: ids are below it.
        """
        width = torch.arange(block_table.shape[1], device=block_table.device)
        used = width.unsqueeze(0) < blocks_used.to(block_table.device).unsqueeze(1)
        self.ids = torch.unique(block_table[used].long())
        self._position = torch.zeros(num_blocks, dtype=torch.int64, device=block_table.device)
        self._position[self.ids] = torch.arange(len(self.ids), device=block_table.device)

    def __len__(self) -> int:
        return len(self.ids)

    def renumber_table(self, block_table: torch.Tensor) -> torch.Tensor:
        """Block table of the same shape and dtype with positions; stale entries become 0."""
        known = block_table.long().clamp(0, len(self._position) - 1)
        return self._position[known].to(block_table.dtype)

    def renumber_slots(self, slots: torch.Tensor, block_tokens: int) -> torch.Tensor:
        """Slot mapping (``block * block_tokens + offset``; -1 is padding) with positions."""
        blocks, offsets = slots.clamp(min=0) // block_tokens, slots.clamp(min=0) % block_tokens
        renumbered = self._position[blocks.long()].to(slots.dtype) * block_tokens + offsets
        return torch.where(slots >= 0, renumbered, slots)
