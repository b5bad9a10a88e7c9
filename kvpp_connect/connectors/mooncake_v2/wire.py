"""The control channel between a decode and a prefill node: messages and their encoding.

Each message is one ZeroMQ frame: a 4-byte magic, a version byte, then a msgpack map. The reader
asks, the producer answers; every question has exactly one answer.

    GetManifest -> ManifestAnswer     where the producer's caches lie
    Renew       -> RenewAnswer        the reader still wants these leases
    Confirm     -> LeaseAnswer        does the lease still hold? asked after the read; renews it
    Release     -> LeaseAnswer        the reader is done, or will not read; idempotent
    anything    -> BusyAnswer         too many questions from this peer: ask again later
    anything    -> ErrorAnswer        the question could not be answered; says why

Versions: 1, the first. 2, Renew and BusyAnswer; a hand-over names the length of its lease.
"""

from enum import Enum
from typing import Annotated, TypeVar

import msgspec

from kvpp_connect.errors import LayoutError, PeerError
from kvpp_connect.layout import EngineManifest

_T = TypeVar("_T")

MAGIC = b"KVPP"
VERSION = 2
MAX_QUESTION_BYTES = 64 * 1024
MAX_RENEWALS = 1024
MAX_ANSWER_BYTES = 64 * 1024 * 1024


class LeaseState(Enum):
    """What a producer knows of a lease. All but ``HELD`` are final."""

    HELD = "held"
    RELEASED = "released"
    EXPIRED = "expired"
    UNKNOWN = "unknown"


class LeaseRef(msgspec.Struct, frozen=True, kw_only=True):
    """One hand-over of one request's blocks.

    ``generation`` counts the leases of one ``incarnation`` of a producer, so a request id that is
    used again is another lease.
    """

    incarnation: str
    request_id: str
    generation: int


class BadMessage(Enum):
    """Why a producer did not take a message up."""

    MALFORMED = "malformed"
    OVERSIZED = "oversized"
    VERSION = "version"
    UNAUTHENTICATED = "unauthenticated"
    OVER_LIMIT = "over_limit"


class BadMessageError(PeerError):
    """A frame that is no message of this channel."""

    def __init__(self, cause: BadMessage, text: str) -> None:
        super().__init__(text)
        self.cause = cause


class GetManifest(msgspec.Struct, frozen=True, tag=True):
    """Ask for the producer's manifest."""


class Renew(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Keep leases of one incarnation; an incarnation numbers them uniquely."""

    incarnation: str
    generations: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_RENEWALS)]


class Confirm(msgspec.Struct, frozen=True, tag=True):
    """Ask whether a lease still holds."""

    lease: LeaseRef


class Release(msgspec.Struct, frozen=True, tag=True):
    """Give a lease back."""

    lease: LeaseRef


class ManifestAnswer(msgspec.Struct, frozen=True, tag=True):
    """The producer's manifest."""

    manifest: EngineManifest


class LeaseAnswer(msgspec.Struct, frozen=True, tag=True):
    """State of a lease after the question was carried out.

    ``left_s``: seconds for which a confirmed lease will hold even if nobody renews it.
    """

    state: LeaseState
    left_s: float = 0.0


class RenewAnswer(msgspec.Struct, frozen=True, tag=True):
    """States of the leases after the renewal, in the question's order."""

    states: tuple[LeaseState, ...]


class BusyAnswer(msgspec.Struct, frozen=True, tag=True):
    """The peer asks too much: nothing was done."""

    questions_per_s: float


class ErrorAnswer(msgspec.Struct, frozen=True, tag=True):
    """Why a question was not answered."""

    reason: str


Question = GetManifest | Renew | Confirm | Release
Answer = ManifestAnswer | RenewAnswer | LeaseAnswer | BusyAnswer | ErrorAnswer

_questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(Answer)


def encode(message: Question | Answer) -> bytes:
    """Encode one message as a frame."""
    return MAGIC + bytes([VERSION]) + msgspec.msgpack.encode(message)


def decode_question(frame: bytes) -> Question:
    """Decode what a reader sent.

    Raises:
        BadMessageError: not our protocol, another version, too large, or malformed.
    """
    return _decode(frame, _questions, MAX_QUESTION_BYTES)


def decode_answer(frame: bytes) -> Answer:
    """Decode what a producer answered.

    Raises:
        BadMessageError: not our protocol, another version, too large, or malformed.
    """
    return _decode(frame, _answers, MAX_ANSWER_BYTES)


def _decode(frame: bytes, decoder: msgspec.msgpack.Decoder[_T], limit_bytes: int) -> _T:
    if len(frame) > limit_bytes:
        raise BadMessageError(
            BadMessage.OVERSIZED,
            f"message of {len(frame)} bytes, at most {limit_bytes} are allowed",
        )
    if frame[: len(MAGIC)] != MAGIC or len(frame) <= len(MAGIC):
        raise BadMessageError(
            BadMessage.MALFORMED, "message is not of the kvpp-connect control channel"
        )
    version = frame[len(MAGIC)]
    if version != VERSION:
        raise BadMessageError(
            BadMessage.VERSION,
            f"control channel version {version}, this side speaks version {VERSION}; run the same "
            "kvpp-connect on prefill and decode nodes",
        )
    try:
        return decoder.decode(frame[len(MAGIC) + 1 :])
    except (msgspec.DecodeError, msgspec.ValidationError, LayoutError) as error:
        raise BadMessageError(BadMessage.MALFORMED, f"malformed message: {error}") from error
