"""Scheduler side: what to look up, load and store, and which blocks to hold meanwhile."""

import hashlib
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.ascend_store.events import PoolEvents
from kvpp_connect.connectors.ascend_store.hashing import BlockChain
from kvpp_connect.connectors.ascend_store.holds import PutLedger
from kvpp_connect.connectors.ascend_store.orders import (
    BlockList,
    LoadOrder,
    PoolOrders,
    PoolReport,
    PutOrder,
    block_list,
)
from kvpp_connect.connectors.ascend_store.shards import StageShards, key_scope, layout_digest
from kvpp_connect.seam.kv_events import block_extra, stored_event

if TYPE_CHECKING:
    from kvpp_connect.connectors.ascend_store.config import PoolConfig
    from kvpp_connect.connectors.ascend_store.lookups import Lookup, LookupService
    from kvpp_connect.seam.api import KVCacheEvent, PoolPins, Request

logger = get_logger(__name__)

_ANSWER_IS_OLD_S = 3.0
"""A store may drop what it was asked about; most keep it for five seconds."""
_MOST_PINNED = 0.25  # of all blocks, before further stores wait


@dataclass(slots=True)
class _Tracked:
    """A request that vLLM knows of."""

    request: "Request"
    chain: BlockChain
    pooled: int = 0  # its first blocks that are in the pool or on the way there
    lookup: "Lookup | None" = None
    local_blocks: int = 0  # vLLM's own hit, when it was last asked for
    loading: frozenset[int] = frozenset()  # blocks that a load in the background writes
    may_load: bool = True
    admitted: bool = False  # it has had blocks: another connector's load, if any, has ended
    may_store: bool = True
    tail_stored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the scheduler side needs of vLLM's step.

    Attributes:
        scheduled: tokens by request id.
        block_ids: answers a request's blocks.
        has_sync_loads: some connector loads KV that the coming forward reads.
    """

    scheduled: Mapping[str, int]
    block_ids: Callable[[str], Sequence[int]]
    has_sync_loads: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The engine as the scheduler side counts it.

    ``steps_in_flight``: so many are scheduled before the first one's results are known.
    """

    block_tokens: int
    stages: int
    world_size: int
    steps_in_flight: int = 1

    @property
    def ordered_steps(self) -> bool:
        """Whether a step's results are known before the next one is scheduled."""
        return self.steps_in_flight == 1


