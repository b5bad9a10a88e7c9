"""Worker side: registers this rank's caches, carries pulls out, reports what ended."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kvpp_connect._log import get_logger
from kvpp_connect.connectors import caches
from kvpp_connect.connectors.device_engine import DeviceEngine
from kvpp_connect.connectors.mooncake_engine import TransferEngine, late_write_s, share_engine
from kvpp_connect.connectors.mooncake_v2.counters import PullStats
from kvpp_connect.connectors.mooncake_v2.exchange import ExchangeAddress, ShareExchange
from kvpp_connect.connectors.mooncake_v2.puller import Puller, PullOptions
from kvpp_connect.connectors.mooncake_v2.secret import load_keys
from kvpp_connect.layout import GroupManifest, RankManifest, TokenShard
from kvpp_connect.seam.groups import gather_in_group, group_info, token_shard

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from kvpp_connect.connectors.mooncake_v2.config import MooncakeV2Config
    from kvpp_connect.connectors.mooncake_v2.metadata import PullRequest, StepOrders
    from kvpp_connect.layout import RankPlacement

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class WorkerResults:
    """Request ids to report to vLLM. Failed ones are among the received ones as well.

    ``failed_blocks`` are the local blocks that failed ones should have filled.
    """

    sent: set[str] = field(default_factory=set[str])
    received: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])
    failed_blocks: set[int] = field(default_factory=set[int])


class _Card(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the others of its group when vLLM starts them."""

    manifest: RankManifest
    exchange: ExchangeAddress | None


class WorkerSide:
    """One rank's worker side."""

    def __init__(
        self,
        *,
        config: "MooncakeV2Config",
        host: str,
        protocol: str,
        shape: caches.BlockShape,
        consumes: bool,
    ) -> None:
        self._config = config
        self._host = host
        self._shape = shape
        self._shares = consumes and config.pull_mode == "shared"
        self._engine: TransferEngine = share_engine(host, protocol, config.device_name)
        self._late_write_s = late_write_s(protocol)
        self._stats: PullStats | None = None
        self._puller: Puller | None = None
        self._exchange: ShareExchange | None = None
        self._sent: set[str] = set()
        self._still_written: dict[str, float] = {}
        self._destinations: dict[str, tuple[int, ...]] = {}  # of pulls under way, by request id
        self.publication: GroupManifest | None = None

    def register(
        self, tensors: "Mapping[str, torch.Tensor]", placement: "RankPlacement | None"
    ) -> None:
        """Make this rank's caches readable and writable by the transfer engine.

        Args:
            placement: who owns what under KVPP; ``None`` without.
        """
        place = group_info()
        device = next(iter(tensors.values())).device
        if device.type != "cpu":
            self._engine = DeviceEngine(self._engine, device)
        components = caches.describe_caches(tensors, self._shape, placement)
        regions = caches.register_storage(self._engine, tensors)
        manifest = RankManifest(
            pp_rank=place.pp_rank,
            rank_in_group=place.rank_in_group,
            session=self._engine.session,
            components=components,
            shard=token_shard(run) if (run := self._shape.interleave_tokens) else TokenShard(),
        )
        keys = load_keys(self._config.control_secret_file)
        if self._shares and place.group_size > 1:
            self._exchange = ShareExchange(place.rank_in_group, self._host, keys)
        self.publication = self._meet_group(manifest)
        self._stats = PullStats(counts_tokens=place.rank_in_group == 0 and place.pp_rank == 0)
        self._puller = Puller(
            engine=self._engine,
            group=self.publication,
            rank=place.rank_in_group,
            exchange=self._exchange,
            options=PullOptions(
                mode="shared" if self._exchange else "direct",
                control_timeout_s=self._config.control_timeout_s,
                control_keys=keys,
                failed_read_hold_s=max(self._config.failed_read_hold_s, self._late_write_s),
            ),
            stats=self._stats,
        )
        logger.info(
            "MooncakeConnectorV2 worker %s: %d of %d caches held, %d memory region(s), "
            "transfer engine at %s",
            manifest.name,
            len(components),
            len(tensors),
            regions,
            self._engine.session,
        )

    def carry_out(self, orders: "StepOrders") -> None:
        """Begin the step's pulls and note what is to be reported as sent."""
        assert self._puller is not None, "vLLM registers the caches before the first step"
        self._sent |= orders.ended_leases
        for pull in orders.pulls:
            self._destinations[pull.request_id] = self._destination(pull)
            self._puller.submit(pull)
        self._puller.cancel(orders.cancelled)

    def take_results(self) -> WorkerResults:
        """What ended since the last call."""
        results = WorkerResults(sent=self._sent)
        self._sent = set()
        now = time.monotonic()
        for result in self._puller.take_results() if self._puller else ():
            results.received.add(result.request_id)
            blocks = self._destinations.pop(result.request_id, ())
            if not result.succeeded:
                results.failed.add(result.request_id)
                results.failed_blocks.update(blocks)
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
        if self._exchange is not None:
            self._exchange.close()
        if self._puller is not None:
            self._puller.close()

    def _destination(self, pull: "PullRequest") -> tuple[int, ...]:
        """The blocks that a pull fills; those before them were cached here."""
        block_tokens = self._shape.block_tokens * self._shape.token_shards
        return pull.local_block_ids[pull.first_token // block_tokens :]

    def _meet_group(self, mine: RankManifest) -> GroupManifest:
        """Exchange manifests inside the KVPP group; every rank returns the whole group's.

        vLLM keys what workers hand to the scheduler side by (pp, tp), so ranks that differ in
        their PCP rank only would overwrite each other with anything less than the whole.
        """
        exchange = self._exchange
        card = _Card(manifest=mine, exchange=exchange.address if exchange else None)
        decoder = msgspec.msgpack.Decoder(_Card)
        cards = [decoder.decode(row) for row in gather_in_group(msgspec.msgpack.encode(card))]
        others = [card for card in cards if card.manifest.rank_in_group != mine.rank_in_group]
        if exchange is not None:
            exchange.connect({c.manifest.rank_in_group: c.exchange for c in others if c.exchange})
        return GroupManifest(
            num_blocks=self._shape.num_blocks,
            block_tokens=self._shape.block_tokens,
            ranks=tuple(c.manifest for c in cards),
        )
