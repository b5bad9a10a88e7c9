"""Worker side: registers this rank's caches, carries pulls out, reports what ended."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.mooncake_engine import MooncakeEngine
from kvpp_connect.connectors.mooncake_v2 import registration
from kvpp_connect.connectors.mooncake_v2.counters import PullStats
from kvpp_connect.connectors.mooncake_v2.puller import Puller
from kvpp_connect.connectors.mooncake_v2.secret import load_keys
from kvpp_connect.layout import RankManifest
from kvpp_connect.seam.groups import GroupInfo, gather_in_group, group_info
from kvpp_connect.seam.runtime import active_placement

if TYPE_CHECKING:
    import torch

    from kvpp_connect.connectors.mooncake_v2.config import MooncakeV2Config
    from kvpp_connect.connectors.mooncake_v2.metadata import StepOrders
    from kvpp_connect.connectors.mooncake_v2.transfer_plan import LocalCaches

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class WorkerResults:
    """Request ids to report to vLLM. Failed ones are among the received ones as well."""

    sent: set[str] = field(default_factory=set[str])
    received: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])


class WorkerSide:
    """One rank's worker side."""

    def __init__(
        self,
        *,
        config: "MooncakeV2Config",
        host: str,
        protocol: str,
        shape: registration.BlockShape,
    ) -> None:
        self._config = config
        self._shape = shape
        self._engine = MooncakeEngine(host, protocol)
        self._stats: PullStats | None = None
        self._puller: Puller | None = None
        self._sent: set[str] = set()
        self._still_written: dict[str, float] = {}
        self.publication: registration.StagePublication | None = None

    def register(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Make this rank's caches readable and writable by the transfer engine."""
        group = group_info()
        placement = active_placement()
        caches = registration.describe_caches(kv_caches, self._shape, placement)
        regions = registration.register_storage(self._engine, kv_caches)
        self.publication = _publish(caches, self._shape, group, self._engine.session)
        self._stats = PullStats(counts_tokens=group.rank_in_group == 0 and group.pp_rank == 0)
        self._puller = Puller(
            engine=self._engine,
            caches=caches,
            reader_rank=group.rank_in_group,
            control_timeout_s=self._config.control_timeout_s,
            failed_read_hold_s=self._config.failed_read_hold_s,
            stats=self._stats,
            control_keys=load_keys(self._config.control_secret_file),
        )
        logger.info(
            "MooncakeConnectorV2 worker pp%d/rank%d: %d of %d layers held, %d memory region(s), "
            "transfer engine at %s",
            group.pp_rank,
            group.rank_in_group,
            len(caches.components),
            len(kv_caches),
            regions,
            self._engine.session,
        )

    def carry_out(self, orders: "StepOrders") -> None:
        """Begin the step's pulls and note what is to be reported as sent."""
        assert self._puller is not None, "vLLM registers the caches before the first step"
        self._sent |= orders.ended_leases
        for pull in orders.pulls:
            self._puller.submit(pull)

    def take_results(self) -> WorkerResults:
        """What ended since the last call."""
        results = WorkerResults(sent=self._sent)
        self._sent = set()
        now = time.monotonic()
        for result in self._puller.take_results() if self._puller else ():
            results.received.add(result.request_id)
            if not result.succeeded:
                results.failed.add(result.request_id)
            elif result.written_until > now:
                self._still_written[result.request_id] = result.written_until - now
        return results

    def take_still_written(self) -> dict[str, float]:
        """Requests just received whose blocks a given-up read may write, and for how many seconds.

        To be reported together with what ``take_results`` gave.
        """
        still_written, self._still_written = self._still_written, {}
        return still_written

    def take_counts(self) -> dict[str, float]:
        """Counters since the last call, by metric name."""
        return self._stats.take() if self._stats else {}

    def close(self) -> None:
        """Stop pulling."""
        if self._puller is not None:
            self._puller.close()


def _publish(
    caches: "LocalCaches", shape: registration.BlockShape, group: GroupInfo, session: str
) -> registration.StagePublication:
    """Exchange manifests inside the KVPP group; every rank returns the whole group's.

    vLLM keys what workers hand to the scheduler side by (pp, tp), so ranks that differ in their
    PCP rank only would overwrite each other with anything less than the whole.
    """
    mine = RankManifest(
        pp_rank=group.pp_rank,
        rank_in_group=group.rank_in_group,
        session=session,
        components=caches.components,
    )
    decoder = msgspec.msgpack.Decoder(RankManifest)
    gathered = gather_in_group(msgspec.msgpack.encode(mine))
    return registration.StagePublication(
        num_blocks=shape.num_blocks,
        block_tokens=shape.block_tokens,
        cache_dtype=caches.cache_dtype,
        ranks=tuple(decoder.decode(rank) for rank in gathered),
    )
