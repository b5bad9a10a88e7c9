"""Addresses of stores, and whether anybody listens there."""

import socket
from dataclasses import dataclass

from kvpp_connect.errors import ConfigError

_CONNECT_S = 3.0


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, where: str) -> Address:
    """ "10.0.0.1:50051", "name:50051" or "[::1]:50051".

    Raises:
        ConfigError: not an address; ``where`` names the setting.
    """
    host, _, port = text.strip().rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if (
        not bare
        or "/" in bare
        or not (port.isascii() and port.isdigit())
        or not (0 < int(port) < 65536)
    ):
        raise ConfigError(f"{where} is {text!r}; expected host:port, as in 10.0.0.1:50051")
    return Address(bare, int(port))


def check_reachable(address: Address, server: str, remedy: str) -> None:
    """Connect once, because the stores' own clients try for minutes, or for ever.

    Raises:
        ConfigError: nobody answers; says which ``server`` and how to mend it (``remedy``).
    """
    try:
        socket.create_connection((address.host, address.port), timeout=_CONNECT_S).close()
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise ConfigError(f"no {server} at {address} ({reason}); {remedy}") from error
