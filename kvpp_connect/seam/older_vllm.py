"""What vLLM 0.26 lacks of later ones, and how connectors and runtime do without it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched import output

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults as KVConnectorTransferResults,
    )
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass
class _TransferResults:
    """Request ids; the failed ones are among the received ones as well."""

    finished_sending: set[str] = field(default_factory=set[str])
    finished_recving: set[str] = field(default_factory=set[str])
    failed_recving: set[str] = field(default_factory=set[str])


def _untagged(extra_keys: "Iterable[Any]") -> list[Any]:
    """Extra keys of blocks as events have them: here they are made that way."""
    return list(extra_keys)


if not TYPE_CHECKING:
    # 0.26 asks get_finished and get_block_ids_with_load_errors instead.
    KVConnectorTransferResults = getattr(base, "KVConnectorTransferResults", _TransferResults)
MEDIUM_STORAGE: str = getattr(kv_events, "MEDIUM_STORAGE", "STORAGE")
to_event_extra_keys: Any = getattr(kv_cache_utils, "to_event_extra_keys", _untagged)

TELLS_SYNC_LOADS = "has_sync_kv_loads" in {f.name for f in fields(output.SchedulerOutput)}


def has_sync_loads(scheduler_output: "SchedulerOutput") -> bool:
    """Whether a connector loads KV that the coming forward reads.

    Of an older vLLM no: ours refuse to do so there, and no others run beside them or under KVPP.
    """
    return TELLS_SYNC_LOADS and scheduler_output.has_sync_kv_loads


class BlockTables:
    """Blocks of the scheduled requests, followed through vLLM's steps.

    For a vLLM that does not give connectors its cache manager, and one group of caches.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, list[int]] = {}

    def follow(self, scheduler_output: "SchedulerOutput") -> None:
        """Take in the coming step; each exactly once."""
        for request_id in scheduler_output.finished_req_ids:
            self._blocks.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._blocks[new.req_id] = list(new.block_ids[0])
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._blocks[request_id] = []
            self._blocks[request_id] += added[0] if added else ()

    def block_ids(self, request_id: str) -> Sequence[int]:
        """The blocks of a request of the last step, first to last."""
        return self._blocks[request_id]
