"""Releases over a real loopback socket."""

import threading
import time
from dataclasses import replace

import pytest

from kvpp_connect.connectors.mooncake_v2 import wire
from kvpp_connect.connectors.mooncake_v2.control import ControlServer
from kvpp_connect.connectors.mooncake_v2.leases import LeaseBook
from kvpp_connect.connectors.mooncake_v2.metadata import RemotePrefill
from kvpp_connect.connectors.mooncake_v2.releases import LeaseReleaser


def remote(port, request_id="r", generation=1, lease_s=60.0):
    return RemotePrefill(
        engine_id="p",
        host="127.0.0.1",
        port=port,
        lease=wire.LeaseRef(incarnation="i", request_id=request_id, generation=generation),
        lease_s=lease_s,
        block_ids=(),
        prompt_tokens=1,
        prompt_digest="",
    )


@pytest.fixture
def producer():
    """A server that notes released requests; ``fail`` many questions are answered with a bug."""
    released = []
    failures = []

    def answer(question):
        if failures:
            raise failures.pop()
        released.append(question.lease.request_id)
        return wire.LeaseAnswer(wire.LeaseState.RELEASED)

    server = ControlServer("127.0.0.1", 0, answer)
    server.released, server.failures = released, failures
    yield server
    server.close()


def wait_for(released, expected, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while released != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert released == expected


def test_releases_arrive_in_order(producer):
    releaser = LeaseReleaser(timeout_s=2)
    for name in ("a", "b", "c"):
        releaser.release(remote(producer.port, name))
    wait_for(producer.released, ["a", "b", "c"])
    releaser.close()


def test_a_failed_release_is_tried_again(producer):
    producer.failures += [ZeroDivisionError("x"), ZeroDivisionError("y")]
    releaser = LeaseReleaser(timeout_s=2)
    releaser.release(remote(producer.port))
    wait_for(producer.released, ["r"])
    releaser.close()


def test_a_producer_that_is_gone_delays_nobody_else(producer, free_port, awake):
    releaser = LeaseReleaser(timeout_s=1)
    releaser.release(remote(free_port, "lost"))
    began = awake()
    releaser.release(remote(producer.port, "prompt"))
    wait_for(producer.released, ["prompt"])
    assert awake() - began < 0.8
    releaser.close()


def test_closing_sends_what_is_queued_and_ends_in_time(producer, free_port, awake):
    releaser = LeaseReleaser(timeout_s=0.5)
    releaser.release(replace(remote(free_port), engine_id="gone"))
    releaser.release(remote(producer.port))
    began = awake()
    releaser.close()
    assert awake() - began < 5
    assert producer.released == ["r"]


def test_a_delayed_release_comes_later_and_holds_nothing_up(producer):
    releaser = LeaseReleaser(timeout_s=2)
    began = time.monotonic()
    releaser.release(remote(producer.port, "late"), delay_s=0.3)
    releaser.release(remote(producer.port, "now"), delay_s=-1.0)
    wait_for(producer.released, ["now", "late"])
    assert time.monotonic() - began >= 0.3
    releaser.close()


def test_closing_does_not_wait_for_delayed_releases(producer, awake):
    releaser = LeaseReleaser(timeout_s=2)
    releaser.release(remote(producer.port), delay_s=60)
    began = awake()
    releaser.close()
    assert awake() - began < 5
    assert producer.released == []


class Engine:
    """A producer's lease book behind a real control channel."""

    def __init__(self, clock, lease_s, max_lease_s=60.0):
        self.lease_s = lease_s
        self.book = LeaseBook("i", lease_s, max_lease_s, clock)
        self.renewals = []
        self.stuck = threading.Event()
        self.server = ControlServer("127.0.0.1", 0, self.answer)

    def answer(self, question):
        if self.stuck.is_set():
            time.sleep(0.5)
        match question:
            case wire.Renew():
                self.renewals.append(len(question.generations))
                return wire.RenewAnswer(self.book.renew(question.incarnation, question.generations))
            case wire.Release():
                return wire.LeaseAnswer(self.book.release(question.lease))
        raise AssertionError(question)

    def grant(self, request_id="r"):
        lease = self.book.grant(request_id)
        return replace(remote(self.server.port), lease=lease, lease_s=self.lease_s)


@pytest.fixture
def make_engine(awake):
    """Makes engines; leases are as long as the process is awake, since renewals sleep with it."""
    engines = []

    def make(lease_s=0.6, **settings):
        engines.append(Engine(awake, lease_s, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.server.close()


@pytest.fixture
def releaser():
    releaser = LeaseReleaser(timeout_s=2)
    yield releaser
    releaser.close()


def sleep_and_assert_held(engine, lease, seconds, clock):
    until = clock() + seconds
    while clock() < until:
        assert engine.book.confirm(lease) is wire.LeaseState.HELD
        time.sleep(0.02)


def test_a_kept_lease_outlives_its_length_until_it_is_released(make_engine, releaser, awake):
    engine = make_engine(lease_s=0.6)
    handed_over = engine.grant()
    releaser.keep(handed_over)
    sleep_and_assert_held(engine, handed_over.lease, 2.0, awake)
    releaser.release(handed_over)
    wait_for_state(engine, handed_over.lease, wire.LeaseState.RELEASED)
    awake.sleep(0.3)  # for a question that was under way
    asked = len(engine.renewals)
    awake.sleep(0.5)
    assert len(engine.renewals) == asked
    assert releaser.take_counts() == {}


def wait_for_state(engine, lease, state, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while engine.book.confirm(lease) is not state:
        assert time.monotonic() < deadline, engine.book.confirm(lease)
        time.sleep(0.01)


def test_a_lease_is_renewed_until_its_delayed_release(make_engine, releaser):
    engine = make_engine(lease_s=0.6)
    handed_over = engine.grant()
    began = time.monotonic()
    releaser.release(handed_over, delay_s=1.5)
    sleep_and_assert_held(engine, handed_over.lease, 1.3, time.monotonic)
    wait_for_state(engine, handed_over.lease, wire.LeaseState.RELEASED)
    assert time.monotonic() - began >= 1.5


def test_many_leases_cost_few_questions_and_one_thread(make_engine, releaser, awake):
    engine = make_engine(lease_s=3.0)
    before = threading.active_count()
    for number in range(300):
        releaser.keep(engine.grant(f"r{number}"))
    awake.sleep(2.5)
    assert sum(engine.renewals) >= 300
    assert len(engine.renewals) <= 10
    assert threading.active_count() <= before + 1
    assert engine.book.live() == 300


def test_dead_and_stuck_producers_delay_nobody_elses_renewals(
    make_engine, releaser, free_port, awake
):
    dead, stuck, well = remote(free_port, lease_s=0.6), make_engine(), make_engine(lease_s=0.6)
    stuck.stuck.set()
    handed_over = well.grant()
    for each in (dead, stuck.grant(), handed_over):
        releaser.keep(each)
    sleep_and_assert_held(well, handed_over.lease, 2.0, awake)


def test_a_lost_lease_is_said_once_and_asked_about_no_more(make_engine, releaser, caplog, awake):
    engine = make_engine(lease_s=30.0, max_lease_s=0.1)
    handed_over = engine.grant("lost one")
    awake.sleep(0.2)
    releaser.keep(handed_over)
    deadline = time.monotonic() + 60
    lost = {}
    while not lost and time.monotonic() < deadline:
        lost = releaser.take_counts()
        time.sleep(0.01)
    assert lost == {"lost": 1}
    while "ended early (expired)" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "request lost one: its lease on engine p at 127.0.0.1" in caplog.text
    assert len(engine.renewals) == 1


def test_a_release_that_does_not_get_through_is_counted(free_port):
    releaser = LeaseReleaser(timeout_s=0.2)
    releaser.release(remote(free_port))
    deadline = time.monotonic() + 60
    counts = {}
    while not counts and time.monotonic() < deadline:
        counts = releaser.take_counts()
        time.sleep(0.05)
    assert counts == {"unreleased": 1}
    releaser.close()


def test_releases_that_pile_up_for_a_dead_producer_end_with_their_leases(free_port):
    releaser = LeaseReleaser(timeout_s=0.2)
    for number in range(50):
        releaser.release(remote(free_port, f"r{number}", lease_s=1.0))
    unreleased, deadline = 0, time.monotonic() + 60
    while unreleased < 50:
        assert time.monotonic() < deadline, unreleased
        unreleased += releaser.take_counts().get("unreleased", 0)
        time.sleep(0.02)
    releaser.close()
