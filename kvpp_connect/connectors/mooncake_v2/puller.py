"""Worker side of a decode node: carries pulls out in the background.

Each producer has a thread of its own, so a slow or dead one delays nobody else's requests. A pull
is a success only if every byte arrived and the producer confirmed afterwards that it had kept the
blocks all the time.
"""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.mooncake_engine import TransferEngine
from kvpp_connect.connectors.mooncake_v2 import wire
from kvpp_connect.connectors.mooncake_v2.control import ControlClient
from kvpp_connect.connectors.mooncake_v2.counters import PullStats
from kvpp_connect.connectors.mooncake_v2.metadata import PullRequest, RemotePrefill
from kvpp_connect.connectors.mooncake_v2.secret import ControlKeys
from kvpp_connect.connectors.mooncake_v2.transfer_plan import (
    LocalCaches,
    SourceReads,
    TokenRange,
    check_compatible,
    plan_pull,
)
from kvpp_connect.errors import PeerError
from kvpp_connect.layout import EngineManifest

logger = get_logger(__name__)

_READ_AGAIN = 2


class ReadFailedError(PeerError):
    """A read failed after it had begun: its destination may still be written."""


@dataclass(frozen=True, slots=True)
class PullResult:
    """How one request's pull ended on this rank.

    ``written_until`` are monotonic seconds until which a given-up read may write the destination
    blocks: a failed pull is reported only then, a successful one at once.
    """

    request_id: str
    succeeded: bool
    written_until: float = 0.0

    def is_due(self, now: float) -> bool:
        """Whether it may be reported."""
        return self.succeeded or self.written_until <= now


@dataclass(slots=True)
class _Results:
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: list[PullResult] = field(default_factory=list[PullResult])


class Puller:
    """Pulls for one rank."""

    def __init__(
        self,
        *,
        engine: TransferEngine,
        caches: LocalCaches,
        reader_rank: int,
        control_timeout_s: float,
        failed_read_hold_s: float,
        stats: PullStats,
        control_keys: ControlKeys | None = None,
    ) -> None:
        self._engine = engine
        self._caches = caches
        self._reader_rank = reader_rank
        self._control_timeout_s = control_timeout_s
        self._failed_read_hold_s = failed_read_hold_s
        self._stats = stats
        self._control_keys = control_keys
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._results = _Results()
        self._closed = threading.Event()

    def submit(self, pull: PullRequest) -> None:
        """Begin a pull; returns at once."""
        key = (pull.remote.host, pull.remote.port)
        if key not in self._peers:
            self._peers[key] = _Peer(*key, self._control_timeout_s, self._control_keys)
        self._stats.submitted()
        self._peers[key].thread.submit(self._run, self._peers[key], pull)

    def take_results(self) -> list[PullResult]:
        """Pulls that ended and may be reported; each once."""
        now = time.monotonic()
        with self._results.lock:
            ready = [r for r in self._results.done if r.is_due(now)]
            self._results.done = [r for r in self._results.done if not r.is_due(now)]
        return ready

    def close(self) -> None:
        """Drop what has not begun. A read under way ends by itself."""
        self._closed.set()
        for peer in self._peers.values():
            peer.close()

    def _run(self, peer: "_Peer", pull: PullRequest) -> None:
        started = time.monotonic()
        try:
            pulled_bytes, pieces, written_until = self._pull(peer, pull)
        except Exception as error:  # the thread's boundary: the request must still be answered
            expected = isinstance(error, PeerError)
            if not expected:
                logger.exception("request %s: its pull broke", pull.request_id)
            untouched = expected and not isinstance(error, ReadFailedError)
            hold_s = 0.0 if untouched else self._failed_read_hold_s
            result = PullResult(pull.request_id, False, time.monotonic() + hold_s)
            self._stats.failed()
            self._warn(pull, error)
        else:
            seconds = time.monotonic() - started
            tokens = pull.end_token - pull.first_token
            self._stats.pulled(
                num_bytes=pulled_bytes, tokens=tokens, pieces=pieces, seconds=seconds
            )
            result = PullResult(pull.request_id, True, written_until)
        with self._results.lock:
            self._results.done.append(result)

    def _pull(self, peer: "_Peer", pull: PullRequest) -> tuple[int, int, float]:
        """Pull; answers bytes, pieces, and until when a given-up read may write."""
        manifest = peer.manifest(pull.remote)
        check_compatible(manifest, self._caches)
        tokens = TokenRange(
            first=pull.first_token,
            end=pull.end_token,
            local_block_ids=pull.local_block_ids,
            remote_block_ids=pull.remote.block_ids,
        )
        reads = plan_pull(manifest, self._caches, tokens, self._reader_rank)
        written_until = self._read(peer, pull, reads)
        peer.confirm(pull.remote)
        num_bytes = sum(read.total_bytes for read in reads)
        return num_bytes, sum(len(read.lengths_bytes) for read in reads), written_until

    def _read(self, peer: "_Peer", pull: PullRequest, reads: tuple[SourceReads, ...]) -> float:
        """Read all bytes; what fails is read again, a bounded number of times.

        Mooncake gives up on a connection without progress; a new one mostly works. The given-up
        attempt may still write for a while, until the returned time: as long as the lease holds it
        writes the same bytes.
        """
        failed = peer.read_all(self._engine, reads)
        if not failed:
            return 0.0
        for _ in range(_READ_AGAIN):
            if not failed:
                break
            reasons = "; ".join(str(error) for error in failed.values())
            logger.info("request %s: reading again: %s", pull.request_id, reasons)
            try:
                peer.confirm(pull.remote)
            except PeerError as error:
                raise ReadFailedError(str(error)) from error
            failed = peer.read_all(self._engine, tuple(failed))
        if failed:
            raise ReadFailedError(str(next(iter(failed.values()))))
        return time.monotonic() + self._failed_read_hold_s

    @staticmethod
    def _warn(pull: PullRequest, error: Exception) -> None:
        logger.warning(
            "request %s: pulling its KV from engine %s at %s:%d failed: %s",
            pull.request_id,
            pull.remote.engine_id,
            pull.remote.host,
            pull.remote.port,
            error,
        )


