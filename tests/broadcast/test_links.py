"""One link, with this test as the peer."""

import os
import socket
import time

import pytest

from kvpp_connect.broadcast.links import DONE, READY, Link, Staging
from kvpp_connect.errors import PeerError


@pytest.fixture
def staging():
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 4096)
    yield Staging(descriptor, 4096)
    os.close(descriptor)


@pytest.fixture
def pair(staging):
    """A link to rank 3, and the other end."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = Link(3, near, staging, 0.2)
    yield link, far
    link.close()
    far.close()


@pytest.fixture
def links(staging):
    """Links from rank 0 to rank 3 and back."""
    sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = [Link(rank, end, staging, 0.2) for rank, end in zip((3, 0), sockets, strict=True)]
    yield made
    for link in made:
        link.close()


def test_each_kind_arrives_in_its_own_order(links):
    ours, theirs = links
    for kind, label in ((READY, b"1"), (DONE, b"2"), (READY, b"3"), (DONE, b"4")):
        theirs.send(kind, label)
    assert [ours.receive(DONE), ours.receive(DONE)] == [b"2", b"4"]
    assert [ours.receive(READY), ours.receive(READY)] == [b"1", b"3"]
    assert ours.poll(READY) is None


def test_a_peer_that_is_gone_is_named_after_all_that_it_said(links):
    ours, theirs = links
    ours.send(READY, b"never read")  # the kernel says "connection reset" on account of it
    theirs.send(READY, b"last")
    theirs.close()
    assert ours.receive(READY) == b"last"
    with pytest.raises(PeerError, match=r"^rank 3 of the KVPP group is gone$"):
        ours.receive(READY)
    with pytest.raises(PeerError, match=r"^rank 3 of the KVPP group is gone$"):
        ours.poll(READY)


def test_sending_to_a_peer_that_is_gone_is_an_error_and_answering_is_not(links):
    ours, theirs = links
    theirs.close()
    ours.answer(DONE)
    with pytest.raises(PeerError, match=r"rank 3 of the KVPP group is gone"):
        ours.send(READY, b"1")


def test_a_peer_that_gives_up_says_why_to_who_receives_and_to_who_sends(staging):
    for act in (lambda link: link.receive(READY), lambda link: link.send(READY, b"1")):
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link = Link(3, near, staging, 0.2)
        Link(0, far, staging, 0.2).close("rank 2 has burnt down")
        with pytest.raises(PeerError, match=r"^rank 2 has burnt down$"):
            act(link)
        link.close()


def test_a_reason_of_any_length_and_script_arrives(links):
    ours, theirs = links
    theirs.close("\N{SNOWMAN}" * 1000)
    with pytest.raises(PeerError, match="\N{SNOWMAN}" * 100):
        ours.receive(READY)


def test_a_silent_peer_is_an_error_after_the_limit_and_no_sooner(pair):
    link, _ = pair
    started = time.monotonic()
    with pytest.raises(PeerError, match=r"^rank 3 of the KVPP group has been silent for 0\.2 s$"):
        link.receive(READY)
    assert 0.19 < time.monotonic() - started < 2


def test_a_silent_peer_may_still_say_why_in_the_time_of_grace(links):
    ours, theirs = links
    reads = []

    def late(seconds):
        reads.append(seconds)
        theirs.close("rank 2 has been silent")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvpp_connect.broadcast.links.time.sleep", late)
        with pytest.raises(PeerError, match=r"^rank 2 has been silent$"):
            ours.receive(READY, grace_s=1.5)
    assert reads == [1.5]


def test_a_peer_that_reads_nothing_runs_into_the_limit(pair):
    link, _ = pair

    def send_on():
        for _ in range(100_000):
            link.send(READY, b"x" * 100)

    with pytest.raises(PeerError, match="rank 3 of the KVPP group has been silent"):
        send_on()


def test_closing_again_does_nothing(pair):
    link, _ = pair
    link.close()
    link.close("twice")
