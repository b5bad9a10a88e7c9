"""Arbitrary frames against the decoders and against a live control channel.

``make soak`` runs the same tests with many more examples (``--hypothesis-profile=soak``).
"""

import socket
import threading
from contextlib import suppress

import pytest
import zmq
from builders import address, manifest, rank_manifest
from hypothesis import given
from hypothesis import strategies as st

from kvpp_connect.connectors.mooncake_v2 import wire
from kvpp_connect.connectors.mooncake_v2.control import ControlClient, ControlServer
from kvpp_connect.connectors.mooncake_v2.leases import LeaseBook
from kvpp_connect.errors import PeerError

LEASE = wire.LeaseRef(incarnation="i", request_id="r", generation=1)
PREFIX = wire.encode(wire.GetManifest())[: len(wire.MAGIC) + 1]

lease_refs = st.builds(
    wire.LeaseRef,
    incarnation=st.text(max_size=40),
    request_id=st.text(max_size=40),
    generation=st.integers(-(2**63), 2**64 - 1),
)
numbers = st.integers(-(2**63), 2**64 - 1)
questions = st.one_of(
    st.just(wire.GetManifest()),
    st.builds(
        wire.Renew,
        incarnation=st.sampled_from(["i", "j", ""]),
        generations=st.lists(numbers, max_size=5).map(tuple),
    ),
    st.builds(wire.Confirm, lease_refs),
    st.builds(wire.Release, lease_refs),
)
answers = st.one_of(
    st.builds(wire.LeaseAnswer, st.sampled_from(wire.LeaseState)),
    st.builds(wire.RenewAnswer, st.lists(st.sampled_from(wire.LeaseState)).map(tuple)),
    st.builds(wire.BusyAnswer, st.floats(allow_nan=False)),
    st.builds(wire.ErrorAnswer, st.text(max_size=60)),
)


@st.composite
def damaged(draw):
    """A right message with some bytes changed, cut out or put in."""
    frame = bytearray(wire.encode(draw(st.one_of(questions, answers))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(frame)))
        frame[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(frame)


frames = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=200).map(lambda body: PREFIX + body),
    damaged(),
    questions.map(wire.encode),
    answers.map(wire.encode),
    st.integers(wire.MAX_QUESTION_BYTES - 2, wire.MAX_QUESTION_BYTES + 2).map(bytes),
)


@given(questions)
def test_every_question_survives_the_way(question):
    assert wire.decode_question(wire.encode(question)) == question


@given(answers)
def test_every_answer_survives_the_way(answer):
    assert wire.decode_answer(wire.encode(answer)) == answer


@given(frames)
def test_any_frame_is_a_message_or_a_bad_one_and_nothing_else(frame):
    for decode in (wire.decode_question, wire.decode_answer):
        with suppress(wire.BadMessageError):
            decode(frame)


class LiveServer:
    """A producer's channel with a lease book."""

    def __init__(self):
        self.book = LeaseBook("i", 1e6, 1e6)
        self.manifest = wire.ManifestAnswer(manifest(rank_manifest(0, address("layer", 0))))
        self.server = ControlServer("127.0.0.1", 0, self.answer, questions_per_s=1e8)

    def answer(self, question):
        match question:
            case wire.GetManifest():
                return self.manifest
            case wire.Renew():
                return wire.RenewAnswer(self.book.renew(question.incarnation, question.generations))
            case wire.Confirm():
                return wire.LeaseAnswer(self.book.confirm(question.lease))
            case wire.Release():
                return wire.LeaseAnswer(self.book.release(question.lease))


@pytest.fixture(scope="module")
def live():
    live = LiveServer()
    yield live
    live.server.close()


@pytest.fixture(scope="module")
def raw(live):
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(f"tcp://127.0.0.1:{live.server.port}")
    yield dealer
    context.destroy(linger=0)


@given(parts=st.lists(frames, min_size=1, max_size=8), enveloped=st.booleans())
def test_a_live_channel_answers_any_message_once_and_goes_on(live, raw, parts, enveloped):
    lease = live.book.grant("r")
    raw.send_multipart([b"", *parts] if enveloped else parts)
    assert raw.poll(10_000), "no answer"
    answer = wire.decode_answer(raw.recv_multipart()[-1])
    assert not raw.poll(0)
    try:
        question = wire.decode_question(parts[-1])
    except PeerError:
        assert isinstance(answer, wire.ErrorAnswer)
    else:
        few = len(parts) + enveloped <= 3
        assert isinstance(answer, wire.ErrorAnswer) is not few
        if question != wire.Release(lease):
            assert live.book.confirm(lease) is wire.LeaseState.HELD
    live.book.release(lease)


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_bytes_that_are_no_zeromq_harm_nobody(live, chunks):
    with suppress(OSError), socket.create_connection(("127.0.0.1", live.server.port)) as stranger:
        for chunk in chunks:
            stranger.sendall(chunk)
    with ControlClient("127.0.0.1", live.server.port, 10) as client:
        assert client.ask(wire.GetManifest()) == live.manifest


class Liar:
    """A server that answers every question with the frame it was given."""

    def __init__(self):
        self.frame = b""
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.REP)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.stopped.is_set():
            if self.socket.poll(50):
                self.socket.recv_multipart()
                self.socket.send(self.frame)

    def close(self):
        self.stopped.set()
        self.thread.join(5)
        self.context.destroy(linger=0)


@pytest.fixture(scope="module")
def liar():
    liar = Liar()
    yield liar
    liar.close()


@given(frame=frames)
def test_a_client_survives_any_answer(liar, frame):
    liar.frame = frame
    with ControlClient("127.0.0.1", liar.port, 10) as client, suppress(PeerError):
        client.ask(wire.Confirm(LEASE), timeout_s=0.5)
