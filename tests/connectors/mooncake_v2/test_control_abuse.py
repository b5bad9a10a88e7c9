"""What bad peers can do to a control channel: be counted, be logged now and then, nothing else."""

import socket
import threading
import time
from contextlib import suppress

import pytest
import zmq
from builders import address, manifest, rank_manifest

from kvpp_connect.connectors.mooncake_v2 import wire
from kvpp_connect.connectors.mooncake_v2.control import (
    ControlClient,
    ControlServer,
    UnreachableError,
)
from kvpp_connect.connectors.mooncake_v2.secret import derive_keys
from kvpp_connect.connectors.mooncake_v2.wire import BadMessage

LEASE = wire.LeaseRef(incarnation="i", request_id="r", generation=1)
HELD = wire.LeaseAnswer(wire.LeaseState.HELD)
KEYS = derive_keys(b"the secret that both nodes share")
OTHER_KEYS = derive_keys(b"another secret, also long enough")


@pytest.fixture
def serve():
    servers = []

    def start(answer=lambda question: HELD, **settings):
        servers.append(ControlServer("127.0.0.1", 0, answer, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def connect():
    """Raw ZeroMQ sockets to a server, with a chosen source address."""
    context = zmq.Context()

    def open_socket(server, kind=zmq.REQ, source="127.0.0.1", keeps_answers=1000):
        raw = context.socket(kind)
        raw.setsockopt(zmq.LINGER, 0)
        raw.setsockopt(zmq.RCVHWM, keeps_answers)
        raw.connect(f"tcp://{source}:0;127.0.0.1:{server.port}")
        return raw

    yield open_socket
    context.destroy(linger=0)


def assert_serves(server, keys=None):
    with ControlClient("127.0.0.1", server.port, 5, keys) as client:
        assert client.ask(wire.Confirm(LEASE)) == HELD


def answer_to(raw, *frames):
    raw.send_multipart(frames)
    assert raw.poll(5000), "no answer"
    return wire.decode_answer(raw.recv_multipart()[-1])


def wait_for_bad(server, cause, at_least=1, timeout_s=5):
    found = 0
    deadline = time.monotonic() + timeout_s
    while found < at_least and time.monotonic() < deadline:
        found += server.take_bad_messages().get(cause, 0)
        time.sleep(0.01)
    assert found >= at_least
    return found


VERSION_9 = wire.MAGIC + b"\x09" + wire.encode(wire.GetManifest())[5:]


@pytest.mark.parametrize(
    ("frames", "cause"),
    [
        ([b""], BadMessage.MALFORMED),
        ([b"garbage"], BadMessage.MALFORMED),
        ([wire.encode(wire.GetManifest())[:5] + b"\xc1" * 20], BadMessage.MALFORMED),
        ([bytes(60_000)], BadMessage.MALFORMED),
        ([b""] * 50, BadMessage.MALFORMED),
        ([bytes(wire.MAX_QUESTION_BYTES + 1)], BadMessage.OVERSIZED),
        ([VERSION_9], BadMessage.VERSION),
    ],
)
def test_a_bad_message_is_answered_counted_and_survived(serve, connect, frames, cause):
    server = serve()
    raw = connect(server, zmq.DEALER)
    assert isinstance(answer_to(raw, b"", *frames), wire.ErrorAnswer)
    assert server.take_bad_messages() == {cause: 1}
    assert isinstance(answer_to(raw, b"", wire.encode(wire.Confirm(LEASE))), wire.LeaseAnswer)
    assert server.take_bad_messages() == {}


def test_a_message_far_too_large_costs_its_sender_the_connection(serve, connect):
    server = serve()
    raw = connect(server)
    raw.send(bytes(1 << 20))
    assert not raw.poll(300)
    assert_serves(server)


def test_a_question_without_the_usual_envelope_is_answered_too(serve, connect):
    raw = connect(serve(), zmq.DEALER)
    assert answer_to(raw, wire.encode(wire.Confirm(LEASE))) == HELD


def test_a_peer_over_its_limit_is_told_and_another_address_is_served(serve, connect):
    server = serve(questions_per_s=3)
    flooding, polite = connect(server), connect(server, source="127.0.0.2")
    question = wire.encode(wire.Confirm(LEASE))
    answers = [answer_to(flooding, question) for _ in range(6)]
    assert answers[:3] == [HELD] * 3
    assert answers[-1] == wire.BusyAnswer(3)
    assert answer_to(polite, question) == HELD
    assert server.take_bad_messages()[BadMessage.OVER_LIMIT] >= 2


def test_a_client_that_never_reads_holds_nobody_up(serve, connect):
    layers = [address(f"layer{i}" * 20, i) for i in range(500)]
    large = wire.ManifestAnswer(manifest(rank_manifest(0, *layers)))
    answered = []

    def answer(question):
        answered.append(question)
        return large if isinstance(question, wire.GetManifest) else HELD

    server = serve(answer)
    deaf = connect(server, zmq.DEALER, keeps_answers=1)
    for _ in range(900):  # many times what sockets on the way can hold
        deaf.send_multipart([b"", wire.encode(wire.GetManifest())])
    deadline = time.monotonic() + 20
    while len(answered) < 900:
        assert time.monotonic() < deadline, f"stuck after {len(answered)} answers"
        time.sleep(0.01)
    assert_serves(server)


def test_a_flood_from_one_connection_does_not_starve_another(serve, connect):
    server = serve(questions_per_s=1e6)
    flooding, stop = connect(server, zmq.DEALER), threading.Event()

    def flood():
        while not stop.is_set():
            flooding.send_multipart([b"", b"garbage"])
            while flooding.poll(0):
                flooding.recv_multipart()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        began = time.monotonic()
        for _ in range(20):
            assert_serves(server)
        assert time.monotonic() - began < 5
    finally:
        stop.set()
        thread.join()


def test_bad_messages_are_logged_at_most_once_a_second(serve, connect, caplog):
    server = serve()
    raw = connect(server)
    began = time.monotonic()
    for _ in range(50):
        answer_to(raw, b"garbage")
    allowed = 1 + int(time.monotonic() - began)
    assert 1 <= len([r for r in caplog.records if "malformed" in r.message]) <= allowed
    assert server.take_bad_messages() == {BadMessage.MALFORMED: 50}


def test_with_the_same_secret_questions_are_answered(serve):
    server = serve(keys=KEYS)
    assert_serves(server, KEYS)
    assert server.take_bad_messages() == {}


@pytest.mark.parametrize(
    ("server_keys", "client_keys"), [(KEYS, None), (KEYS, OTHER_KEYS), (None, KEYS)]
)
def test_another_secret_or_none_is_a_clear_error_at_once_and_is_counted(
    serve, server_keys, client_keys
):
    asked = []
    server = serve(lambda question: asked.append(question) or HELD, keys=server_keys)
    began = time.monotonic()
    with (
        ControlClient("127.0.0.1", server.port, 20, client_keys) as client,
        pytest.raises(UnreachableError, match="control_secret_file must name the same"),
    ):
        client.ask(wire.Confirm(LEASE))
    assert time.monotonic() - began < 5
    wait_for_bad(server, BadMessage.UNAUTHENTICATED)
    assert asked == []
    assert_serves(server, server_keys)


def test_a_connection_that_is_gone_before_the_question_is_sent_holds_nobody_up(monkeypatch):
    """As on a machine that pauses between the two: nothing takes the question then."""
    connect = ControlClient._connect  # noqa: SLF001 - the moment cannot be had otherwise

    def connect_too_early(client):
        socket = connect(client)
        gives_up = time.monotonic() + 30
        while socket.poll(0, zmq.POLLOUT):
            assert time.monotonic() < gives_up, "the connection does not go"
            time.sleep(0.02)
        return socket

    monkeypatch.setattr(ControlClient, "_connect", connect_too_early)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        greeter = threading.Thread(target=greet_with_another_mechanism, args=(listener,))
        greeter.start()
        with (
            ControlClient("127.0.0.1", listener.getsockname()[1], 2, None) as client,
            pytest.raises(UnreachableError, match="control_secret_file must name the same"),
        ):
            client.ask(wire.Confirm(LEASE))
        greeter.join(10)


def greet_with_another_mechanism(listener):
    """A server's greeting (ZMTP 3.0, 64 bytes), which ends the client's side of a connection.

    A server of ours may hang up first, and then ZeroMQ tries again instead.
    """
    peer, _ = listener.accept()
    with peer:
        peer.settimeout(10)
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32))
        while peer.recv(64):
            pass


