import threading
import time

import pytest

from kvpp_connect.connectors.mooncake_v2.peers import PeerPool


class Line:
    """A connection that notes who opened, used and closed it."""

    log = None

    def __init__(self, host, port):
        if host == "nobody":
            raise OSError("refused")
        self.name = f"{host}:{port}"
        self.thread = threading.current_thread()
        self.log.append(("open", self.name))

    def close(self):
        assert threading.current_thread() is self.thread
        self.log.append(("close", self.name))


@pytest.fixture
def log():
    Line.log = []
    return Line.log


@pytest.fixture
def make_pool(log):
    pools = []

    def make(**settings):
        pools.append(PeerPool(Line, name="test", **settings))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close(finish_queued=False, timeout_s=5)


def wait_until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not become true"
        time.sleep(0.005)


def test_jobs_of_a_peer_share_a_connection_and_run_in_order(make_pool, log):
    pool = make_pool()
    seen = []
    futures = [pool.submit(("a", 1), lambda line, n=n: seen.append(n) or n) for n in range(20)]
    assert [future.result(60) for future in futures] == seen == list(range(20))
    assert log == [("open", "a:1")]


def test_a_stuck_peer_delays_nobody_else(make_pool):
    pool, release = make_pool(), threading.Event()
    stuck = pool.submit(("slow", 1), lambda line: release.wait(60))
    assert pool.submit(("fast", 1), lambda line: line.name).result(60) == "fast:1"
    assert not stuck.done()
    release.set()
    assert stuck.result(60)


def test_what_a_job_or_the_opening_raises_is_the_future_s(make_pool):
    pool = make_pool()
    with pytest.raises(ZeroDivisionError):
        pool.submit(("a", 1), lambda line: 1 / 0).result(60)
    with pytest.raises(OSError, match="refused"):
        pool.submit(("nobody", 1), lambda line: None).result(60)
    assert pool.submit(("a", 1), lambda line: "still there").result(60) == "still there"


def test_an_idle_connection_is_closed_and_opened_again_on_demand(make_pool, log):
    pool = make_pool(idle_s=0.05)
    pool.submit(("a", 1), lambda line: None).result(60)
    wait_until(lambda: log == [("open", "a:1"), ("close", "a:1")])
    assert pool.open_peers() == 0
    pool.submit(("a", 1), lambda line: None).result(60)
    assert log[2] == ("open", "a:1")


def test_a_busy_connection_is_not_idle(make_pool, log):
    pool = make_pool(idle_s=0.02)
    seen = pool.submit(("a", 1), lambda line: (time.sleep(0.1), list(log))[1]).result(60)
    assert seen == [("open", "a:1")]


def test_beyond_the_bound_the_least_recently_used_idle_connection_is_closed(make_pool, log):
    pool, release = make_pool(max_peers=2), threading.Event()
    busy = pool.submit(("busy", 1), lambda line: release.wait(60))
    for name in ("a", "b", "c"):
        pool.submit((name, 1), lambda line: None).result(60)
        wait_until(lambda: pool.open_peers() <= 2)
    wait_until(lambda: ("close", "b:1") in log)
    assert ("close", "a:1") in log
    assert ("close", "busy:1") not in log
    release.set()
    busy.result(60)


def test_no_job_is_lost_while_connections_come_and_go(make_pool):
    pool = make_pool(idle_s=0.0, max_peers=2)
    futures = []
    for number in range(400):
        futures.append(pool.submit((f"h{number % 5}", 1), lambda line, n=number: n))
        if number % 7 == 0:
            time.sleep(0.001)
    assert [future.result(60) for future in futures] == list(range(400))


@pytest.mark.parametrize("finish_queued", [True, False])
def test_closing_finishes_or_cancels_what_is_queued(make_pool, log, finish_queued):
    pool, release = make_pool(), threading.Event()
    running = pool.submit(("a", 1), lambda line: release.wait(60))
    queued = pool.submit(("a", 1), lambda line: "ran")
    wait_until(lambda: running.running())
    threading.Timer(0.05, release.set).start()
    pool.close(finish_queued=finish_queued, timeout_s=60)
    assert running.result(0)
    assert queued.cancelled() is not finish_queued
    assert log[-1] == ("close", "a:1")
    assert pool.submit(("a", 1), lambda line: None).cancelled()


def test_closing_does_not_wait_for_ever(make_pool, awake):
    pool, release = make_pool(), threading.Event()
    pool.submit(("a", 1), lambda line: release.wait(60))
    began = awake()
    pool.close(finish_queued=True, timeout_s=0.1)
    assert awake() - began < 3
    release.set()
