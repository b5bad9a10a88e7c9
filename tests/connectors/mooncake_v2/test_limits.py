import logging
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpp_connect.connectors.mooncake_v2.limits import RareLog, RateLimit


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_second_s_allowance_may_come_at_once_and_then_drips(clock):
    limit = RateLimit(8, clock)
    assert [limit.admits("a") for _ in range(10)] == [True] * 8 + [False] * 2
    clock.now += 0.125
    assert [limit.admits("a") for _ in range(2)] == [True, False]


def test_peers_do_not_share_a_bucket(clock):
    limit = RateLimit(1, clock)
    assert limit.admits("a")
    assert not limit.admits("a")
    assert limit.admits("b")


@given(st.lists(st.floats(0, 0.5), max_size=200))
def test_never_more_than_the_bucket_and_the_rate_allow(pauses):
    clock = Clock()
    limit = RateLimit(5, clock)
    admitted = 0
    for pause in pauses:
        clock.now += pause
        admitted += limit.admits("a")
        assert admitted <= 5 + 5 * (clock.now - 100.0) + 1e-6


def test_the_table_of_peers_is_bounded_and_forgets_the_longest_unseen(clock):
    limit = RateLimit(1, clock)
    assert limit.admits("first")
    for number in range(3000):
        limit.admits(f"peer {number}")
    assert len(limit) == 1024
    assert not limit.admits("peer 2999")


def test_a_log_says_once_a_second_what_it_left_out(clock, caplog):
    log = RareLog(logging.getLogger("some.logger"), clock)
    for _ in range(5):
        log.warning("bad %s", "peer")
    assert [r.getMessage() for r in caplog.records] == ["bad peer"]
    clock.now += 1
    log.warning("bad %s", "peer")
    assert caplog.records[-1].getMessage() == "bad peer (4 more since the last such line)"
