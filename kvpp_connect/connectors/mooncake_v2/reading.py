"""Carries reads out: several ranks at once, in batches, again where one failed. Worker side."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.mooncake_engine import TransferEngine
from kvpp_connect.connectors.mooncake_v2.transfer_plan import SourceReads
from kvpp_connect.errors import PeerError

logger = get_logger(__name__)

_READ_AGAIN = 2
# A cancelled read ends with its batch. Between batches Mooncake is idle for a moment, and a few
# batches for one peer together must stay below the pieces that it lets wait.
_BATCH_BYTES = 256 << 20
_BATCH_PIECES = 8_192
_SOURCES_AT_ONCE = 8


class ReadFailedError(PeerError):
    """A read failed after it had begun: its destination may still be written."""


class ReadCancelledError(PeerError):
    """Nobody wants the bytes any more. No read is under way."""


class Reader:
    """Reads for one peer. Its threads are its own, so a peer that hangs delays no other."""

    def __init__(self, engine: TransferEngine, name: str, failed_read_hold_s: float) -> None:
        self._engine = engine
        self._hold_s = failed_read_hold_s
        self._threads = ThreadPoolExecutor(_SOURCES_AT_ONCE, thread_name_prefix=f"kvpp-read-{name}")

    def read(
        self,
        reads: Iterable[SourceReads],
        *,
        request_id: str,
        before_again: Callable[[], None],
        is_wanted: Callable[[], bool],
    ) -> float:
        """Read all bytes; what fails is read again, a bounded number of times.

        Mooncake gives up on a connection without progress; a new one mostly works. The given-up
        attempt may still write for a while: as long as the source keeps its blocks it writes the
        same bytes.

        Args:
            before_again: raises PeerError where the source may have lost its blocks.

        Returns:
            Monotonic seconds until which a given-up attempt may write; 0 without one.

        Raises:
            ReadFailedError: not all bytes arrived.
            ReadCancelledError: ``is_wanted`` became false.
        """
        failed = self._read_at_once(reads, is_wanted)
        again = 0
        while failed and again < _READ_AGAIN:
            again += 1
            reasons = "; ".join(str(error) for error in failed.values())
            logger.info("request %s: reading again: %s", request_id, reasons)
            try:
                before_again()
                failed = self._read_at_once(list(failed), is_wanted)
            except PeerError as error:
                raise ReadFailedError(str(error)) from error
        if failed:
            raise ReadFailedError(str(next(iter(failed.values()))))
        return time.monotonic() + self._hold_s if again else 0.0

    def close(self) -> None:
        """Stop taking work. A read under way ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read_at_once(
        self, reads: Iterable[SourceReads], is_wanted: Callable[[], bool]
    ) -> dict[SourceReads, BaseException]:
        """Read from all sources at once; answers the failed ones when none is under way."""
        running: list[tuple[SourceReads, Future[None]]] = [
            (read, self._threads.submit(self._read_one, read, is_wanted)) for read in reads
        ]
        errors = {read: error for read, future in running if (error := future.exception())}
        for error in errors.values():
            if not isinstance(error, PeerError):
                raise error
        broken = [e for e in errors.values() if not isinstance(e, ReadCancelledError)]
        if len(broken) < len(errors):
            raise ReadFailedError(str(broken[0])) if broken else ReadCancelledError("cancelled")
        return errors

    def _read_one(self, read: SourceReads, is_wanted: Callable[[], bool]) -> None:
        for batch in read.batches(_BATCH_BYTES, _BATCH_PIECES):
            if not is_wanted():
                raise ReadCancelledError("cancelled")
            self._engine.read(
                batch.session,
                batch.local_addresses.tolist(),
                batch.remote_addresses.tolist(),
                batch.lengths_bytes.tolist(),
            )
