import socket

import pytest

from kvpp_connect.demo.ports import LOOPBACK, check_ports_free, free_ports
from kvpp_connect.errors import ConfigError


def test_free_ports_are_distinct_and_can_be_bound():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    check_ports_free(("server", port) for port in ports)


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
