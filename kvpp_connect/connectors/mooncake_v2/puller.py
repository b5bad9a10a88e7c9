"""Worker side of a decode node: carries pulls out in the background.

Each producer has threads of its own, so a slow or dead one delays nobody else's requests. A pull
is a success only if every byte arrived and the producer confirmed afterwards that it had kept the
blocks all the time. What other ranks of this group read for all is read from them as soon as they
say that it is there.
"""

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.mooncake_engine import TransferEngine
from kvpp_connect.connectors.mooncake_v2.control import ControlClient, UnreachableError
from kvpp_connect.connectors.mooncake_v2.counters import FailureCause, PullStats
from kvpp_connect.connectors.mooncake_v2.exchange import ShareExchange, ShareKey
from kvpp_connect.connectors.mooncake_v2.metadata import PullRequest
from kvpp_connect.connectors.mooncake_v2.peers import PeerPool
from kvpp_connect.connectors.mooncake_v2.producers import (
    IncompatibleError,
    LeaseLostError,
    ProducerLink,
    ProducerRestartedError,
)
from kvpp_connect.connectors.mooncake_v2.reading import (
    ReadCancelledError,
    Reader,
    ReadFailedError,
)
from kvpp_connect.connectors.mooncake_v2.routes import PullMode, Route
from kvpp_connect.connectors.mooncake_v2.secret import ControlKeys
from kvpp_connect.connectors.mooncake_v2.transfer_plan import (
    SourceReads,
    TokenRange,
    plan_reads,
)
from kvpp_connect.errors import PeerError
from kvpp_connect.layout import GroupManifest

logger = get_logger(__name__)

_GATHERS_AT_ONCE = 4
# Peers answer well or badly within their own limits; a dead or overloaded one lets this pass.
_SHARE_LIMIT_S = 300.0
_CLOSE_S = 2.0


class ShareLostError(PeerError):
    """Another rank of this engine did not get what it was to read for all; it says why."""


