"""The control channel's two ends: a producer's server thread and a reader's client."""

import threading
from collections.abc import Callable
from types import TracebackType

import zmq

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.mooncake_v2 import wire
from kvpp_connect.errors import ConfigError, PeerError

logger = get_logger(__name__)

_POLL_MS = 200


class ControlServer:
    """Answers questions in a thread of its own. A bad message is answered, never fatal."""

    def __init__(
        self, host: str, port: int, answer: Callable[[wire.Question], wire.Answer]
    ) -> None:
        """Listen and start answering.

        Args:
            port: 0 for any free port.
            answer: called in the server's thread, one question at a time.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._answer = answer
        self._stopped = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_QUESTION_BYTES)
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
        try:
            self._socket.bind(f"tcp://{bracket(host)}:{port if port else '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"MooncakeConnectorV2: cannot listen on {host}:{port} for the control channel "
                f"({error}); choose another kv_connector_extra_config.control_port, or 0 for any "
                "free port"
            ) from error
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._thread = threading.Thread(target=self._run, name="kvpp-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and free the port."""
        self._stopped.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                if self._socket.poll(_POLL_MS):
                    self._serve_one()
        finally:
            self._context.destroy(linger=0)

    def _serve_one(self) -> None:
        frames = self._socket.recv_multipart()
        route, body = frames[:-1], frames[-1]
        try:
            reply = self._answer(wire.decode_question(body))
        except PeerError as error:
            reply = wire.ErrorAnswer(str(error))
        except Exception as error:  # the thread's boundary: one bad question must not end it
            logger.exception("control channel: a question failed")
            reply = wire.ErrorAnswer(f"internal error: {error}")
        try:
            self._socket.send_multipart([*route, wire.encode(reply)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("control channel: an answer was dropped: %s", error)


class ControlClient:
    """Asks one producer. Thread-safe; questions wait for each other."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._address = f"tcp://{bracket(host)}:{port}"
        self._timeout_ms = int(timeout_s * 1000)
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        # A question without an answer must not block the next one, nor take its answer.
        self._socket.setsockopt(zmq.REQ_RELAXED, 1)
        self._socket.setsockopt(zmq.REQ_CORRELATE, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_ANSWER_BYTES)
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.connect(self._address)

    def ask(self, question: wire.Question) -> wire.Answer:
        """Send a question and wait for its answer.

        Raises:
            PeerError: no answer in time, or the producer answered with an error.
        """
        with self._lock:
            try:
                self._socket.send(wire.encode(question))
                if not self._socket.poll(self._timeout_ms):
                    raise PeerError(
                        f"no answer from {self._address} within {self._timeout_ms / 1000:g} s"
                    )
                answer = wire.decode_answer(self._socket.recv())
            except zmq.ZMQError as error:
                raise PeerError(f"control channel to {self._address}: {error}") from error
        if isinstance(answer, wire.ErrorAnswer):
            raise PeerError(f"{self._address} answered: {answer.reason}")
        return answer

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._context.destroy(linger=0)

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
