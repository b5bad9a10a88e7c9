"""Compact mode inside vLLM's model runner V2.

V2 keeps block tables on the device alone; what the scheduler adds to them is noted here in host
memory, so that every rank lists a batch's blocks without asking its device. V2 may run ahead of the
device (asynchronous scheduling), and then knows a request's tokens by an upper bound, the same one
on all ranks. Under prefill context parallelism (PCP) it works on this rank's part of the batch; the
list is of the whole batch.
"""

from functools import wraps
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu import model_runner

from kvpp_connect.seam.compact import CompactForward


class CompactForwardV2(CompactForward):
    """Works from a copy of the block table that it keeps."""

    def _kernel_block_tokens(self) -> list[int]:
        return self._runner.kernel_block_sizes

    def _take_over(self) -> None:
        self._block_table = _HostBlockTable(self._runner.block_tables)
        self._runner.prepare_attn = self._beginning_after(self._runner.prepare_attn)
        # A function in the module's namespace, which execute_model calls after that.
        module: Any = model_runner
        module.build_slot_mappings_by_layer = self._renumbering(module.build_slot_mappings_by_layer)

    def _beginning_after(self, original: Any) -> Any:  # noqa: ANN401 - a method of vLLM's
        runner = self._runner

        @wraps(original)
        def prepare_attn(input_batch: Any) -> Any:  # noqa: ANN401 - vLLM's
            prepared = original(input_batch)
            if self._open:
                batch = runner.pcp_manager.global_batch if runner.pcp_manager else input_batch
                requests = batch.num_reqs
                table = self._block_table.rows(batch.idx_mapping_np[:requests])
                self._begin(table, batch.seq_lens_cpu_upper_bound[:requests])
            return prepared

        return prepare_attn

    def _renumbering(self, original: Any) -> Any:  # noqa: ANN401 - a function of vLLM's
        @wraps(original)
        def build_slot_mappings_by_layer(slot_mappings: Any, kv_cache_config: Any) -> Any:  # noqa: ANN401
            by_layer = original(slot_mappings, kv_cache_config)
            self._renumber(by_layer)
            return by_layer

        return build_slot_mappings_by_layer


class _HostBlockTable:
    """The block ids that were written into the runner's table, in host memory."""

    def __init__(self, block_tables: Any) -> None:  # noqa: ANN401 - vLLM's BlockTables
        self._ids = np.zeros(tuple(block_tables.block_tables[0].gpu.shape), dtype=np.int32)
        self._used = np.zeros(len(self._ids), dtype=np.int32)
        block_tables.append_block_ids = self._noting(block_tables.append_block_ids)

    def rows(self, indices: np.ndarray) -> torch.Tensor:
        """Block ids of requests, shape ``(requests, width)``, by their rows in the runner."""
        return torch.from_numpy(self._ids[indices])

    def _noting(self, original: Any) -> Any:  # noqa: ANN401 - a method of vLLM's
        @wraps(original)
        def append_block_ids(req_index: int, new_block_ids: Any, overwrite: bool) -> None:  # noqa: ANN401
            original(req_index, new_block_ids, overwrite)
            start = 0 if overwrite else self._used[req_index]
            (ids,) = new_block_ids
            self._ids[req_index, start : start + len(ids)] = ids
            self._used[req_index] = start + len(ids)

        return append_block_ids
