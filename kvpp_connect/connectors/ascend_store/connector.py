"""``AscendStoreConnector``: vLLM's connector API, forwarded to the side of this process."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.ascend_store.backends.create import create_store, engine_to_share
from kvpp_connect.connectors.ascend_store.config import PoolConfig, parse_extra_config
from kvpp_connect.connectors.ascend_store.engine_checks import check_engine
from kvpp_connect.connectors.ascend_store.health import StoreHealth
from kvpp_connect.connectors.ascend_store.identity import model_identity
from kvpp_connect.connectors.ascend_store.lookups import LookupService
from kvpp_connect.connectors.ascend_store.orders import PoolOrders, PoolReport
from kvpp_connect.connectors.ascend_store.scheduler_side import EngineShape, SchedulerSide, Step
from kvpp_connect.connectors.ascend_store.stats import PoolPrometheus, PoolStats
from kvpp_connect.connectors.ascend_store.worker_side import RankPlace, WorkerSide
from kvpp_connect.connectors.caches import block_shape, cache_tensors
from kvpp_connect.connectors.metrics import ReportsMetrics
from kvpp_connect.layout import TokenShard
from kvpp_connect.seam.api import (
    BlockTables,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    PoolPins,
    SupportsHMA,
    allow_second_loads,
    choose_first_device,
    device_index,
    expect_loads,
    get_ip,
    has_sync_loads,
    make_device,
    transfer_protocol,
)
from kvpp_connect.seam.groups import gather_in_group, group_info, token_shard
from kvpp_connect.seam.host_plan import placement_for
from kvpp_connect.seam.runtime import set_bundle_gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from kvpp_connect.seam.api import (
        AttentionMetadata,
        BlockPool,
        ForwardContext,
        KVCacheBlocks,
        KVCacheConfig,
        KVCacheEvent,
        KVCacheManager,
        KVConnectorOutput,
        KVTransferConfig,
        Request,
        SchedulerOutput,
        VllmConfig,
    )

logger = get_logger(__name__)


@dataclass
class PoolMetadata(KVConnectorMetadata):
    """One step's orders, scheduler to workers."""

    orders: PoolOrders


@dataclass
class PoolWorkerMetadata(KVConnectorWorkerMetadata):
    """What workers tell the scheduler side."""

    report: PoolReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "PoolWorkerMetadata":
        assert isinstance(other, PoolWorkerMetadata)
        together = PoolReport()
        together.add(self.report)
        together.add(other.report)
        return PoolWorkerMetadata(together)


