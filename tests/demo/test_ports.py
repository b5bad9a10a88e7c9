import socket
from pathlib import Path

import pytest

from kvpp_connect.demo.ports import LOOPBACK, check_ports_free, free_ports, ports_left_alone
from kvpp_connect.errors import ConfigError


def test_free_ports_are_distinct_and_can_be_bound():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    check_ports_free(("server", port) for port in ports)


def test_free_ports_are_none_that_the_kernel_chooses_and_no_two_calls_answer_the_same():
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    calls = [free_ports(3) for _ in range(50)]
    ports = [port for call in calls for port in call]
    assert len(set(ports)) == 150
    assert not [port for port in ports if first <= port <= last]


@pytest.mark.parametrize(
    ("kernels_range", "first", "last"),
    [("32768\t60999\n", 18_000, 65_535), ("1024 50000", 50_001, 65_535), ("1024 65535", 0, 0)],
)
def test_ports_that_the_kernel_does_not_choose(kernels_range, first, last):
    ports = ports_left_alone(kernels_range)
    low, high = map(int, kernels_range.split())
    assert (ports[0], ports[-1]) == (first, last)
    assert not [port for port in ports if low <= port <= high]


def test_a_port_in_use_is_left_out(monkeypatch):
    (port,) = free_ports(1)
    monkeypatch.setattr("kvpp_connect.demo.ports._turns", lambda: iter([port, port + 1]))
    with socket.create_server((LOOPBACK, port)), pytest.raises(ConfigError, match="2 free ports"):
        free_ports(2)


def test_a_busy_port_is_refused_with_its_number_and_the_server_that_wants_it():
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .* wanted by decode"):
            check_ports_free([("prefill", free_ports(1)[0]), ("decode", port)])


def test_a_port_outside_the_range_is_refused():
    with pytest.raises(ConfigError, match="70000"):
        check_ports_free([("router", 70000)])


def test_a_port_whose_last_connection_lingers_counts_as_free():
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection((LOOPBACK, port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the side that closes first stays in TIME_WAIT
            assert client.recv(1) == b""
    check_ports_free([("server", port)])


def test_two_servers_that_want_the_same_port_are_named():
    (port,) = free_ports(1)
    with pytest.raises(ConfigError, match=rf"port {port} is wanted by p and by d"):
        check_ports_free([("p", port), ("d", port)])
