"""Leases between real processes that stall and die, without caches and without a model."""

import os
import signal
import time

import pytest

from kvpp_connect.connectors.mooncake_v2 import wire
from kvpp_connect.connectors.mooncake_v2.control import ControlClient, ControlServer
from kvpp_connect.connectors.mooncake_v2.leases import LeaseBook
from kvpp_connect.connectors.mooncake_v2.metadata import RemotePrefill
from kvpp_connect.connectors.mooncake_v2.releases import LeaseReleaser
from kvpp_connect.connectors.mooncake_v2.secret import derive_keys

pytestmark = pytest.mark.distributed

KEYS = derive_keys(b"a secret of these tests alone")
LEASE_S = 8.0  # a machine may pause for a few seconds


def producer(pipe, name):
    """Hands out one lease per message and tells when it ended, until it is told to stop."""
    book = LeaseBook(name, LEASE_S, 600.0)

    def answer(question):
        match question:
            case wire.Renew():
                return wire.RenewAnswer(book.renew(question.incarnation, question.generations))
            case wire.Confirm():
                return wire.LeaseAnswer(book.confirm(question.lease))
            case wire.Release():
                return wire.LeaseAnswer(book.release(question.lease))

    server = ControlServer("127.0.0.1", 0, answer, keys=KEYS)
    while True:
        if pipe.poll(0.01) and pipe.recv() == "grant":
            pipe.send((server.port, book.grant("r")))
        if ended := book.take_ended():
            pipe.send(("ended", ended, time.monotonic()))


def reader(pipe):
    """Keeps every hand-over that it is given."""
    releaser = LeaseReleaser(timeout_s=2, keys=KEYS)
    pipe.send("ready")
    while True:
        releaser.keep(pipe.recv())
        pipe.send("kept")


@pytest.fixture
def d(spawn):
    """A reader that is there before its first lease begins."""
    child = spawn(reader)
    assert child.get() == "ready"
    return child


def hand_over(child):
    child.put("grant")
    port, lease = child.get()
    return RemotePrefill(
        engine_id="p",
        host="127.0.0.1",
        port=port,
        lease=lease,
        lease_s=LEASE_S,
        block_ids=(),
        prompt_tokens=1,
        prompt_digest="",
    )


def state(remote):
    with ControlClient(remote.host, remote.port, 5, KEYS) as client:
        return client.ask(wire.Confirm(remote.lease)).state


def stop(child):
    os.kill(child.process.pid, signal.SIGSTOP)


def go_on(child):
    os.kill(child.process.pid, signal.SIGCONT)


def test_a_reader_that_is_killed_costs_its_producer_one_lease(spawn, d):
    p = spawn(producer, "p")
    remote = hand_over(p)
    d.put(remote)
    assert d.get() == "kept"
    time.sleep(1.5 * LEASE_S)
    assert state(remote) is wire.LeaseState.HELD
    killed = time.monotonic()
    d.kill()
    _, ended, at = p.get()
    assert ended == ["r"]
    # Monotonic clocks of one machine agree; the last renewal was at most a third of a lease ago.
    assert LEASE_S / 2 < at - killed < 3 * LEASE_S


def test_a_stopped_producer_delays_nobody_elses_renewals_and_its_expiry_is_final(spawn, d):
    stuck, well = spawn(producer, "stuck"), spawn(producer, "well")
    lost, kept = hand_over(stuck), hand_over(well)
    for remote in (lost, kept):
        d.put(remote)
        assert d.get() == "kept"
    stop(stuck)
    try:
        for _ in range(6):
            time.sleep(LEASE_S / 4)
            assert state(kept) is wire.LeaseState.HELD
    finally:
        go_on(stuck)
    # Renewals that waited in its socket come too late.
    assert stuck.get()[1] == ["r"]
    assert state(lost) is wire.LeaseState.EXPIRED
    assert state(kept) is wire.LeaseState.HELD


def test_a_reader_that_stalls_for_less_than_a_lease_loses_nothing(spawn, d):
    p = spawn(producer, "p")
    remote = hand_over(p)
    d.put(remote)
    assert d.get() == "kept"
    for _ in range(3):
        time.sleep(LEASE_S / 2)
        stop(d)
        time.sleep(LEASE_S / 4)
        go_on(d)
    assert state(remote) is wire.LeaseState.HELD


def test_a_producer_started_anew_on_the_same_port_knows_no_old_lease(spawn, caplog):
    book = LeaseBook("first", 60, 60)
    old = ControlServer("127.0.0.1", 0, lambda q: wire.LeaseAnswer(book.confirm(q.lease)))
    lease, port = book.grant("r"), old.port
    old.close()
    fresh = LeaseBook("second", 60, 60)
    fresh.grant("r")
    new = ControlServer(
        "127.0.0.1",
        port,
        lambda q: wire.RenewAnswer(fresh.renew(q.incarnation, q.generations)),
    )
    releaser = LeaseReleaser(timeout_s=2)
    remote = RemotePrefill(
        engine_id="p",
        host="127.0.0.1",
        port=port,
        lease=lease,
        lease_s=1.0,
        block_ids=(),
        prompt_tokens=1,
        prompt_digest="",
    )
    try:
        releaser.keep(remote)
        deadline = time.monotonic() + 60
        while "ended early (unknown)" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert fresh.live() == 1
    finally:
        releaser.close()
        new.close()