class AscendStoreConnector(ReportsMetrics, KVConnectorBase_V1, SupportsHMA):
    """KV pool in which each layer is stored once, by a rank that really holds it."""

    stats_class = PoolStats
    prometheus_class = PoolPrometheus

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        config = parse_extra_config(transfer.kv_connector_extra_config, str(transfer.kv_role))
        check_engine(vllm_config, config)
        self._shape = block_shape("AscendStoreConnector", kv_cache_config, vllm_config)
        self._cache_config = kv_cache_config
        self._tables = BlockTables()  # where vLLM does not lend its cache manager
        self._block_ids: Callable[[str], Sequence[int]] | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        host = config.host or get_ip()
        if role == KVConnectorRole.SCHEDULER:
            allow_second_loads()
            self._scheduler = self._scheduler_side(vllm_config, config, host)
        else:
            self._worker = WorkerSide(
                config=config,
                shape=self._shape,
                open_store=lambda: create_store(
                    config.store,
                    host=host,
                    segment=True,
                    protocol=transfer_protocol(vllm_config),
                    device_index=device_index(vllm_config),
                    # All connectors of a process are made before their caches are registered.
                    engine=engine_to_share(config.store, host),
                ),
                make_device=make_device(vllm_config),
            )

    def _scheduler_side(
        self, vllm_config: "VllmConfig", config: PoolConfig, host: str
    ) -> SchedulerSide:
        parallel = vllm_config.parallel_config
        if config.backend == "mooncake":
            choose_first_device(vllm_config)  # its Ascend transport asks for one in every process
        store = create_store(
            config.store, host=host, segment=False, protocol=transfer_protocol(vllm_config)
        )
        events = vllm_config.kv_events_config
        return SchedulerSide(
            config=config,
            shape=EngineShape(
                block_tokens=self._shape.block_tokens * self._shape.token_shards,
                stages=parallel.pipeline_parallel_size,
                world_size=parallel.world_size,
                steps_in_flight=vllm_config.max_concurrent_batches,
            ),
            identity=model_identity(vllm_config, config.namespace),
            lookups=LookupService(store, StoreHealth(f"{config.backend} (scheduler)")),
            emits_events=events is not None and events.enable_kv_cache_events,
        )

    @classmethod
    def check_settings(cls, vllm_config: "VllmConfig", transfer: "KVTransferConfig") -> None:
        """Check the settings before anything is loaded.

        Raises:
            ConfigError: names the setting and what to change.
        """
        config = parse_extra_config(transfer.kv_connector_extra_config, str(transfer.kv_role))
        check_engine(vllm_config, config)
        if config.loads:
            expect_loads(vllm_config, "AscendStoreConnector")
        whole = vllm_config.kv_transfer_config
        if whole is not None and config.loads and whole.kv_load_failure_policy == "fail":
            # vLLM's default. To a pool a block that is gone is everyday life.
            whole.kv_load_failure_policy = "recompute"
            logger.info("AscendStoreConnector: kv_load_failure_policy is recompute, not fail")

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return parse_extra_config(extra_config).load_mode == "layerwise"

    @property
    def requires_kv_delivery(self) -> bool:
        # A block that is not stored is computed again by whoever wants it.
        return False

    # Scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._block_ids = lambda request_id: kv_cache_manager.get_block_ids(request_id)[0]

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
        if self._block_ids is None:
            self._tables.follow(scheduler_output)
        step = Step(
            scheduled=scheduler_output.num_scheduled_tokens,
            block_ids=self._block_ids or self._tables.block_ids,
            has_sync_loads=has_sync_loads(scheduler_output),
        )
        return PoolMetadata(self._scheduler.take_orders(step))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        assert self._scheduler is not None
        metadata = connector_output.kv_connector_worker_meta
        report = metadata.report if isinstance(metadata, PoolWorkerMetadata) else None
        self._scheduler.take_in(
            report, connector_output.invalid_block_ids, connector_output.finished_recving or ()
        )

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending_work

    def take_events(self) -> "Iterable[KVCacheEvent]":
        assert self._scheduler is not None
        return self._scheduler.take_events()

    def reset_cache(self) -> bool | None:
        assert self._scheduler is not None
        return self._scheduler.reset()

    # Worker side

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        assert self._worker is not None
        place, run = group_info(), self._shape.interleave_tokens
        tensors = cache_tensors(kv_caches)
        self._worker.register(
            tensors,
            RankPlace(
                stage=place.pp_rank,
                rank=place.rank_in_group,
                gather=gather_in_group,
                placement=placement_for(self._vllm_config, self._cache_config, tensors),
                tokens=token_shard(run) if run else TokenShard(),
                set_gate=set_bundle_gate,
            ),
        )

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: object) -> None:
        assert self._worker is not None
        self._worker.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        assert self._worker is not None
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: "torch.Tensor",
        attn_metadata: "AttentionMetadata",
        **kwargs: object,
    ) -> None:
        """Nothing to do: blocks are stored after the forward."""

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.start_puts(self._orders())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        results = self._worker.take_results()
        self._invalid_block_ids = results.invalid_block_ids
        return KVConnectorTransferResults(finished_recving=results.received)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """What a vLLM without ``get_transfer_results`` asks, followed by the next question."""
        return None, self.get_transfer_results(finished_req_ids).finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._invalid_block_ids

    def build_connector_worker_meta(self) -> PoolWorkerMetadata | None:
        assert self._worker is not None
        report = self._worker.take_report()
        return PoolWorkerMetadata(report) if report else None

    def _orders(self) -> PoolOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PoolMetadata)
        return metadata.orders
