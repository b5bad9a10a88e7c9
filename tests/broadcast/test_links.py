"""One link, with this test as the peer."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpp_connect.broadcast.links import COUNTERS_BYTES, Bell, Link, Staging
from kvpp_connect.errors import PeerError

LIMIT_S = 0.2


def never():
    return False


@pytest.fixture
def staging():
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, COUNTERS_BYTES + 4096)
    yield Staging(descriptor, 4096)
    os.close(descriptor)


@pytest.fixture
def connect(staging):
    """Makes links from rank 0 to rank 3 and back, with one memory."""
    made = []

    def pair(spin_s=0.0, limit_s=LIMIT_S):
        sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours, theirs = Bell.make(), Bell.make()
        bells = [(ours, Bell(os.dup(theirs.descriptor))), (theirs, Bell(os.dup(ours.descriptor)))]
        links = [
            Link(rank, end, staging, both, limit_s, spin_s)
            for rank, end, both in zip((3, 0), sockets, bells, strict=True)
        ]
        made.extend(links)
        return links

    yield pair
    for link in made:
        link.close()


@pytest.fixture
def links(connect):
    return connect()


@pytest.mark.parametrize("spin_s", [0.0, 0.05])
def test_a_counter_that_has_changed_is_seen_before_and_after_going_to_sleep(connect, spin_s):
    ours, theirs = connect(spin_s, limit_s=30)
    words = ours.staging.words

    def count(after_s):
        time.sleep(after_s)
        words[0] += 1
        theirs.ring()

    with ThreadPoolExecutor(1) as pool:
        for number, after_s in enumerate([0, 0, 0.001, 0.2] * 5):
            pool.submit(count, after_s)
            ours.wait(lambda number=number: words[0] > number)
    assert words[0] == 20


def test_rings_on_account_of_others_do_not_end_the_wait_nor_keep_it_awake(links):
    ours, theirs = links
    for _ in range(3):
        theirs.ring()
    began_s = time.thread_time()
    with pytest.raises(PeerError, match="silent"):
        ours.wait(never)
    assert time.thread_time() - began_s < LIMIT_S / 10


def test_a_peer_that_is_gone_is_named_after_all_that_it_counted(links):
    ours, theirs = links
    ours.ring()  # never heard
    ours.staging.words[0] = 1
    theirs.close()
    ours.wait(lambda: ours.staging.words[0] > 0)
    for _ in range(2):
        with pytest.raises(PeerError, match=r"^rank 3 of the KVPP group is gone$"):
            ours.wait(never)


def test_a_peer_that_is_gone_is_noticed_long_before_the_limit(connect, awake):
    ours, theirs = connect(limit_s=60)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (time.sleep(0.1), theirs.close()))
        started = awake()
        with pytest.raises(PeerError, match="gone"):
            ours.wait(never)
    assert awake() - started < 5


def test_ringing_a_peer_that_is_gone_is_no_error(links):
    ours, theirs = links
    theirs.close()
    ours.ring()


def test_a_peer_that_gives_up_says_why(links):
    ours, theirs = links
    theirs.close("rank 2 has burnt down")
    for _ in range(2):
        with pytest.raises(PeerError, match=r"^rank 2 has burnt down$"):
            ours.wait(never)


def test_the_reason_is_kept_while_there_is_something_left_to_read(links):
    ours, theirs = links
    theirs.close("rank 2 has burnt down")
    looks = iter([False, True, False, False])
    ours.wait(lambda: next(looks))
    with pytest.raises(PeerError, match=r"^rank 2 has burnt down$"):
        ours.wait(lambda: next(looks))


def test_two_ranks_that_give_up_at_once_read_each_others_reason(staging):
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = Link(3, near, staging, (Bell.make(), Bell.make()), LIMIT_S)
    near.send(b"never read")  # the kernel says "connection reset" on account of it
    far.send(b"rank 2 has burnt down")
    far.close()
    with pytest.raises(PeerError, match=r"^rank 2 has burnt down$"):
        link.wait(never)
    link.close()


def test_a_reason_of_any_length_and_script_arrives(links):
    ours, theirs = links
    theirs.close("\N{SNOWMAN}" * 1000)
    with pytest.raises(PeerError, match="\N{SNOWMAN}" * 100):
        ours.wait(never)


def test_a_silent_peer_is_an_error_after_the_limit_and_no_sooner(links, awake):
    started, started_awake = time.monotonic(), awake()
    with pytest.raises(PeerError, match=r"^rank 3 of the KVPP group has been silent for 0\.2 s$"):
        links[0].wait(never)
    assert time.monotonic() - started > 0.19
    assert awake() - started_awake < 2


def test_a_silent_peer_may_still_say_why_in_the_time_of_grace(links):
    ours, theirs = links
    reads = []

    def late(seconds):
        reads.append(seconds)
        theirs.close("rank 2 has been silent")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvpp_connect.broadcast.links.time.sleep", late)
        with pytest.raises(PeerError, match=r"^rank 2 has been silent$"):
            ours.wait(never, grace_s=1.5)
    assert reads == [1.5]


def test_closing_again_does_nothing(links):
    links[0].close()
    links[0].close("twice")
