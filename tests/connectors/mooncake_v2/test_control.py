"""Both ends of the control channel over a real loopback socket; bad peers: test_control_abuse."""

import contextlib
import errno
import socket
import threading
import time

import pytest
import zmq

from kvpp_connect.connectors.mooncake_v2 import wire
from kvpp_connect.connectors.mooncake_v2.control import (
    ControlClient,
    ControlServer,
    UnreachableError,
)
from kvpp_connect.errors import ConfigError, PeerError

LEASE = wire.LeaseRef(incarnation="i", request_id="r", generation=1)


@pytest.fixture
def serve():
    servers = []

    def start(answer, port=0, **settings):
        servers.append(ControlServer("127.0.0.1", port, answer, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def held(question):
    return wire.LeaseAnswer(wire.LeaseState.HELD)


def test_a_question_gets_its_answer(serve):
    with ControlClient("127.0.0.1", serve(held).port, 5) as client:
        assert client.ask(wire.Confirm(LEASE)) == wire.LeaseAnswer(wire.LeaseState.HELD)


def test_an_error_of_the_other_side_arrives_as_an_error(serve):
    def refuse(question):
        raise PeerError("still starting")

    with (
        ControlClient("127.0.0.1", serve(refuse).port, 5) as client,
        pytest.raises(PeerError, match="still starting"),
    ):
        client.ask(wire.GetManifest())


def test_a_bug_of_the_other_side_is_answered_and_the_next_question_works(serve):
    answers = iter([ZeroDivisionError("oops"), None])

    def answer(question):
        if error := next(answers):
            raise error
        return held(question)

    with ControlClient("127.0.0.1", serve(answer).port, 5) as client:
        with pytest.raises(PeerError, match="oops"):
            client.ask(wire.Confirm(LEASE))
        assert client.ask(wire.Confirm(LEASE)) == wire.LeaseAnswer(wire.LeaseState.HELD)


def test_a_late_answer_is_not_taken_for_the_next_questions(serve):
    release, slow = (
        threading.Event(),
        wire.LeaseRef(incarnation="i", request_id="slow", generation=1),
    )

    def answer(question):
        if question.lease == slow:
            release.wait(60)
            return wire.LeaseAnswer(wire.LeaseState.EXPIRED)
        return held(question)

    with ControlClient("127.0.0.1", serve(answer).port, 5) as client:
        with pytest.raises(PeerError, match=r"no answer.*within 0\.3 s"):
            client.ask(wire.Confirm(slow), timeout_s=0.3)
        release.set()
        assert client.ask(wire.Confirm(LEASE), timeout_s=60).state is wire.LeaseState.HELD


def test_nobody_there_is_an_error_in_time(free_port):
    with (
        ControlClient("127.0.0.1", free_port, 0.2) as client,
        pytest.raises(PeerError, match=str(free_port)),
    ):
        client.ask(wire.GetManifest())


def test_a_busy_port_is_one_clear_error(serve):
    server = serve(held)
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{server.port}"):
        ControlServer("127.0.0.1", server.port, held)


def test_a_closed_server_frees_its_port(serve):
    server = serve(held)
    server.close()
    listen_when_free(server.port).close()


def listen_when_free(port):
    """Closing waits for the server's thread for a while only, which a slow machine may exceed."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
        assert time.monotonic() < deadline, "the port stays taken"
        time.sleep(0.05)


def test_a_busy_producer_is_asked_again(serve):
    server = serve(held, questions_per_s=5)
    with ControlClient("127.0.0.1", server.port, 5) as client:
        for _ in range(8):
            assert client.ask(wire.Confirm(LEASE)) == wire.LeaseAnswer(wire.LeaseState.HELD)
    assert server.take_bad_messages()[wire.BadMessage.OVER_LIMIT] > 0


def test_a_producer_that_stays_busy_is_an_error_that_names_the_limit(serve):
    server = serve(held, questions_per_s=0.01)
    with ControlClient("127.0.0.1", server.port, 0.3) as client:
        client.ask(wire.Confirm(LEASE))
        with pytest.raises(PeerError, match=r"busy: at most 0\.01 questions per second"):
            client.ask(wire.Confirm(LEASE))


def test_a_shorter_time_out_holds_for_one_question(free_port):
    with (
        ControlClient("127.0.0.1", free_port, 30) as client,
        pytest.raises(UnreachableError, match=r"within 0\.2 s"),
    ):
        client.ask(wire.GetManifest(), timeout_s=0.2)


def test_a_closed_client_opens_another_connection_when_it_is_asked(serve):
    client = ControlClient("127.0.0.1", serve(held).port, 5)
    for _ in range(3):
        assert client.ask(wire.Confirm(LEASE)) == wire.LeaseAnswer(wire.LeaseState.HELD)
        client.close()
        client.close()


def test_a_handshake_that_failed_while_nobody_asked_does_not_spoil_the_next_question(serve):
    """The producer was restarted, and something else had its port in between."""
    first = serve(held)
    with ControlClient("127.0.0.1", first.port, 60) as client:
        client.ask(wire.Confirm(LEASE))
        first.close()
        with listen_when_free(first.port) as stranger:
            stranger.settimeout(60)
            stranger.accept()[0].close()
        serve(held, port=first.port)
        assert client.ask(wire.Confirm(LEASE)) == wire.LeaseAnswer(wire.LeaseState.HELD)


def test_a_machine_out_of_files_is_an_unreachable_producer_until_there_are_some(serve, monkeypatch):
    def refuse(*_):
        raise zmq.ZMQError(errno.EMFILE)

    with ControlClient("127.0.0.1", serve(held).port, 60) as client:
        with monkeypatch.context() as patch:
            patch.setattr(zmq.Socket, "get_monitor_socket", refuse)
            with pytest.raises(UnreachableError, match="Too many open files"):
                client.ask(wire.Confirm(LEASE))
        assert client.ask(wire.Confirm(LEASE)) == wire.LeaseAnswer(wire.LeaseState.HELD)


def test_several_servers_share_a_host_without_chosen_ports(serve):
    ports = {serve(held).port for _ in range(8)}
    assert len(ports) == 8
