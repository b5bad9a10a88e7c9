"""The control channel's two ends: a producer's server thread and a reader's client."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import zmq

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.mooncake_v2 import wire
from kvpp_connect.connectors.mooncake_v2.limits import RareLog, RateLimit
from kvpp_connect.connectors.mooncake_v2.secret import ControlKeys, SocketGuard
from kvpp_connect.errors import ConfigError, PeerError

logger = get_logger(__name__)

DEFAULT_QUESTIONS_PER_S = 1000.0

_POLL_MS = 200
_BUSY_PAUSE_S = 0.1
_RECONNECT_MS = 500
# A question too large for us is answered with an error; ZeroMQ cuts off who sends more than this.
_CUT_OFF_BYTES = 4 * wire.MAX_QUESTION_BYTES
# Frames of a question: its sender's route (3 at most), and the message.
_MAX_FRAMES = 4
# Messages that ZeroMQ keeps for one peer; what it cannot deliver beyond that is dropped.
_QUEUED_QUESTIONS = 64
_QUEUED_ANSWERS = 16

# Another mechanism, a wrong key, or a peer that hung up first for one of these reasons.
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class UnreachableError(PeerError):
    """A producer that does not answer, or does not let us in."""


class ControlServer:
    """Answers questions in a thread of its own. A bad message is answered, never fatal.

    A peer that floods the channel, or never reads its answers, costs the others nothing: ZeroMQ
    takes turns between peers, and drops answers that cannot be delivered.
    """

    def __init__(
        self,
        host: str,
        port: int,
        answer: Callable[[wire.Question], wire.Answer],
        *,
        keys: ControlKeys | None = None,
        questions_per_s: float = DEFAULT_QUESTIONS_PER_S,
    ) -> None:
        """Listen and start answering.

        Args:
            host: local address to listen on.
            port: 0 for any free port.
            answer: called in the server's thread, one question at a time; must not block.
            keys: let only clients with the same secret in; empty: everybody.
            questions_per_s: questions that one address may ask per second.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._answer = answer
        self._stopped = threading.Event()
        self._limit = RateLimit(questions_per_s)
        self._log = RareLog(logger)
        self._lock = threading.Lock()
        self._bad: Counter[wire.BadMessage] = Counter()
        self._context = zmq.Context()
        self._guard = SocketGuard(self._context, keys)
        try:
            self._socket = self._listen(host, port)
        except BaseException:
            self._destroy()
            raise
        self._monitor: Any = self._socket.get_monitor_socket(_REFUSED)
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._thread = threading.Thread(target=self._run, name="kvpp-control", daemon=True)
        self._thread.start()

    def take_bad_messages(self) -> dict[wire.BadMessage, int]:
        """Messages that were not taken up since the last call, by cause."""
        with self._lock:
            bad, self._bad = self._bad, Counter()
        return dict(bad)

    def close(self) -> None:
        """Stop the thread and free the port; idempotent."""
        self._stopped.set()
        self._thread.join(timeout=5)

    def _listen(self, host: str, port: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _CUT_OFF_BYTES)
        socket.setsockopt(zmq.RCVHWM, _QUEUED_QUESTIONS)
        socket.setsockopt(zmq.SNDHWM, _QUEUED_ANSWERS)
        if ":" in host:
            socket.setsockopt(zmq.IPV6, 1)
        self._guard.protect(socket)
        try:
            socket.bind(f"tcp://{bracket(host)}:{port if port else '*'}")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"MooncakeConnectorV2: cannot listen on {host}:{port} for the control channel "
                f"({error}); choose another kv_connector_extra_config.control_port, 0 for any free "
                "port, or another bind_host"
            ) from error
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        try:
            while not self._stopped.is_set():
                try:
                    self._serve(dict(poller.poll(_POLL_MS)))
                except Exception:  # the thread's boundary: a deaf producer would lose every lease
                    logger.exception("control channel: its thread goes on after an error")
                    self._stopped.wait(_POLL_MS / 1000)
        finally:
            self._socket.disable_monitor()
            self._destroy()

    def _serve(self, ready: dict[Any, int]) -> None:
        if self._monitor in ready:
            self._monitor.recv_multipart(zmq.NOBLOCK)
            self._refuse(
                wire.BadMessage.UNAUTHENTICATED,
                "a peer",
                "no handshake; unless that was a port probe, control_secret_file differs or is set "
                "on one side only",
            )
        if self._socket in ready:
            self._answer_one(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))

    def _answer_one(self, frames: list[zmq.Frame]) -> None:
        peer = _address_of(frames[-1])
        try:
            reply = self._reply(peer, [frame.bytes for frame in frames])
        except wire.BadMessageError as error:
            self._refuse(error.cause, peer, str(error))
            reply = wire.ErrorAnswer(str(error))
        except PeerError as error:
            reply = wire.ErrorAnswer(str(error))
        except Exception as error:  # a bug in one answer must not cost the others theirs
            logger.exception("control channel: a question of %s failed", peer)
            reply = wire.ErrorAnswer(f"internal error: {error}")
        try:
            route = frames[:-1] if len(frames) <= _MAX_FRAMES else frames[:1]
            self._socket.send_multipart([*route, wire.encode(reply)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("control channel: an answer to %s was dropped: %s", peer, error)

    def _reply(self, peer: str, frames: list[bytes]) -> wire.Answer:
        if not self._limit.admits(peer):
            rate = self._limit.per_s
            self._refuse(
                wire.BadMessage.OVER_LIMIT, peer, f"more than {rate:g} questions per second"
            )
            return wire.BusyAnswer(rate)
        if len(frames) > _MAX_FRAMES:
            raise wire.BadMessageError(
                wire.BadMessage.MALFORMED, f"a message of {len(frames) - 1} frames"
            )
        return self._answer(wire.decode_question(frames[-1]))

    def _refuse(self, cause: wire.BadMessage, peer: str, text: str) -> None:
        with self._lock:
            self._bad[cause] += 1
        self._log.warning("control channel: %s: %s: %s", peer, cause.value, text)

    def _destroy(self) -> None:
        self._guard.stop()
        self._context.destroy(linger=0)


class ControlClient:
    """Asks one producer. Thread-safe; questions wait for each other."""

    def __init__(
        self, host: str, port: int, timeout_s: float, keys: ControlKeys | None = None
    ) -> None:
        """Name a producer; the connection is made by the first question.

        Args:
            timeout_s: seconds to wait for an answer.
            keys: from the secret that the producer shares; empty: it has none.
        """
        self._address = f"tcp://{bracket(host)}:{port}"
        self._ipv6 = ":" in host
        self._timeout_s = timeout_s
        self._keys = keys
        self._lock = threading.Lock()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: Any = None

    def ask(self, question: wire.Question, timeout_s: float | None = None) -> wire.Answer:
        """Send a question and wait for its answer; a busy producer is asked again.

        Args:
            timeout_s: seconds to wait where that is less than the client's own time-out.

        Raises:
            UnreachableError: no answer in time, or the handshake failed.
            PeerError: the producer answered with an error, stayed busy, or does not speak our
                protocol.
        """
        allowed_s = min(timeout_s or self._timeout_s, self._timeout_s)
        with self._lock:
            deadline = time.monotonic() + allowed_s
            answer = self._exchange(question, allowed_s)
            while isinstance(answer, wire.BusyAnswer):
                left_s = deadline - time.monotonic() - _BUSY_PAUSE_S
                if left_s <= 0:
                    raise PeerError(
                        f"{self._address} is busy: at most {answer.questions_per_s:g} questions "
                        "per second; raise max_questions_per_s on the prefill node"
                    )
                time.sleep(_BUSY_PAUSE_S)
                answer = self._exchange(question, left_s)
        if isinstance(answer, wire.ErrorAnswer):
            raise PeerError(f"{self._address} answered: {answer.reason}")
        return answer

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        with self._lock:
            self._drop()

    def _exchange(self, question: wire.Question, timeout_s: float) -> wire.Answer:
        try:
            return wire.decode_answer(self._send(question, timeout_s))
        except zmq.ZMQError as error:
            self._drop()
            raise UnreachableError(f"control channel to {self._address}: {error}") from error
        except PeerError:
            # A late answer must not be taken for the next question's.
            self._drop()
            raise

    def _send(self, question: wire.Question, timeout_s: float) -> bytes:
        began = time.monotonic()
        if self._socket is not None and self._monitor.poll(0):
            # A handshake failed while nobody asked, as when the producer was restarted.
            self._drop()
        is_new = self._socket is None
        socket = self._socket or self._connect()
        # A connection whose handshake has failed already takes nothing, and the monitor says so.
        with suppress(zmq.Again):
            socket.send(wire.encode(question), flags=zmq.NOBLOCK)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(int(timeout_s * 1000)))
        if socket in ready:
            return socket.recv()
        if ready and not is_new:
            # The same, noticed a moment later.
            self._drop()
            return self._send(question, max(0.0, timeout_s - (time.monotonic() - began)))
        if ready:
            mine = "this node has a control_secret_file" if self._keys else "this node has none"
            raise UnreachableError(
                f"{self._address} ended the handshake: control_secret_file must name the same "
                f"secret on prefill and decode nodes, or be set on neither ({mine})"
            )
        raise UnreachableError(f"no answer from {self._address} within {timeout_s:.3g} s")

    def _connect(self) -> "zmq.Socket[bytes]":
        self._socket = socket = zmq.Context.instance().socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_ANSWER_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        if self._ipv6:
            socket.setsockopt(zmq.IPV6, 1)
        if self._keys is not None:
            self._keys.protect_client(socket)
        self._monitor = socket.get_monitor_socket(_REFUSED)
        socket.connect(self._address)
        return socket

    def _drop(self) -> None:
        if self._socket is not None:
            if self._monitor is not None:
                self._socket.disable_monitor()
                self._monitor.close()
            self._socket.close()
        self._socket = self._monitor = None

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _address_of(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "unknown"


def bracket(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
