"""Who touched which byte last, and whether anything orders the next one after that."""

CELL_BYTES = 4  # everything that the simulation touches is made of such cells


class RaceError(AssertionError):
    """Two accesses to a byte, one of them a write, in no order that anybody has asked for."""


class Shadow:
    """Last writer and later readers of every cell."""

    def __init__(self):
        self._writer = {}
        self._readers = {}

    def check(self, operation):
        for cell in cells(operation.reads):
            if operation.relevant is not None and cell not in operation.relevant:
                continue
            self._ordered(self._writer.get(cell), operation, "wrote", "reads")
            self._readers.setdefault(cell, []).append(operation)
        for cell in cells(operation.writes):
            self._ordered(self._writer.get(cell), operation, "wrote", "writes")
            for reader in self._readers.pop(cell, ()):
                self._ordered(reader, operation, "read", "writes")
            self._writer[cell] = operation

    def _ordered(self, before, operation, did, does):
        if before is None or before is operation or operation.done_before >> before.number & 1:
            return
        raise RaceError(f"{before.name} {did} what {operation.name} {does} in no order")


def cells(tensors):
    """Numbers of the cells that tensors consist of, whose rows may lie apart."""
    for tensor in tensors() if callable(tensors) else tensors:
        size = tensor.element_size()
        rows = tensor if tensor.dim() == 2 else [tensor]
        for row in rows:
            assert row.is_contiguous()
            begin, length = row.data_ptr(), row.numel() * size
            assert begin % CELL_BYTES == length % CELL_BYTES == 0
            yield from range(begin // CELL_BYTES, (begin + length) // CELL_BYTES)
