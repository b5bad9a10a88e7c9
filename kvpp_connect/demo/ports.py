"""Choosing and checking TCP ports on the loopback interface.

A free port is found by binding it and closing the socket again: until the server binds it, another
program may take it. Servers start for half a minute and open many sockets whose ports the kernel
chooses, so free ports are sought where it chooses none.
"""

import contextlib
import functools
import itertools
import secrets
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvpp_connect.errors import ConfigError

LOOPBACK = "127.0.0.1"
_LOWEST = 18_000  # Mooncake's engine takes its own port from 15000..17000
_ENOUGH = 1_000
_MOST_TRIES = 10_000
_KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> tuple[int, ...]:
    """Distinct ports that nothing uses at the moment, and that no recent call has answered.

    Raises:
        ConfigError: there are not that many.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in itertools.islice(_turns(), _MOST_TRIES):
            if len(found) == count:
                return tuple(found)
            with contextlib.suppress(OSError):
                found.append(stack.enter_context(_bound_socket(port)).getsockname()[1])
    raise ConfigError(f"{count} free ports are wanted on {LOOPBACK}, {len(found)} were found")


def ports_left_alone(kernels_range: str) -> Sequence[int]:
    """The ports to choose from; 0, which leaves it to the kernel, where hardly one is left.

    Args:
        kernels_range: the first and the last port that the kernel chooses from.
    """
    first, last = map(int, kernels_range.split())
    left = (*range(_LOWEST, first), *range(max(_LOWEST, last + 1), 2**16))
    return left if len(left) >= _ENOUGH else (0,)


@functools.cache
def _turns() -> Iterator[int]:
    """Each port again only after all others. Programs that run side by side begin elsewhere."""
    ports = ports_left_alone(_KERNELS_RANGE.read_text())
    begin = secrets.randbelow(len(ports))
    return itertools.cycle((*ports[begin:], *ports[:begin]))


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