class SchedulerSide:
    """One engine's scheduler side. Driven by the scheduler's thread."""

    def __init__(
        self,
        *,
        config: "PoolConfig",
        shape: EngineShape,
        identity: str,
        lookups: "LookupService",
        emits_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: identity: the model's, see :func:`model_identity`."""
        self._config = config
        self._shape = shape
        self._identity = identity
        self._lookups = lookups
        self._clock = clock
        self._events = PoolEvents() if emits_events else None
        self._first_told = 0  # put jobs before it stored what a reset has made useless
        self._stages: dict[int, StageShards] = {}
        self._scope = ""
        self._pins: PoolPins | None = None
        self._ledger = PutLedger(shape.world_size)
        self._requests: dict[str, _Tracked] = {}
        self._loads: list[LoadOrder] = []
        self._cancelled: set[str] = set()
        self._unconfirmed: list[PutOrder] = []
        # Of the step that loads what it reads: each request's blocks, and ``pooled`` before it.
        self._in_step: dict[str, tuple[Sequence[int], int]] = {}
        self._counts: dict[str, float] = {}
        self._pinned_told = 0
        self._unsure_steps = 0  # of the coming ones

    def bind_pool(self, pins: "PoolPins") -> None:
        """Take the engine's block pool."""
        self._pins = pins
        self._ledger.bind(pins)

    # Requests

    def arrived(self, request: "Request") -> None:
        """A request was queued; ask about its prompt while it waits."""
        # Later parts of a streamed prompt may change what came before.
        if request.prompt_token_ids is None or request.resumable:
            return
        tracked = _Tracked(
            request,
            BlockChain(
                self._shape.block_tokens, lambda start, end: block_extra(request, start, end)
            ),
        )
        self._requests[request.request_id] = tracked
        if self._wants_load(tracked):
            self._ask(tracked)

    def matched_tokens(self, request: "Request", computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the computed ones, and whether in the background.

        ``None``: not known yet, ask again.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None or not self._wants_load(tracked):
            return 0, False
        if (blocks := self._answer(tracked)) is None:
            return None, False
        tracked.local_blocks = computed_tokens // self._shape.block_tokens
        # The last token is computed in any case.
        pooled = min(blocks * self._shape.block_tokens, request.num_tokens - 1)
        tokens = max(0, pooled - tracked.local_blocks * self._shape.block_tokens)
        return tokens, tokens > 0 and self._config.load_mode == "async"

    def allocated(self, request: "Request", block_ids: Sequence[int], tokens: int) -> None:
        """The request has its blocks; ``tokens`` of it are to be loaded."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        tracked.admitted = True
        if tracked.lookup is None:
            return
        lookup, tracked.lookup = tracked.lookup, None
        full = request.num_tokens // self._shape.block_tokens
        tracked.pooled = max(tracked.pooled, min(lookup.blocks or 0, full))
        if not tokens:
            return
        first = tracked.local_blocks
        end = first - -tokens // self._shape.block_tokens  # rounded up
        in_step = self._config.load_mode != "async"
        if not in_step:
            tracked.loading = frozenset(block_ids[first:end])
        self._loads.append(
            LoadOrder(
                request_id=request.request_id,
                blocks=block_list(lookup.hashes[first:end], block_ids[first:end]),
                in_step=in_step,
            )
        )
        self._count("pool_hit_tokens", tokens)

    def finished(self, request: "Request") -> None:
        """The request ended, in whatever way. Its blocks are held where that is needed."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        if tracked.lookup is not None:
            tracked.lookup.cancelled = True
        if tracked.loading:
            self._cancelled.add(request.request_id)

    def _wants_load(self, tracked: _Tracked) -> bool:
        params = tracked.request.kv_transfer_params or {}
        # A prefill node has the whole prompt, and comes first; the pool helps where it fails.
        elsewhere = params.get("do_remote_prefill") and not tracked.admitted
        return (
            self._config.loads
            and tracked.may_load
            and not elsewhere
            and not tracked.request.skip_reading_prefix_cache
        )

    # Look-ups

    def _ask(self, tracked: _Tracked) -> None:
        if not self._scope:
            return
        tokens = tracked.request.all_token_ids
        if self._config.keep_partial:
            tail = tracked.chain.tail(tokens)
            wanted = [*tracked.chain.hashes, *((tail,) if tail else ())]
        else:
            # Whole blocks, without the one whose last token has to be computed.
            tracked.chain.extend(tokens)
            wanted = tracked.chain.hashes[: (len(tokens) - 1) // self._shape.block_tokens]
        tracked.lookup = self._lookups.ask(self._scope, wanted)

    def _answer(self, tracked: _Tracked) -> int | None:
        """The number of first blocks in the pool; ``None``: not known yet."""
        if not self._scope:
            return None  # the workers describe themselves with their first step
        lookup, now = tracked.lookup, self._clock()
        if lookup is None or (
            lookup.blocks is not None and now - lookup.answered_at > _ANSWER_IS_OLD_S
        ):
            self._ask(tracked)
            lookup = tracked.lookup
            assert lookup is not None, "it has been asked"
        if lookup.blocks is None and now - lookup.asked_at > self._config.lookup_timeout_s:
            self._lookups.gave_up(lookup)
            lookup.blocks, lookup.answered_at = 0, now
        return lookup.blocks

    # Steps

    def take_orders(self, step: Step) -> PoolOrders:
        """Orders for the workers in the coming step."""
        puts, self._unconfirmed = self._unconfirmed, []
        # What is computed from KV that may turn out not to have been loaded is not stored before
        # that is known.
        waits = step.has_sync_loads and self._shape.ordered_steps
        self._in_step = self._note_step(step) if waits else {}
        if blocks := self._storable(step) if waits or self._is_sure(step) else None:
            order = self._ledger.open(blocks)
            (self._unconfirmed if waits else puts).append(order)
        loads, self._loads = tuple(self._loads), []
        cancelled, self._cancelled = frozenset(self._cancelled), set()
        return PoolOrders(scope=self._scope, loads=loads, puts=tuple(puts), cancelled=cancelled)

    def _is_sure(self, step: Step) -> bool:
        """Whether all KV that another connector loaded for earlier steps is known to be there."""
        if step.has_sync_loads:
            self._unsure_steps = self._shape.steps_in_flight - 1
            return False
        if self._unsure_steps:
            self._unsure_steps -= 1
            return False
        return True

    def _note_step(self, step: Step) -> dict[str, tuple[Sequence[int], int]]:
        noted: dict[str, tuple[Sequence[int], int]] = {}
        for request_id in step.scheduled:
            tracked = self._requests.get(request_id)
            noted[request_id] = (
                list(step.block_ids(request_id)),
                tracked.pooled if tracked is not None else 0,
            )
        return noted

    def _storable(self, step: Step) -> BlockList | None:
        """Blocks that are full and computed after the coming step, and not in the pool yet."""
        if not self._config.puts or not self._scope or not self._lookups.is_good:
            return None
        assert self._pins is not None, "vLLM binds the block pool before the first step"
        hashes: list[bytes] = []
        block_ids: list[int] = []
        room = int(self._pins.num_blocks * _MOST_PINNED) - self._ledger.pinned_blocks
        for request_id, scheduled in step.scheduled.items():
            tracked = self._requests.get(request_id)
            if tracked is None or not tracked.may_store:
                continue
            if len(hashes) < room and (tail := self._storable_tail(tracked, scheduled)):
                hashes.append(tail)
                block_ids.append(step.block_ids(request_id)[self._full_prompt_blocks(tracked)])
            request = tracked.request
            # Tokens beyond num_tokens are drafts, or not known yet.
            computed = min(request.num_tokens, request.num_computed_tokens + scheduled)
            first = tracked.pooled
            end = min(computed // self._shape.block_tokens, first + room - len(hashes))
            if end <= first:
                continue
            tracked.chain.extend(request.all_token_ids[: end * self._shape.block_tokens])
            self._expect(tracked, first, end)
            hashes += tracked.chain.hashes[first:end]
            block_ids += step.block_ids(request_id)[first:end]
            tracked.pooled = end
        return block_list(hashes, block_ids) if hashes else None

    def _storable_tail(self, tracked: _Tracked, scheduled: int) -> bytes | None:
        """Name of the prompt's tokens behind its last full block, once, when they are computed."""
        request = tracked.request
        computed = request.num_computed_tokens + scheduled
        if not self._config.keep_partial or computed < request.num_prompt_tokens:
            return None
        if tracked.tail_stored:
            return None
        tracked.tail_stored = True
        return tracked.chain.tail(request.all_token_ids[: request.num_prompt_tokens])

    def _full_prompt_blocks(self, tracked: _Tracked) -> int:
        return tracked.request.num_prompt_tokens // self._shape.block_tokens

    def take_in(
        self,
        report: PoolReport | None,
        invalid_block_ids: Iterable[int],
        received: Iterable[str],
    ) -> None:
        """Take in what the workers say after a step.

        Args:
            invalid_block_ids: blocks that some rank could not load.
            received: requests whose load has ended on all ranks.
        """
        if report is not None and report.lost:
            self._take_lost(report.lost)
        invalid = set(invalid_block_ids)
        for tracked in self._requests.values() if invalid else ():
            # What the look-up sees and a load cannot read would be loaded again and again.
            tracked.may_load &= invalid.isdisjoint(tracked.loading)
        for request_id in received:
            if tracked := self._requests.get(request_id):
                tracked.loading = frozenset()
        if invalid and self._in_step:
            self._forget_computed(invalid)
        self._in_step = {}
        if report is None:
            return
        for stage in report.stages:
            self._take_stage(stage)
        for ended in self._ledger.take_in(report.puts):
            self._count("pool_stored_blocks", len(ended.stored))
            self._count("pool_unstored_blocks", len(ended.failed))
            if self._events is not None and ended.job >= self._first_told:
                self._events.stored(ended.stored)
                self._events.failed(ended.failed)

    def _take_lost(self, lost: set[bytes]) -> None:
        """Blocks were not where the look-up had seen them; their requests store them again."""
        for tracked in self._requests.values():
            if tracked.loading:
                hashes = tracked.chain.hashes[: tracked.pooled]
                tracked.pooled = next((i for i, h in enumerate(hashes) if h in lost), len(hashes))
        if self._events is not None:
            self._events.lost(lost)

    def _forget_computed(self, invalid: set[int]) -> None:
        """A step read blocks that were not loaded: nothing that it computed from them is kept."""
        assert self._pins is not None, "a step has run"
        self._drop_unconfirmed()
        for request_id, (block_ids, pooled) in self._in_step.items():
            first = next((i for i, block in enumerate(block_ids) if block in invalid), None)
            if first is not None:
                # Until it is computed anew no other request may find it.
                self._pins.forget(block_ids[first:])
                pooled = min(pooled, first)
            if tracked := self._requests.get(request_id):
                tracked.pooled = min(tracked.pooled, pooled)

    def _drop_unconfirmed(self) -> None:
        for order in self._unconfirmed:
            if self._events is not None:
                self._events.failed(order.blocks.hashes)
            self._ledger.drop(order.job)
        self._unconfirmed = []

    def _take_stage(self, stage: StageShards) -> None:
        self._stages[stage.stage] = stage
        if len(self._stages) == self._shape.stages and not self._scope:
            self._set_scope()
            shards = [shard for known in self._stages.values() for shard in known.shards]
            self._lookups.ask_about([shard.name for shard in shards])
            logger.info(
                "KV pool: a block of %d tokens is %d object(s), %d bytes; keys begin with %s",
                self._shape.block_tokens,
                len(shards),
                sum(shard.payload_bytes for shard in shards),
                self._scope,
            )

    def _set_scope(self) -> None:
        layout = layout_digest(list(self._stages.values()), self._shape.block_tokens)
        self._scope = key_scope(self._identity, layout)

    # The rest

    @property
    def has_pending_work(self) -> bool:
        """Whether steps are needed although there may be no request."""
        news = self._events is not None and self._events.has_news
        return bool(len(self._ledger) or self._unconfirmed or news)

    def reset(self) -> bool:
        """Never use again what has been stored until now; answer whether that was possible.

        The weights may have changed, so the engine goes on under keys of its own. Requests that
        are alive may hold KV of both and are not stored.
        """
        if any(tracked.loading for tracked in self._requests.values()):
            logger.warning("KV pool: not reset, since requests are being loaded; try again")
            return False
        self._drop_unconfirmed()  # they would get the new keys
        old = self._scope
        salt = uuid.uuid4().hex
        self._identity = hashlib.sha256(f"{self._identity}:{salt}".encode()).hexdigest()[:32]
        if old:
            self._set_scope()
            self._lookups.forget(old)
        for tracked in self._requests.values():
            tracked.may_store, tracked.lookup, tracked.pooled = False, None, 0
        if self._events is not None:
            self._events.reset()
        self._first_told = self._ledger.next_job
        return True

    def take_events(self) -> "list[KVCacheEvent]":
        """KV events since the last call."""
        return self._events.take() if self._events is not None else []

    def take_counts(self) -> dict[str, float]:
        """Counters since the last call, and gauges, by metric name."""
        counts, self._counts = self._counts, {}
        if self._ledger.pinned_blocks != self._pinned_told:
            counts["pool_pinned_blocks"] = self._pinned_told = self._ledger.pinned_blocks
        return counts | self._lookups.take_counts()

    def close(self) -> None:
        """Stop the thread and leave the store."""
        self._lookups.close()

    def _expect(self, tracked: _Tracked, first: int, end: int) -> None:
        if self._events is None:
            return
        assert self._pins is not None, "vLLM binds the block pool before the first step"
        size, hash_tokens = self._shape.block_tokens, self._pins.hash_block_tokens
        for index in range(first, end):
            block = tracked.chain.hashes[index]
            if self._events.is_told(block):
                continue
            event = stored_event(tracked.request, index * size, (index + 1) * size, hash_tokens)
            if event is not None:
                self._events.expect(block, *event)

    def _count(self, name: str, amount: float) -> None:
        if amount:
            self._counts[name] = self._counts.get(name, 0) + amount
