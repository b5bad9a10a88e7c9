"""Pulls with a scripted transfer engine and a real control channel."""

import threading
import time

import pytest
from builders import address, manifest, rank_manifest

from kvpp_connect.connectors.mooncake_v2.counters import PullStats
from kvpp_connect.connectors.mooncake_v2.exchange import ShareExchange, ShareKey
from kvpp_connect.connectors.mooncake_v2.metadata import PullRequest, parse_remote_prefill
from kvpp_connect.connectors.mooncake_v2.producer import Producer
from kvpp_connect.connectors.mooncake_v2.puller import Puller, PullOptions
from kvpp_connect.errors import PeerError

PROMPT = list(range(40))  # two and a half blocks of 16 tokens
HOLD_S = 0.8
LAYERS = ("a", "b")


class Engine:
    """Reads nothing. Each read takes its next step from the script; afterwards all succeed."""

    session = "here"

    def __init__(self, *script):
        self.script = list(script)
        self.reads = 0

    def register(self, address, length_bytes):
        pass

    def read(self, session, *lists):
        self.reads += 1
        if self.script:
            self.script.pop(0)()


def fail():
    raise PeerError("no progress")


def break_down():
    raise RuntimeError("a bug")


def caches(ranks=1, token_bytes=4):
    return [
        rank_manifest(
            rank, *(address(name, 1000 * i, 64, token_bytes) for i, name in enumerate(LAYERS))
        )
        for rank in range(ranks)
    ]


@pytest.fixture
def producer():
    made = []

    def make(token_bytes=4, lease_s=60.0):
        producer = Producer(
            engine_id="p", host="127.0.0.1", port=0, lease_s=lease_s, max_lease_s=3600.0
        )
        producer.publish(manifest(*caches(token_bytes=token_bytes)))
        made.append(producer)
        return producer

    yield make
    for side in made:
        side.close()


class Rank:
    """One decode rank of a group."""

    def __init__(self, engine, *, ranks=1, token_bytes=4, exchange=None):
        self.stats = PullStats(counts_tokens=True)
        self.exchange = exchange
        self.puller = Puller(
            engine=engine,
            group=manifest(*caches(ranks, token_bytes)),
            rank=0,
            exchange=exchange,
            options=PullOptions(
                mode="shared" if exchange else "direct",
                control_timeout_s=0.5,
                failed_read_hold_s=HOLD_S,
            ),
            stats=self.stats,
        )

    def submit(self, params, request_id="r"):
        order = PullRequest(
            request_id=request_id,
            remote=parse_remote_prefill(params),
            local_block_ids=(1, 2, 3),
            first_token=0,
            end_token=len(PROMPT),
        )
        self.puller.submit(order)
        lease = order.remote.lease
        return ShareKey(request_id, lease.incarnation, lease.generation)

    def results(self, number=1, timeout_s=60):
        deadline, found = time.monotonic() + timeout_s, []
        while len(found) < number:
            assert time.monotonic() < deadline, "no result in time"
            found += self.puller.take_results()
            time.sleep(0.01)
        return found

    def pull(self, params):
        """Pull; answer the result and after how many seconds it was reported."""
        started = time.monotonic()
        self.submit(params)
        (result,) = self.results()
        return result, time.monotonic() - started


@pytest.fixture
def rank():
    made = []

    def make(*args, **kwargs):
        made.append(Rank(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        if one.exchange:
            one.exchange.close()
        one.puller.close()


def handed_over(producer, request_id="r"):
    return producer.hand_over(request_id, PROMPT, [4, 5, 6])


def test_a_repeated_read_of_rows_counts_at_once_and_says_how_long_the_first_may_write(
    producer, rank, awake
):
    began, began_awake = time.monotonic(), awake()
    result, _ = rank(Engine(fail)).pull(handed_over(producer()))
    assert result.succeeded
    assert awake() - began_awake < HOLD_S < result.written_until - began + 0.2


def test_a_repeated_read_of_whole_blocks_waits_since_the_first_may_write_behind_the_prompt(
    producer, rank, awake
):
    one = rank(Engine(fail), token_bytes=0)
    result, seconds = one.pull(handed_over(producer(token_bytes=0)))
    assert result.succeeded
    assert seconds >= HOLD_S
    began = awake()
    result, _ = one.pull(handed_over(producer(token_bytes=0)))
    assert result.succeeded
    assert awake() - began < HOLD_S


def test_a_lease_that_is_shorter_than_the_hold_makes_a_repeated_read_a_failure(producer, rank):
    one = rank(Engine(fail))
    result, seconds = one.pull(handed_over(producer(lease_s=HOLD_S / 2)))
    assert not result.succeeded
    assert seconds >= HOLD_S
    assert one.stats.take()["pull_failures/lease_lost"] == 1


@pytest.mark.parametrize(("script", "cause"), [([fail] * 3, "read"), ([break_down], "other")])
def test_a_failed_read_is_reported_when_it_cannot_write_any_more(producer, rank, script, cause):
    one = rank(Engine(*script))
    result, seconds = one.pull(handed_over(producer()))
    assert not result.succeeded
    assert seconds >= HOLD_S
    assert one.stats.take()[f"pull_failures/{cause}"] == 1


def test_a_producer_that_dies_before_a_read_is_repeated_is_the_cause(producer, rank):
    side = producer()

    def die():
        side.close()
        fail()

    one = rank(Engine(die))
    result, _ = one.pull(handed_over(side))
    assert not result.succeeded
    assert one.stats.take()["pull_failures/unreachable"] == 1


def test_what_waited_for_a_dead_producer_fails_with_the_first(producer, rank, awake):
    side = producer()
    params = [handed_over(side, f"r{n}") for n in range(20)]
    side.close()
    one = rank(Engine())
    started = awake()
    for number, param in enumerate(params):
        one.submit(param, f"r{number}")
    assert not any(result.succeeded for result in one.results(20))
    assert awake() - started < 5  # each alone would take half a second


def test_a_cancelled_pull_is_not_read(producer, rank):
    side = producer()
    entered, leave = threading.Event(), threading.Event()

    def wait():
        entered.set()
        leave.wait(60)

    engine = Engine(wait)
    one = rank(engine)
    one.submit(handed_over(side, "first"), "first")
    one.submit(handed_over(side, "second"), "second")
    assert entered.wait(60)
    one.puller.cancel(frozenset({"second"}))
    leave.set()
    assert {r.request_id: r.succeeded for r in one.results(2)} == {"first": True, "second": False}
    assert engine.reads == 1
    assert one.stats.take()["pull_failures/cancelled"] == 1


def test_a_cancelled_pull_does_not_wait_for_a_notice_that_came_before(producer, rank):
    """The other rank is done while this one reads; then the request is aborted."""
    exchange, other = ShareExchange(0, "127.0.0.1"), ShareExchange(1, "127.0.0.1")
    exchange.connect({1: other.address})
    other.connect({0: exchange.address})
    entered, leave = threading.Event(), threading.Event()

    def wait():
        entered.set()
        leave.wait(60)

    one = rank(Engine(wait), ranks=2, exchange=exchange)
    key = one.submit(handed_over(producer()))
    assert entered.wait(60)
    other.tell(key, [0], arrived=True)
    time.sleep(0.5)
    one.puller.cancel(frozenset({"r"}))
    leave.set()
    (result,) = one.results()
    assert not result.succeeded
    assert one.puller.running() == 0
    other.close()
