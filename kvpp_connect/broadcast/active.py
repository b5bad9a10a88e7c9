"""The blocks that one forward uses, numbered compactly.

Every rank of the group derives the same sorted list from the scheduled requests' block tables, so
a block that several requests share travels once and no list has to be exchanged. Layers whose cache
lies in scratch then run with block tables and slots renumbered to positions in that list.
"""

import torch


class ActiveBlocks:
    """Sorted ids of the active blocks, shape ``(active,)``, and the way from id to position."""

    def __init__(
        self,
        block_table: torch.Tensor,
        blocks_used: torch.Tensor,
        num_blocks: int,
        device: torch.device | None = None,
        at_most: int | None = None,
    ) -> None:
        """Collect the blocks of a batch.

        Args:
            block_table: block ids in host memory, shape ``(requests, width)``; a row is stale
                beyond its used part.
            blocks_used: leading entries of each row that count, shape ``(requests,)``.
            num_blocks: ids are below it.
            device: where the caches and vLLM's tables lie; default: the host.
            at_most: keep only so many blocks; all others get the first one's position.
        """
        host = block_table.device
        device = device or host
        width = torch.arange(block_table.shape[1], device=host)
        # On the host: to learn from the device how many there are is to wait for its work.
        ids = torch.unique(block_table[width.unsqueeze(0) < blocks_used.unsqueeze(1)].long())
        ids = ids[:at_most]
        # New tensors in each forward. Their memory is the compute stream's, which waits for all
        # gathers of a forward before the next one can be given that memory.
        self.ids = ids if device == host else ids.pin_memory().to(device, non_blocking=True)
        self._position = torch.zeros(num_blocks, dtype=torch.int64, device=device)
        self._position[self.ids] = torch.arange(len(ids), device=device)

    def __len__(self) -> int:
        return len(self.ids)

    def renumber_table(self, block_table: torch.Tensor, first_block: int = 0) -> torch.Tensor:
        """Block table of the same shape and dtype with positions; stale entries become the first.

        Args:
            first_block: position of the first active block.
        """
        known = block_table.long().clamp(0, len(self._position) - 1)
        return (self._position[known] + first_block).to(block_table.dtype)

    def renumber_slots(
        self, slots: torch.Tensor, block_tokens: int, first_block: int = 0
    ) -> torch.Tensor:
        """Slot mapping (``block * block_tokens + offset``; -1 is padding) with positions."""
        blocks, offsets = slots.clamp(min=0) // block_tokens, slots.clamp(min=0) % block_tokens
        positions = self._position[blocks.long()] + first_block
        renumbered = positions.to(slots.dtype) * block_tokens + offsets
        return torch.where(slots >= 0, renumbered, slots)
