"""Compact mode inside vLLM's model runner V1."""

from typing import Any

from kvpp_connect.errors import SeamError
from kvpp_connect.seam.compact import CompactForward


class CompactForwardV1(CompactForward):
    """Works from the runner's block table, which has a copy in host memory."""

    def _kernel_block_tokens(self) -> list[int]:
        return self._runner._kernel_block_sizes  # noqa: SLF001 - vLLM's name

    def _take_over(self) -> None:
        self._original_slot_mappings = self._runner._get_slot_mappings  # noqa: SLF001 - in the ledger
        self._runner._get_slot_mappings = self._get_slot_mappings  # noqa: SLF001 - in the ledger

    def _get_slot_mappings(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ANN401
        by_group, by_layer = self._original_slot_mappings(*args, **kwargs)
        if not self._open or by_layer is None:
            return by_group, by_layer
        if not isinstance(by_layer, dict):
            raise SeamError("KVPP compact: slot mappings of micro-batches are not supported")
        batch = self._runner.input_batch
        requests = batch.num_reqs
        table = batch.block_table[0].get_cpu_tensor()[:requests]
        self._begin(table, self._runner.optimistic_seq_lens_cpu[:requests])
        self._renumber(by_layer)
        return by_group, by_layer
