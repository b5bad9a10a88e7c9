"""``MooncakeConnectorV2``: vLLM's connector API, forwarded to the side of this process."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvpp_connect.connectors.caches import block_shape, cache_tensors
from kvpp_connect.connectors.metrics import ReportsMetrics
from kvpp_connect.connectors.mooncake_v2.config import parse_extra_config, replica_port
from kvpp_connect.connectors.mooncake_v2.metadata import StepOrders
from kvpp_connect.connectors.mooncake_v2.scheduler_side import SchedulerSide
from kvpp_connect.connectors.mooncake_v2.stats import MooncakeV2Prometheus, MooncakeV2Stats
from kvpp_connect.connectors.mooncake_v2.worker_side import WorkerSide
from kvpp_connect.errors import ConfigError
from kvpp_connect.layout import GroupManifest
from kvpp_connect.seam.api import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    PoolPins,
    SupportsHMA,
    expect_loads,
    get_ip,
    transfer_protocol,
)
from kvpp_connect.seam.host_plan import placement_for

if TYPE_CHECKING:
    import torch

    from kvpp_connect.seam.api import (
        AttentionMetadata,
        BlockPool,
        ForwardContext,
        KVCacheBlocks,
        KVCacheConfig,
        KVConnectorOutput,
        KVTransferConfig,
        Request,
        SchedulerOutput,
        VllmConfig,
    )


@dataclass
class MooncakeV2Metadata(KVConnectorMetadata):
    """One step's orders, scheduler to workers."""

    orders: StepOrders


@dataclass
class MooncakeV2Handshake(KVConnectorHandshakeMetadata):
    """A KVPP group's publication, workers to scheduler, as msgpack."""

    publication: bytes


@dataclass
class MooncakeV2WorkerMetadata(KVConnectorWorkerMetadata):
    """What workers add to the ids of received requests.

    ``still_written``: seconds for which a given-up read may write a received request's blocks.
    """

    still_written: dict[str, float]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "MooncakeV2WorkerMetadata":
        assert isinstance(other, MooncakeV2WorkerMetadata)
        longest = dict(self.still_written)
        for request_id, seconds in other.still_written.items():
            longest[request_id] = max(seconds, longest.get(request_id, 0.0))
        return MooncakeV2WorkerMetadata(longest)


class MooncakeConnectorV2(ReportsMetrics, KVConnectorBase_V1, SupportsHMA):
    """Pull-based P/D connector that reads each layer from a rank that really holds it."""

    stats_class = MooncakeV2Stats
    prometheus_class = MooncakeV2Prometheus

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        config = parse_extra_config(transfer.kv_connector_extra_config, str(transfer.kv_role))
        host = config.host or get_ip()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._cache_config = kv_cache_config
        self._failed_blocks: set[int] = set()
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                config=config,
                host=host,
                port=replica_port(config, vllm_config.parallel_config.data_parallel_index),
                engine_id=str(transfer.engine_id),
                produces=transfer.is_kv_producer,
                consumes=transfer.is_kv_consumer,
            )
        else:
            self._worker = WorkerSide(
                config=config,
                host=host,
                protocol=config.protocol or transfer_protocol(vllm_config),
                shape=block_shape("MooncakeConnectorV2", kv_cache_config, vllm_config),
                consumes=transfer.is_kv_consumer,
            )

    @classmethod
    def check_settings(cls, vllm_config: "VllmConfig", transfer: "KVTransferConfig") -> None:
        """Check the settings before anything is loaded.

        Raises:
            ConfigError: names the setting and what to change.
        """
        extra = transfer.kv_connector_extra_config
        config = parse_extra_config(extra, str(transfer.kv_role))
        replica_port(config, vllm_config.parallel_config.data_parallel_size - 1)
        if getattr(vllm_config.model_config, "enable_sleep_mode", False):
            raise ConfigError(
                "MooncakeConnectorV2: --enable-sleep-mode takes the memory away that peers read, "
                "and gives other memory back. Remove it"
            )
        if transfer.is_kv_consumer:
            expect_loads(vllm_config, "MooncakeConnectorV2")

    # Scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        assert self._scheduler is not None
        self._scheduler.bind_pool(PoolPins(gpu_block_pool))

    def on_new_request(self, request: "Request") -> None:
        assert self._scheduler is not None
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        assert self._scheduler is not None
        return MooncakeV2Metadata(self._scheduler.take_orders())

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        assert self._scheduler is not None
        metadata = connector_output.kv_connector_worker_meta
        known = isinstance(metadata, MooncakeV2WorkerMetadata)
        still_written = metadata.still_written if known else {}
        self._scheduler.received(connector_output.finished_recving or (), still_written)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        assert self._scheduler is not None
        decoder = msgspec.msgpack.Decoder(GroupManifest)
        self._scheduler.publish(
            [
                decoder.decode(entry.publication)
                for entry in metadata.values()
                if isinstance(entry, MooncakeV2Handshake)
            ]
        )

    # Worker side

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        assert self._worker is not None
        tensors = cache_tensors(kv_caches)
        placement = placement_for(self._vllm_config, self._cache_config, tensors)
        self._worker.register(tensors, placement)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        assert self._worker is not None
        publication = self._worker.publication
        return MooncakeV2Handshake(msgspec.msgpack.encode(publication)) if publication else None

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: object) -> None:
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, MooncakeV2Metadata)
        self._worker.carry_out(metadata.orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        results = self._worker.take_results()
        return KVConnectorTransferResults(
            finished_sending=set(results.sent),
            finished_recving=set(results.received),
            failed_recving=set(results.failed),
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """What a vLLM without ``get_transfer_results`` asks, followed by the next question."""
        assert self._worker is not None
        results = self._worker.take_results()
        self._failed_blocks |= results.failed_blocks
        return set(results.sent), set(results.received)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> MooncakeV2WorkerMetadata | None:
        assert self._worker is not None
        still_written = self._worker.take_still_written()
        return MooncakeV2WorkerMetadata(still_written) if still_written else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: pulls are asynchronous and end before their request is run."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: "torch.Tensor",
        attn_metadata: "AttentionMetadata",
        **kwargs: object,
    ) -> None:
        """Nothing to save: the decode node reads the cache itself."""

    def wait_for_save(self) -> None:
        """Nothing to save."""
