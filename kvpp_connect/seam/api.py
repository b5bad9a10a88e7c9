"""vLLM's connector API, imported in one place for the connectors."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_events import KVCacheEvent
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

from kvpp_connect._log import get_logger
from kvpp_connect.errors import ConfigError
from kvpp_connect.platforms.base import PLATFORMS, select_platform
from kvpp_connect.seam import ascend
from kvpp_connect.seam.older_vllm import (
    TELLS_SYNC_LOADS,
    BlockTables,
    KVConnectorTransferResults,
    has_sync_loads,
)
from kvpp_connect.seam.pool_guard import GuardedBlockPool
from kvpp_connect.seam.retries import allow_second_loads

if TYPE_CHECKING:
    # Types for the connectors, re-exported.
    from vllm.config import KVTransferConfig as KVTransferConfig
    from vllm.config import VllmConfig as VllmConfig
    from vllm.forward_context import ForwardContext as ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata as AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool as BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks as KVCacheBlocks
    from vllm.v1.core.kv_cache_manager import KVCacheManager as KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput as SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig as KVCacheConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec as KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput as KVConnectorOutput
    from vllm.v1.request import Request as Request

    from kvpp_connect.platforms.device import Device

logger = get_logger(__name__)

__all__ = [
    "TELLS_SYNC_LOADS",
    "BlockTables",
    "KVCacheEvent",
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
    "allow_second_loads",
    "choose_first_device",
    "create_metric_per_engine",
    "device_index",
    "expect_loads",
    "get_ip",
    "has_sync_loads",
    "make_device",
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
    """Pins on blocks of vLLM's pool: references that belong to no request.

    No running request reads pinned blocks, so they need no room in KVPP's scratch.
    """

    def __init__(self, pool: "BlockPool") -> None:
        self._pool = pool

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep blocks from being handed out, whoever frees them."""
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])
        if isinstance(self._pool, GuardedBlockPool):
            self._pool.lease(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Take one pin back; blocks that nobody else holds become free."""
        if isinstance(self._pool, GuardedBlockPool):
            self._pool.end_lease(block_ids)
        self._pool.free_blocks(self._pool.blocks[block_id] for block_id in reversed(block_ids))

    def forget(self, block_ids: Sequence[int]) -> None:
        """Let no further request find these blocks by their tokens."""
        self._pool.evict_blocks(set(block_ids))

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole pool."""
        return self._pool.num_gpu_blocks

    @property
    def hash_block_tokens(self) -> int:
        """Tokens for which one of vLLM's block hashes stands."""
        return self._pool.hash_block_size


def transfer_protocol(vllm_config: "VllmConfig") -> str:
    """Transfer protocol of the engine's device: RDMA where the platform table has no entry."""
    platform = PLATFORMS.get(vllm_config.device_config.device_type)
    return platform.transfer_protocol if platform else "rdma"


def expect_loads(vllm_config: "VllmConfig", connector: str) -> None:
    """Tell vLLM that a connector writes into blocks, whatever role the user gave the whole.

    With several steps in flight vLLM keeps blocks that such a step may still write from being
    handed out for a load, but only where the engine is a consumer.

    Args:
        connector: who loads, for the log.

    Raises:
        ConfigError: vllm-ascend would take the changed role for more than that.
    """
    whole = vllm_config.kv_transfer_config
    if whole is None or whole.kv_role != "kv_producer":
        return
    if vllm_config.device_config.device_type != ascend.DEVICE_TYPE:
        whole.kv_role = "kv_both"
        logger.info("%s loads KV: the engine's kv_role is kv_both, not kv_producer", connector)
    elif vllm_config.max_concurrent_batches > 1:
        raise ConfigError(
            f"{connector} loads KV, and kv_role kv_producer lets vLLM hand out blocks that an "
            'earlier step may still write. Set "kv_role": "kv_both" for the whole engine, by which '
            "vllm-ascend chooses kernels as well, or use --no-async-scheduling"
        )


def choose_first_device(vllm_config: "VllmConfig") -> None:
    """Make the first NPU current in a process that uses none yet; on other devices nothing."""
    if vllm_config.device_config.device_type != ascend.DEVICE_TYPE:
        return
    npu = torch.get_device_module(ascend.DEVICE_TYPE)
    if not npu.is_initialized():  # else a worker runs in this process, and has chosen
        npu.set_device(0)


def device_index(vllm_config: "VllmConfig") -> int:
    """Index of this process's accelerator; 0 on a CPU."""
    device_type = vllm_config.device_config.device_type
    return 0 if device_type == "cpu" else torch.get_device_module(device_type).current_device()


def make_device(vllm_config: "VllmConfig") -> "Callable[[], Device] | None":
    """How to make the accelerator's device under the caches; ``None`` on a CPU.

    Raises:
        ConfigError: no platform is known for the device.
    """
    device_type = vllm_config.device_config.device_type
    return None if device_type == "cpu" else select_platform(device_type).create_device