class _Peer:
    """One producer: its control channel, its manifest, its threads."""

    def __init__(self, host: str, port: int, timeout_s: float, keys: ControlKeys | None) -> None:
        self._client = ControlClient(host, port, timeout_s, keys)
        self._manifest: EngineManifest | None = None
        self._readers: ThreadPoolExecutor | None = None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"kvpp-pull-{host}:{port}")

    def manifest(self, remote: RemotePrefill) -> EngineManifest:
        """The manifest of the incarnation that handed the request over."""
        wanted = remote.lease.incarnation
        if self._manifest is None or self._manifest.incarnation != wanted:
            answer = self._client.ask(wire.GetManifest())
            if not isinstance(answer, wire.ManifestAnswer):
                raise PeerError(f"asked for a manifest, got {type(answer).__name__}")
            self._manifest = answer.manifest
        if self._manifest.incarnation != wanted:
            raise PeerError("the prefill engine was restarted since it computed this prompt")
        return self._manifest

    def read_all(
        self, engine: TransferEngine, reads: tuple[SourceReads, ...]
    ) -> dict[SourceReads, BaseException]:
        """Read from all source ranks at once; returns the failed ones when none is under way."""
        if self._readers is None:
            self._readers = ThreadPoolExecutor(max_workers=8, thread_name_prefix="kvpp-read")
        running: list[Future[None]] = [
            self._readers.submit(
                engine.read, r.session, r.local_addresses, r.remote_addresses, r.lengths_bytes
            )
            for r in reads
        ]
        outcomes = zip(reads, running, strict=True)
        return {read: error for read, future in outcomes if (error := future.exception())}

    def confirm(self, remote: RemotePrefill) -> None:
        """Make sure that what was read was not overwritten meanwhile."""
        answer = self._client.ask(wire.Confirm(remote.lease))
        state = answer.state if isinstance(answer, wire.LeaseAnswer) else None
        if state is not wire.LeaseState.HELD:
            raise PeerError(
                f"the lease is {state.value if state else 'unclear'} after the read, the blocks "
                "may have been overwritten; raise lease_s on the prefill node if this happens often"
            )

    def close(self) -> None:
        """Stop taking work."""
        self.thread.shutdown(wait=False, cancel_futures=True)
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)
