"""vLLM's connector API, imported in one place for the connectors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.utils.network_utils import get_ip
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.request import RequestStatus

from kvpp_connect.platforms.base import PLATFORMS


@dataclass
class _TransferResults:
    """Request ids; the failed ones are among the received ones as well."""

    finished_sending: set[str] = field(default_factory=set[str])
    finished_recving: set[str] = field(default_factory=set[str])
    failed_recving: set[str] = field(default_factory=set[str])


try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:  # up to 0.26, which asks get_finished and get_block_ids_with_load_errors
    KVConnectorTransferResults = _TransferResults  # type: ignore[misc, assignment]

if TYPE_CHECKING:
    # Types for the connectors, re-exported.
    from vllm.config import KVTransferConfig as KVTransferConfig
    from vllm.config import VllmConfig as VllmConfig
    from vllm.forward_context import ForwardContext as ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata as AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool as BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks as KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput as SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig as KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput as KVConnectorOutput
    from vllm.v1.request import Request as Request

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorFactory",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "PoolPins",
    "RequestStatus",
    "SupportsHMA",
    "create_metric_per_engine",
    "get_ip",
    "register_connector",
    "transfer_protocol",
]


def register_connector(name: str, module: str) -> bool:
    """Register a connector under its own name unless the name is taken; answer whether it was.

    vLLM raises ``ValueError`` for a name that is known already, be it ours or another's.
    """
    try:
        KVConnectorFactory.register_connector(name, module, name)
    except ValueError:
        return False
    return True


class PoolPins:
    """Pins on blocks of vLLM's pool: references that belong to no request."""

    def __init__(self, pool: "BlockPool") -> None:
        self._pool = pool

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep blocks from being handed out, whoever frees them."""
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Take one pin back; blocks that nobody else holds become free."""
        self._pool.free_blocks(self._pool.blocks[block_id] for block_id in reversed(block_ids))


def transfer_protocol(vllm_config: "VllmConfig") -> str:
    """Transfer protocol of the engine's device: RDMA where the platform table has no entry."""
    platform = PLATFORMS.get(vllm_config.device_config.device_type)
    return platform.transfer_protocol if platform else "rdma"
