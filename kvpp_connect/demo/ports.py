"""Choosing and checking TCP ports on the loopback interface.

A free port is found by binding port 0 and closing the socket again: until the server binds it,
another program may take it. The race is small, and a server that loses it fails with a clear log.
"""

import contextlib
import socket
from collections.abc import Iterable, Iterator

from kvpp_connect.errors import ConfigError

LOOPBACK = "127.0.0.1"


def free_ports(count: int) -> tuple[int, ...]:
    """Distinct ports that nothing listens on at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_bound_socket(0)) for _ in range(count)]
        return tuple(s.getsockname()[1] for s in sockets)


def check_ports_free(ports: Iterable[tuple[str, int]]) -> None:
    """Refuse ports that cannot be bound.

    Args:
        ports: pairs of the name of the server that wants the port and the port.

    Raises:
        ConfigError: names the first busy port and who wants it, or two that want the same one.
    """
    wanted: dict[int, str] = {}
    for name, port in ports:
        # Both vLLM servers would bind it before either listens, and one would answer for both.
        if wanted.setdefault(port, name) != name:
            raise ConfigError(f"port {port} is wanted by {wanted[port]} and by {name}")
        try:
            with _bound_socket(port):
                pass
        except OSError as error:
            raise ConfigError(
                f"port {port} on {LOOPBACK}, wanted by {name}, cannot be used ({error.strerror}): "
                f"end the program that holds it or choose another port"
            ) from error
        except OverflowError as error:
            raise ConfigError(f"port {port}, wanted by {name}, is not in 0..65535") from error


@contextlib.contextmanager
def _bound_socket(port: int) -> Iterator[socket.socket]:
    """A bound socket that does not listen; connections in TIME_WAIT do not count as busy."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((LOOPBACK, port))
        yield bound
