"""Ranks of one decode group tell each other which shares have arrived. Worker side.

A share is what one rank read from the producer for all. Notices say that it is there, or that it
will not come; the bytes themselves are read from that rank by the transfer engine. Each rank
listens on a socket of its own and takes only notices that carry its token, which the ranks learn
from each other when vLLM starts them.
"""

import hmac
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import zmq

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.mooncake_v2.control import bracket
from kvpp_connect.connectors.mooncake_v2.limits import RareLog
from kvpp_connect.connectors.mooncake_v2.secret import ControlKeys, SocketGuard
from kvpp_connect.errors import ConfigError

logger = get_logger(__name__)

_POLL_MS = 200
_SEND_MS = 1000
_KEEP_UNASKED_S = 600.0
_MAX_NOTICE_BYTES = 64 * 1024


class ShareKey(msgspec.Struct, frozen=True):
    """One pull of one request; a request id that is used again has another lease."""

    request_id: str
    incarnation: str
    generation: int


class ExchangeAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank listens, and the token that opens its door."""

    endpoint: str
    token: bytes


class _Notice(msgspec.Struct, frozen=True):
    token: bytes
    sender: int
    key: ShareKey
    arrived: bool


@dataclass(slots=True)
class _Shares:
    # What is known of the shares of one pull; written by the listener and by pulls.
    known: dict[int, bool] = field(default_factory=dict[int, bool])
    # Ranks whose notices are awaited, and who waits; None until the own share is read.
    awaited: frozenset[int] | None = None
    waiter: "Future[frozenset[int]] | None" = None
    # Monotonic seconds after which nobody is waited for any longer.
    deadline: float = 0.0


class ShareExchange:
    """One rank's notices to and from the other ranks of its group. Thread-safe."""

    def __init__(self, rank: int, host: str, keys: ControlKeys | None = None) -> None:
        """Listen on any free port.

        Args:
            keys: from the control channel's secret; notices are encrypted with them.

        Raises:
            ConfigError: ``host`` cannot be bound.
        """
        self._rank = rank
        self._keys = keys
        self._lock = threading.Lock()
        self._pulls: dict[ShareKey, _Shares] = {}
        self._peers: dict[int, tuple[zmq.Socket[bytes], bytes]] = {}
        self._log = RareLog(logger)
        self._stopped = threading.Event()
        self._context = zmq.Context()
        self._guard = SocketGuard(self._context, keys)
        self._inbox = self._socket(zmq.PULL)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, _MAX_NOTICE_BYTES)
        self._guard.protect(self._inbox)
        try:
            self._inbox.bind(f"tcp://{bracket(host)}:*")
        except zmq.ZMQError as error:
            self._destroy()
            raise ConfigError(
                f"MooncakeConnectorV2: cannot listen on {host} for the other ranks ({error}); is "
                "kv_connector_extra_config.host an address of this machine?"
            ) from error
        self.address = ExchangeAddress(
            endpoint=self._inbox.getsockopt_string(zmq.LAST_ENDPOINT), token=secrets.token_bytes(16)
        )
        self._thread = threading.Thread(target=self._listen, name="kvpp-exchange", daemon=True)
        self._thread.start()

    def connect(self, addresses: Mapping[int, ExchangeAddress]) -> None:
        """Learn where the other ranks listen, by rank in group."""
        for rank, address in addresses.items():
            socket = self._socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDTIMEO, _SEND_MS)
            if self._keys is not None:
                self._keys.protect_client(socket)
            socket.connect(address.endpoint)
            self._peers[rank] = (socket, address.token)

    def tell(self, key: ShareKey, ranks: Iterable[int], *, arrived: bool) -> None:
        """Tell other ranks that this one's share is there, or that it will not come."""
        for rank in ranks:
            socket, token = self._peers[rank]
            notice = _Notice(token, self._rank, key, arrived)
            try:
                with self._lock:
                    socket.send(msgspec.msgpack.encode(notice))
            except zmq.ZMQError as error:
                logger.warning("request %s: cannot tell rank %d: %s", key.request_id, rank, error)

    def expect(
        self, key: ShareKey, ranks: Iterable[int], within_s: float
    ) -> "Future[frozenset[int]]":
        """Wait for the shares of other ranks.

        Returns:
            A future of the ranks whose share will not come; set within ``within_s`` seconds.
        """
        future: Future[frozenset[int]] = Future()
        with self._lock:
            pull = self._pulls.setdefault(key, _Shares())
            pull.awaited, pull.waiter = frozenset(ranks), future
            pull.deadline = time.monotonic() + within_s
        self._settle(key)
        if self._stopped.is_set():
            self.forget(key)
        return future

    def forget(self, key: ShareKey) -> None:
        """Wait no longer for the shares of a pull."""
        with self._lock:
            pull = self._pulls.pop(key, None)
        if pull is not None and pull.waiter is not None and pull.awaited is not None:
            pull.waiter.set_result(pull.awaited)

    def close(self) -> None:
        """Stop listening; who waits is told that nothing comes."""
        self._stopped.set()
        self._thread.join(timeout=5)
        for key in list(self._pulls):
            self.forget(key)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        return socket

    def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(_Notice)
        try:
            while not self._stopped.is_set():
                try:
                    if self._inbox.poll(_POLL_MS):
                        self._hear(decoder, self._inbox.recv_multipart())
                    self._give_up_overdue()
                except Exception:  # the thread's boundary: who waits must be woken all the same
                    logger.exception("hearing the other ranks failed")
                    time.sleep(_POLL_MS / 1000)
        finally:
            with self._lock:  # no other thread is sending then
                self._destroy()

    def _destroy(self) -> None:
        self._guard.stop()
        self._context.destroy(linger=0)

    def _hear(self, decoder: "msgspec.msgpack.Decoder[_Notice]", frames: list[bytes]) -> None:
        try:
            notice = decoder.decode(frames[-1])
        except msgspec.DecodeError:
            self._log.warning("a message that is no notice was dropped")
            return
        if not hmac.compare_digest(notice.token, self.address.token):
            self._log.warning("a notice for another engine was dropped")
            return
        with self._lock:
            pull = self._pulls.setdefault(
                notice.key, _Shares(deadline=time.monotonic() + _KEEP_UNASKED_S)
            )
            pull.known[notice.sender] = notice.arrived
        self._settle(notice.key)

    def _settle(self, key: ShareKey) -> None:
        """Wake who waits for a pull of which everything is known."""
        with self._lock:
            pull = self._pulls.get(key)
            if pull is None or pull.waiter is None or pull.awaited is None:
                return
            lost = frozenset(rank for rank in pull.awaited if pull.known.get(rank) is False)
            if not lost and not pull.awaited <= pull.known.keys():
                return
            del self._pulls[key]
        pull.waiter.set_result(lost)

    def _give_up_overdue(self) -> None:
        now = time.monotonic()
        with self._lock:
            overdue = [key for key, pull in self._pulls.items() if pull.deadline <= now]
        for key in overdue:
            self.forget(key)