def test_the_server_s_key_alone_lets_nobody_in(serve):
    """Who learns the server's public key still lacks the client's pair."""
    asked = []
    server = serve(lambda question: asked.append(question) or HELD, keys=KEYS)
    context = zmq.Context()
    raw = context.socket(zmq.REQ)
    raw.setsockopt(zmq.LINGER, 0)
    raw.curve_serverkey = KEYS.server.public
    raw.curve_publickey, raw.curve_secretkey = zmq.curve_keypair()
    raw.connect(f"tcp://127.0.0.1:{server.port}")
    raw.send(wire.encode(wire.Release(LEASE)))
    assert not raw.poll(500)
    wait_for_bad(server, BadMessage.UNAUTHENTICATED)
    assert asked == []
    context.destroy(linger=0)


def record_session(port, question):
    """What a client with the secret sends, byte by byte, through a proxy that keeps it."""
    kept = bytearray()
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on(source, target, keep):
        with suppress(OSError):
            while data := source.recv(65536):
                if keep:
                    kept.extend(data)
                target.sendall(data)

    def carry():
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        back = threading.Thread(target=pass_on, args=(far, near, False), daemon=True)
        back.start()
        pass_on(near, far, True)
        far.close()

    carrier = threading.Thread(target=carry, daemon=True)
    carrier.start()
    with ControlClient("127.0.0.1", listener.getsockname()[1], 5, KEYS) as client:
        client.ask(question)
    carrier.join(5)
    listener.close()
    return bytes(kept)


def test_a_recorded_session_cannot_be_replayed(serve):
    asked = []
    server = serve(lambda question: asked.append(question) or HELD, keys=KEYS)
    recorded = record_session(server.port, wire.Release(LEASE))
    assert asked == [wire.Release(LEASE)]
    with socket.create_connection(("127.0.0.1", server.port)) as replay:
        replay.sendall(recorded)
        replay.settimeout(2)
        with suppress(OSError):
            while replay.recv(65536):
                pass
    assert asked == [wire.Release(LEASE)]
    assert_serves(server, KEYS)


def test_port_probes_are_counted_and_harmless(serve):
    server = serve(keys=KEYS)
    for _ in range(5):
        socket.create_connection(("127.0.0.1", server.port)).close()
    wait_for_bad(server, BadMessage.UNAUTHENTICATED, at_least=5)
    assert_serves(server, KEYS)
