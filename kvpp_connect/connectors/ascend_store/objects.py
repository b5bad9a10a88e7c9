"""An object in the pool: a header that seals it, then the pages of its shard's caches.

    magic (8 bytes) | length of the payload (8, little endian) | seal (32) | zeros (16) | payload

The seal is a sha256 over the object's key and a fold of the payload: the payload as rows of 64
words of 8 bytes, added up word by word, and the rest behind the last whole row. It tells a torn,
foreign or overwritten object from a right one at the speed of memory; it is no signature.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 64
MAGIC = b"KVPPOBJ1"
_LANES = 64  # words of a row
_ROW_BYTES = 8 * _LANES

Rows = NDArray[np.uint8]
"""Objects, one in each row, header first: shape (objects, bytes)."""


def object_bytes(payload_bytes: int) -> int:
    """Size of an object."""
    return HEADER_BYTES + payload_bytes


def seal(rows: Rows, keys: Sequence[str]) -> None:
    """Write the headers of objects whose payload is in place."""
    length = (rows.shape[1] - HEADER_BYTES).to_bytes(8, "little")
    for row, key in zip(rows, keys, strict=True):
        header = MAGIC + length + _seal(row, key)
        row[:HEADER_BYTES] = np.frombuffer(header.ljust(HEADER_BYTES, b"\0"), np.uint8)


def is_intact(row: NDArray[np.uint8], key: str) -> bool:
    """Whether a row holds the object that was stored under ``key``, byte for byte."""
    length = (len(row) - HEADER_BYTES).to_bytes(8, "little")
    header = row[:48].tobytes()
    return header[:16] == MAGIC + length and header[16:] == _seal(row, key)


@dataclass(slots=True)
class PartialFolds:
    """Folds of objects that are read part by part, in any order.

    Args:
        count: number of objects.
        payload_bytes: of each; a multiple of 8, as is each part's begin.
    """

    count: int
    payload_bytes: int
    _sums: NDArray[np.uint64] = field(init=False)
    _tails: NDArray[np.uint8] = field(init=False)
    _headers: NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        self._sums = np.zeros((self.count, _LANES), np.uint64)
        self._tails = np.zeros((self.count, self.payload_bytes % _ROW_BYTES), np.uint8)
        self._headers = np.zeros((self.count, HEADER_BYTES), np.uint8)

    def add(self, first: int, rows: Rows, begin: int) -> None:
        """Take in bytes of some objects.

        Args:
            first: place of the first of them.
            rows: one object's bytes in each row.
            begin: where in the object they begin; 0 at the header, which comes as a whole.
        """
        chosen = slice(first, first + len(rows))
        if begin < HEADER_BYTES:
            self._headers[chosen] = rows[:, :HEADER_BYTES]
            rows, begin = rows[:, HEADER_BYTES:], HEADER_BYTES
        start, end = begin - HEADER_BYTES, begin - HEADER_BYTES + rows.shape[1]
        whole = self.payload_bytes - self._tails.shape[1]
        if end > whole:
            tail = max(start, whole)
            self._tails[chosen, tail - whole : end - whole] = rows[:, tail - start :]
            rows = rows[:, : max(0, whole - start)]
        if rows.shape[1]:
            # Shifted to the lanes in which the whole payload would have them.
            front = start % _ROW_BYTES
            width = -(-(front + rows.shape[1]) // _ROW_BYTES) * _ROW_BYTES
            shifted = np.zeros((len(rows), width), np.uint8)
            shifted[:, front : front + rows.shape[1]] = rows
            words = shifted.view(np.uint64).reshape(len(rows), -1, _LANES)
            self._sums[chosen] += words.sum(axis=1, dtype=np.uint64)

    def is_intact(self, place: int, key: str) -> bool:
        """Whether an object of which all parts were taken in is the one stored under ``key``."""
        length = self.payload_bytes.to_bytes(8, "little")
        header = self._headers[place, :48].tobytes()
        digest = _digest(key, self._sums[place], self._tails[place])
        return header[:16] == MAGIC + length and header[16:] == digest


def _seal(row: NDArray[np.uint8], key: str) -> bytes:
    payload = row[HEADER_BYTES:]
    whole = len(payload) // _ROW_BYTES * _ROW_BYTES
    words = payload[:whole].view(np.uint64).reshape(-1, _LANES)
    return _digest(key, np.add.reduce(words, axis=0, dtype=np.uint64), payload[whole:])


def _digest(key: str, sums: NDArray[np.uint64], tail: NDArray[np.uint8]) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(sums.tobytes())
    digest.update(tail.tobytes())
    return digest.digest()
