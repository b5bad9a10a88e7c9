import msgspec
import pytest
from builders import address, manifest, rank_manifest

from kvpp_connect.connectors.mooncake_v2 import wire
from kvpp_connect.errors import PeerError

LEASE = wire.LeaseRef(incarnation="i", request_id="r", generation=7)
QUESTIONS = [
    wire.GetManifest(),
    wire.Renew(incarnation="i", generations=(1, 2**40)),
    wire.Confirm(LEASE),
    wire.Release(LEASE),
]


@pytest.mark.parametrize("message", QUESTIONS)
def test_questions_survive_the_way(message):
    assert wire.decode_question(wire.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        wire.ManifestAnswer(manifest(rank_manifest(0, address("layer", 2**63 + 5)))),
        wire.RenewAnswer((wire.LeaseState.HELD, wire.LeaseState.UNKNOWN)),
        wire.LeaseAnswer(wire.LeaseState.EXPIRED),
        wire.BusyAnswer(12.5),
        wire.ErrorAnswer("no"),
    ],
)
def test_answers_survive_the_way(message):
    assert wire.decode_answer(wire.encode(message)) == message


def test_another_version_is_refused_with_both_versions():
    frame = bytearray(wire.encode(wire.GetManifest()))
    frame[len(wire.MAGIC)] = 9
    with pytest.raises(PeerError, match="version 9, this side speaks version 2"):
        wire.decode_question(bytes(frame))


@pytest.mark.parametrize("frame", [b"", b"KVP", b"KVPP", b"GET / HTTP/1.1", b"\x80\x04K\x01."])
def test_other_protocols_are_refused(frame):
    with pytest.raises(PeerError, match="not of the kvpp-connect control channel"):
        wire.decode_question(frame)


def test_an_oversized_question_is_refused_before_it_is_decoded():
    with pytest.raises(PeerError, match="at most 65536"):
        wire.decode_question(wire.encode(wire.GetManifest()) + bytes(wire.MAX_QUESTION_BYTES))


def test_a_full_renewal_fits_into_a_question_and_a_fuller_one_is_refused():
    most = tuple(range(2**32, 2**32 + wire.MAX_RENEWALS))
    question = wire.Renew(incarnation="0" * 32, generations=most)
    assert wire.decode_question(wire.encode(question)) == question
    more = wire.Renew(incarnation="0" * 32, generations=(0, *most))
    with pytest.raises(PeerError, match="malformed"):
        wire.decode_question(wire.encode(more))


def test_an_answer_is_no_question():
    with pytest.raises(PeerError, match="malformed"):
        wire.decode_question(wire.encode(wire.ErrorAnswer("x")))


def test_a_manifest_that_contradicts_itself_is_malformed():
    body = msgspec.to_builtins(wire.ManifestAnswer(manifest(rank_manifest(0, address("layer", 0)))))
    body["manifest"]["ranks"][0]["components"][0]["page_bytes"] = 0
    frame = wire.encode(wire.GetManifest())[: len(wire.MAGIC) + 1] + msgspec.msgpack.encode(body)
    with pytest.raises(PeerError):
        wire.decode_answer(frame)
