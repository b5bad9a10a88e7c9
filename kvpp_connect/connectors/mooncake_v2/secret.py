"""The control channel's shared secret, as the key pairs of ZeroMQ's CURVE mechanism.

Both ends derive both pairs from the secret. The handshake proves that each end has its pair, and
CURVE encrypts and numbers every message, so nothing can be forged or replayed without the secret.
"""

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from kvpp_connect._log import get_logger
from kvpp_connect.errors import ConfigError

logger = get_logger(__name__)

MIN_SECRET_BYTES = 16
_NAME = "kv_connector_extra_config.control_secret_file"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A CURVE key pair, Z85 encoded: 40 bytes each."""

    public: bytes
    private: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlKeys:
    """The pairs of a producer's server and of its readers' clients."""

    server: KeyPair
    client: KeyPair

    def protect_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that is not bound yet accept CURVE only."""
        socket.curve_server = True
        socket.curve_publickey = self.server.public
        socket.curve_secretkey = self.server.private

    def protect_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that is not connected yet talk only to a server with the same secret."""
        socket.curve_serverkey = self.server.public
        socket.curve_publickey = self.client.public
        socket.curve_secretkey = self.client.private

    def callback(self, domain: str, key: bytes) -> bool:
        """Answer ZeroMQ's authenticator: whether a client's public key (Z85) is the derived one."""
        return hmac.compare_digest(key, self.client.public)


class SocketGuard:
    """Lets only holders of the secret reach a context's listening sockets; idle without keys."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ControlKeys | None) -> None:
        self._keys = keys
        self._checker = ThreadAuthenticator(context, log=logger) if keys else None

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Guard a socket that is not bound yet; once for each guard."""
        if self._keys is not None and self._checker is not None:
            self._checker.start()
            self._checker.configure_curve_callback("*", self._keys)
            self._keys.protect_server(socket)

    def stop(self) -> None:
        """End the checker's thread, before the context is destroyed."""
        if self._checker is not None and self._checker.is_alive():
            self._checker.stop()


def load_keys(path: str) -> ControlKeys | None:
    """Derive the keys from the secret in a file; ``None`` for an empty path.

    White space around the secret is not part of it.

    Raises:
        ConfigError: the file cannot be read, the secret is too short, or ZeroMQ has no CURVE.
    """
    if not path:
        return None
    if not zmq.has("curve"):
        raise ConfigError(
            f"{_NAME} needs ZeroMQ with CURVE, and pyzmq {zmq.__version__} was built without it; "
            "install pyzmq from its wheels"
        )
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{_NAME}: cannot read {path!r} ({error.strerror})") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{_NAME}: {path!r} holds {len(secret)} bytes, expected at least {MIN_SECRET_BYTES}; "
            f"make one with: openssl rand -hex 32 > {path}"
        )
    return derive_keys(secret)


def derive_keys(secret: bytes) -> ControlKeys:
    """Both key pairs of a secret."""
    return ControlKeys(server=_pair(secret, b"server"), client=_pair(secret, b"client"))


def _pair(secret: bytes, role: bytes) -> KeyPair:
    private = z85.encode(hashlib.sha256(b"kvpp-connect control " + role + b"\0" + secret).digest())
    return KeyPair(public=zmq.curve_public(private), private=private)
