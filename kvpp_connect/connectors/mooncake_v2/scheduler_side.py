"""Scheduler side: a producer, a consumer, or both, behind vLLM's request objects."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvpp_connect.connectors.mooncake_v2.config import MooncakeV2Config
from kvpp_connect.connectors.mooncake_v2.consumer import Consumer
from kvpp_connect.connectors.mooncake_v2.metadata import StepOrders
from kvpp_connect.connectors.mooncake_v2.producer import Producer
from kvpp_connect.connectors.mooncake_v2.quarantine import BlockQuarantine
from kvpp_connect.connectors.mooncake_v2.releases import LeaseReleaser
from kvpp_connect.connectors.mooncake_v2.secret import load_keys
from kvpp_connect.connectors.pins import BlockPins
from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import GroupManifest
from kvpp_connect.seam.api import RequestStatus

if TYPE_CHECKING:
    from kvpp_connect.seam.api import Request

# A request that ended by itself; an aborted or failed one has no decode node waiting for it.
_HANDED_OVER = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class SchedulerSide:
    """Translates vLLM's requests for :class:`Producer` and :class:`Consumer`."""

    def __init__(
        self,
        *,
        config: MooncakeV2Config,
        host: str,
        port: int,
        engine_id: str,
        produces: bool,
        consumes: bool,
    ) -> None:
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._releaser: LeaseReleaser | None = None
        self._quarantine = BlockQuarantine()
        self._live_told = 0
        keys = load_keys(config.control_secret_file)
        if produces:
            self._producer = Producer(
                engine_id=engine_id,
                host=host,
                bind_host=config.bind_host,
                port=port,
                lease_s=config.lease_s,
                max_lease_s=config.max_lease_s,
                keys=keys,
                questions_per_s=config.max_questions_per_s,
            )
        if consumes:
            self._releaser = LeaseReleaser(config.control_timeout_s, keys)
            self._consumer = Consumer(self._releaser, self._quarantine)

    def bind_pool(self, pins: BlockPins) -> None:
        """Take the engine's block pool."""
        self._quarantine.bind(pins)

    def publish(self, groups: Sequence[GroupManifest]) -> None:
        """Take over what the workers hold; each of them tells of its whole group.

        Raises:
            LayoutError: pipeline stages disagree on blocks.
        """
        if self._producer is None or not groups:
            return
        shapes = {(group.num_blocks, group.block_tokens) for group in groups}
        if len(shapes) != 1:
            raise LayoutError(f"stages disagree on (blocks, block tokens): {shapes}")
        ranks = {(r.pp_rank, r.rank_in_group): r for group in groups for r in group.ranks}
        num_blocks, block_tokens = shapes.pop()
        self._producer.publish(
            GroupManifest(
                num_blocks=num_blocks,
                block_tokens=block_tokens,
                ranks=tuple(ranks[key] for key in sorted(ranks)),
            )
        )

    def arrived(self, request: "Request") -> None:
        """A request was queued; it may wait for long before anything else is asked about it."""
        offer = _offer(request)
        if self._consumer is not None and offer is not None:
            self._consumer.arrived(request.request_id, *offer)

    def matched_tokens(self, request: "Request", computed_tokens: int) -> tuple[int, bool]:
        """Tokens that can be pulled beyond the computed ones, and whether in the background."""
        offer = _offer(request)
        if self._consumer is None or offer is None:
            return 0, False
        tokens = self._consumer.offered_tokens(request.request_id, *offer, computed_tokens)
        return tokens, tokens > 0

    def allocated(self, request: "Request", block_ids: Sequence[int], tokens: int) -> None:
        """The request has its blocks; ``tokens`` of it are to be pulled."""
        offer = _offer(request)
        if self._consumer is None or offer is None:
            return
        # What is not pulled is computed already: vLLM presents the local hit block-aligned.
        computed = len(offer[1]) - tokens
        self._consumer.allocated(request.request_id, block_ids, computed, tokens)

    def take_orders(self) -> StepOrders:
        """Orders for the workers in the coming step."""
        self._quarantine.end_due()
        return StepOrders(
            pulls=self._consumer.take_pulls() if self._consumer else (),
            ended_leases=self._producer.take_ended() if self._producer else frozenset(),
            cancelled=self._consumer.take_cancelled() if self._consumer else frozenset(),
        )

    def received(self, request_ids: Iterable[str], still_written: Mapping[str, float]) -> None:
        """All workers have ended these requests' pulls.

        ``still_written``: requests whose blocks a given-up read may write for so many seconds.
        """
        if self._consumer is not None:
            self._consumer.still_written(still_written)
            self._consumer.received(request_ids)

    def request_finished(
        self, request: "Request", block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hand the request over, or give its own hand-over back.

        Returns:
            Whether its blocks must be kept, and the response's ``kv_transfer_params``.
        """
        offer = _offer(request)
        if self._consumer is not None and offer is not None:
            self._consumer.finished(request.request_id, *offer)
        prompt = request.prompt_token_ids
        if (
            self._producer is None
            or prompt is None
            or not (request.kv_transfer_params or {}).get("do_remote_decode")
            or request.status not in _HANDED_OVER
            or request.num_computed_tokens < len(prompt)
        ):
            return False, None
        return True, self._producer.hand_over(request.request_id, prompt, block_ids)

    def take_counts(self) -> dict[str, int]:
        """Counters since the last call, and gauges that changed, by metric name."""
        counts: dict[str, int] = {}
        # Before the counters, so that whoever sees that a lease is gone sees why, too.
        live = self._producer.live_leases() if self._producer is not None else 0
        for leases in (self._producer, self._releaser):
            for name, value in leases.take_counts().items() if leases else ():
                counts[f"leases_{name}"] = value
        if self._producer is not None:
            for cause, value in self._producer.take_bad_messages().items():
                counts[f"bad_control_messages/{cause.value}"] = value
            if live != self._live_told:
                counts["leases_live"] = self._live_told = live
        return counts

    def close(self) -> None:
        """Stop threads and close ports."""
        if self._releaser is not None:
            self._releaser.close()
        if self._producer is not None:
            self._producer.close()


def _offer(request: "Request") -> tuple[Mapping[str, Any], Sequence[int]] | None:
    """The hand-over that a request came with, and its prompt; ``None`` without one.

    A prompt of embeddings cannot be compared with the producer's, so it is computed here.
    """
    params, prompt = request.kv_transfer_params, request.prompt_token_ids
    if not params or not params.get("do_remote_prefill") or prompt is None:
        return None
    return params, prompt
