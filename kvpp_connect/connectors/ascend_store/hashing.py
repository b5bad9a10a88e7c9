"""Names for token blocks: a chain of hashes, each over its block's tokens and all before it.

vLLM's own block hashes are not used: they depend on an algorithm that can be chosen, on a seed
that may be random in each process, and may be too short to tell tenants' prompts apart for good.
These are sha256, the same in every process.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence

ROOT = hashlib.sha256(b"kvpp-connect block chain 1").digest()

ExtraOf = Callable[[int, int], bytes]
"""What else, beside tokens, decides about the KV of tokens ``[start, end)``: adapters, images,
salts; empty for nothing."""


class BlockChain:
    """One request's full blocks, as far as its tokens go."""

    def __init__(self, block_tokens: int, extra: ExtraOf | None = None) -> None:
        self._block_tokens = block_tokens
        self._extra = extra
        self.hashes: list[bytes] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the blocks that have become full.

        Args:
            token_ids: all tokens of the request; those hashed before do not change.
        """
        size = self._block_tokens
        for index in range(len(self.hashes), len(token_ids) // size):
            start = index * size
            tokens = token_ids[start : start + size]
            self.hashes.append(self._hash(self._parent(index), tokens, start))

    def tail(self, token_ids: Sequence[int]) -> bytes | None:
        """Name of the tokens behind the last full block; ``None`` where there are none."""
        start = len(token_ids) // self._block_tokens * self._block_tokens
        if start == len(token_ids):
            return None
        self.extend(token_ids)
        # Fewer tokens than a full block has, so it can be no full block's name.
        return self._hash(self._parent(start // self._block_tokens), token_ids[start:], start)

    def _parent(self, index: int) -> bytes:
        return self.hashes[index - 1] if index else ROOT

    def _hash(self, parent: bytes, tokens: Sequence[int], start: int) -> bytes:
        extra = self._extra(start, start + len(tokens)) if self._extra else b""
        data = array("q", tokens).tobytes()
        lengths = len(data).to_bytes(8, "little") + len(extra).to_bytes(8, "little")
        return hashlib.sha256(parent + lengths + data + extra).digest()