_CAUSES: dict[type[BaseException], FailureCause] = {
    UnreachableError: FailureCause.UNREACHABLE,
    LeaseLostError: FailureCause.LEASE_LOST,
    ProducerRestartedError: FailureCause.RESTARTED,
    IncompatibleError: FailureCause.LAYOUT,
    ReadFailedError: FailureCause.READ,
    ReadCancelledError: FailureCause.CANCELLED,
    ShareLostError: FailureCause.SHARE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions:
    """Settings of pulls; see ``MooncakeV2Config``."""

    mode: PullMode = "shared"
    control_timeout_s: float = 10.0
    control_keys: ControlKeys | None = None
    failed_read_hold_s: float = 30.0


@dataclass(frozen=True, slots=True)
class PullResult:
    """How one request's pull ended on this rank.

    ``written_until`` are monotonic seconds until which a given-up read may write the destination
    blocks. A failed pull is reported only then; a successful one at once, unless it is not
    ``exact``: then that read also writes where the request's next tokens go.
    """

    request_id: str
    succeeded: bool
    written_until: float = 0.0
    exact: bool = True

    def is_due(self, now: float) -> bool:
        """Whether it may be reported."""
        return self.written_until <= now or (self.succeeded and self.exact)


@dataclass(slots=True, eq=False)
class _Pull:
    # What is known of one pull while it runs; handed from thread to thread, never shared.
    order: PullRequest
    key: ShareKey
    started: float
    route: Route | None = None
    producer_bytes: int = 0
    peer_bytes: int = 0
    pieces: int = 0
    written_until: float = 0.0
    exact: bool = True


@dataclass(slots=True)
class _Books:
    # Written by pulls, read by vLLM's thread.
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: dict[str, ShareKey] = field(default_factory=dict[str, ShareKey])
    cancelled: set[str] = field(default_factory=set[str])
    done: list[PullResult] = field(default_factory=list[PullResult])


class Puller:
    """Pulls for one rank."""

    def __init__(
        self,
        *,
        engine: TransferEngine,
        group: GroupManifest,
        rank: int,
        exchange: ShareExchange | None,
        options: PullOptions,
        stats: PullStats,
    ) -> None:
        """Args:
        group: the ranks of this decode group; it holds no other engine's.
        rank: this process's rank in the group.
        exchange: ``None`` where every rank reads all that it needs itself.
        """
        self._engine = engine
        self._group = group
        self._me = next(r for r in group.ranks if r.rank_in_group == rank)
        self._others = [r.rank_in_group for r in group.ranks if r is not self._me]
        self._exchange = exchange
        self._options = options
        self._stats = stats
        self._producers = PeerPool(self._open, name="kvpp-pull")
        self._peers = Reader(engine, "peers", options.failed_read_hold_s)
        self._gathers = ThreadPoolExecutor(_GATHERS_AT_ONCE, thread_name_prefix="kvpp-gather")
        self._books = _Books()

    def submit(self, order: PullRequest) -> None:
        """Begin a pull; returns at once."""
        lease = order.remote.lease
        key = ShareKey(order.request_id, lease.incarnation, lease.generation)
        with self._books.lock:
            self._books.running[order.request_id] = key
        self._stats.submitted()
        pull = _Pull(order, key, time.monotonic())
        address = (order.remote.host, order.remote.port)
        self._producers.submit(address, lambda producer: self._run(producer, pull))

    def cancel(self, request_ids: frozenset[str]) -> None:
        """End pulls early that nobody wants any more; they are reported as failed."""
        with self._books.lock:
            keys = [key for r in request_ids if (key := self._books.running.get(r))]
            self._books.cancelled |= {key.request_id for key in keys}
        for key in keys:
            self._forget(key)

    def take_results(self) -> list[PullResult]:
        """Pulls that ended and may be reported; each once."""
        now = time.monotonic()
        with self._books.lock:
            ready = [r for r in self._books.done if r.is_due(now)]
            self._books.done = [r for r in self._books.done if not r.is_due(now)]
        return ready

    def running(self) -> int:
        """Pulls that have not ended."""
        with self._books.lock:
            return len(self._books.running)

    def close(self) -> None:
        """Drop what has not begun. A read under way ends by itself."""
        self._producers.close(finish_queued=False, timeout_s=_CLOSE_S)
        self._gathers.shutdown(wait=False, cancel_futures=True)
        self._peers.close()

    def _open(self, host: str, port: int) -> "_Producer":
        options = self._options
        client = ControlClient(host, port, options.control_timeout_s, options.control_keys)
        link = ProducerLink(client, self._group, self._me.rank_in_group, options.mode)
        reader = Reader(self._engine, f"{host}:{port}", options.failed_read_hold_s)
        return _Producer(link, reader)

    def _run(self, producer: "_Producer", pull: _Pull) -> None:
        """Read this rank's part from the producer, then wait for what others read."""
        try:
            self._pull_own(producer, pull)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: it must be answered
            if isinstance(error, UnreachableError):
                producer.silent_at = time.monotonic()
            waiting = pull.route.for_peers if pull.route else self._others
            self._tell(pull.key, waiting, arrived=False)
            self._fail(pull, error)
            return
        assert pull.route is not None
        self._tell(pull.key, pull.route.for_peers, arrived=True)
        if pull.route.from_peers:
            self._await_shares(pull, pull.route)
        else:
            self._succeed(pull)

    def _await_shares(self, pull: _Pull, route: Route) -> None:
        assert self._exchange is not None, "without an exchange no route leads over other ranks"
        arrival = self._exchange.expect(pull.key, route.from_peers, _SHARE_LIMIT_S)
        arrival.add_done_callback(lambda lost: self._gathers.submit(self._gather, pull, lost))
        if not self._is_wanted(pull):  # a notice from before may be forgotten with the request
            self._exchange.forget(pull.key)

    def _tell(self, key: ShareKey, ranks: Iterable[int], *, arrived: bool) -> None:
        if self._exchange is not None:
            self._exchange.tell(key, ranks, arrived=arrived)

    def _forget(self, key: ShareKey) -> None:
        if self._exchange is not None:
            self._exchange.forget(key)

    def _pull_own(self, producer: "_Producer", pull: _Pull) -> None:
        remote = pull.order.remote
        self._check_wanted(pull)
        if pull.started <= producer.silent_at:
            raise UnreachableError("it did not answer while this request waited")
        manifest, pull.route = producer.link.route(remote)
        reads = plan_reads(
            pull.route.from_producer,
            _tokens(pull.order, remote.block_ids),
            local=self._group,
            remote=manifest,
            shard=self._me.shard,
        )
        pull.producer_bytes = self._count(pull, reads)
        pull.written_until = producer.reader.read(
            reads,
            request_id=pull.order.request_id,
            before_again=lambda: producer.link.confirm(remote),
            is_wanted=lambda: self._is_wanted(pull),
        )
        producer.link.confirm(remote, pull.written_until - time.monotonic())

    def _gather(self, pull: _Pull, arrival: "Future[frozenset[int]]") -> None:
        """Read from other ranks of this group what they read from the producer."""
        try:
            self._read_shares(pull, arrival.result())
        except Exception as error:  # noqa: BLE001 - the thread's boundary, as in _run
            self._fail(pull, error)
        else:
            self._succeed(pull)

    def _read_shares(self, pull: _Pull, lost: frozenset[int]) -> None:
        self._check_wanted(pull)
        if lost:
            raise ShareLostError(f"rank {min(lost)} of this engine could not read its share")
        assert pull.route is not None
        reads = plan_reads(
            [fetch for fetches in pull.route.from_peers.values() for fetch in fetches],
            _tokens(pull.order, pull.order.local_block_ids),
            local=self._group,
            remote=self._group,
            shard=self._me.shard,
        )
        pull.peer_bytes = self._count(pull, reads)
        written_until = self._peers.read(
            reads,
            request_id=pull.order.request_id,
            before_again=lambda: None,
            is_wanted=lambda: self._is_wanted(pull),
        )
        pull.written_until = max(pull.written_until, written_until)

    @staticmethod
    def _count(pull: _Pull, reads: tuple[SourceReads, ...]) -> int:
        pull.pieces += sum(read.pieces for read in reads)
        pull.exact = pull.exact and all(read.exact for read in reads)
        return sum(read.total_bytes for read in reads)

    def _is_wanted(self, pull: _Pull) -> bool:
        return pull.order.request_id not in self._books.cancelled

    def _check_wanted(self, pull: _Pull) -> None:
        if not self._is_wanted(pull):
            raise ReadCancelledError("nobody wants it any more")

    def _succeed(self, pull: _Pull) -> None:
        self._stats.pulled(
            num_bytes=pull.producer_bytes,
            peer_bytes=pull.peer_bytes,
            tokens=pull.order.end_token - pull.order.first_token,
            pieces=pull.pieces,
            seconds=time.monotonic() - pull.started,
        )
        self._finish(pull, succeeded=True, written_until=pull.written_until)

    def _fail(self, pull: _Pull, error: Exception) -> None:
        expected = isinstance(error, PeerError)
        remote = pull.order.remote
        logger.warning(
            "request %s: pulling its KV from engine %s at %s:%d failed: %s",
            pull.order.request_id,
            remote.engine_id,
            remote.host,
            remote.port,
            error,
            exc_info=None if expected else error,
        )
        until = pull.written_until
        if not expected or isinstance(error, ReadFailedError):
            until = max(until, time.monotonic() + self._options.failed_read_hold_s)
        self._stats.failed(_cause(error))
        self._forget(pull.key)
        self._finish(pull, succeeded=False, written_until=until)

    def _finish(self, pull: _Pull, *, succeeded: bool, written_until: float) -> None:
        request_id = pull.order.request_id
        with self._books.lock:
            if self._books.running.get(request_id) is pull.key:
                del self._books.running[request_id]
                self._books.cancelled.discard(request_id)
            self._books.done.append(PullResult(request_id, succeeded, written_until, pull.exact))


def _cause(error: Exception) -> FailureCause:
    """A read that failed because it could not be repeated failed for that reason."""
    reason = error.__cause__ or error
    return _CAUSES.get(type(reason), _CAUSES.get(type(error), FailureCause.OTHER))


def _tokens(order: PullRequest, remote_block_ids: tuple[int, ...]) -> TokenRange:
    return TokenRange(
        first=order.first_token,
        end=order.end_token,
        local_block_ids=order.local_block_ids,
        remote_block_ids=remote_block_ids,
    )


@dataclass(slots=True)
class _Producer:
    """One producer: its link, and the threads that read from its ranks."""

    link: ProducerLink
    reader: Reader
    # Monotonic seconds when it last did not answer: what was ordered before need not be tried.
    silent_at: float = 0.0

    def close(self) -> None:
        """Close the connection. A read under way ends by itself."""
        self.reader.close()
        self.link.close()
