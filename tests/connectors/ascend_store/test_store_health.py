"""A store that fails is left alone for a while, longer each time, and tried by one at a time."""

import pytest
from clocks import Clock

from kvpp_connect.connectors.ascend_store.health import StoreHealth


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def health(clock):
    return StoreHealth("a store", clock)


def pauses(health, clock, failures):
    """Seconds for which the store is left alone after each of so many failures in a row."""
    seen = []
    for _ in range(failures):
        health.failed("no answer")
        begin = clock()
        while not health.may_use():
            clock.advance(0.5)
        seen.append(clock() - begin)
    return seen


def test_a_good_store_is_used_by_all(health):
    assert health.is_good
    assert [health.may_use() for _ in range(3)] == [True] * 3


def test_each_failure_doubles_the_pause_up_to_half_a_minute(health, clock):
    assert pauses(health, clock, 7) == [1, 2, 4, 8, 16, 30, 30]


def test_after_a_pause_one_caller_tries_and_the_others_wait(health, clock):
    health.failed("no answer")
    clock.advance(1)
    assert [health.may_use() for _ in range(3)] == [True, False, False]
    assert not health.is_good


def test_an_answer_opens_the_store_to_all_again_and_forgets_the_failures(health, clock):
    pauses(health, clock, 3)
    health.worked()
    assert health.is_good
    assert [health.may_use() for _ in range(3)] == [True] * 3
    assert pauses(health, clock, 1) == [1]


def test_a_trial_of_which_nothing_is_heard_is_followed_by_another(health, clock):
    health.failed("no answer")
    clock.advance(1)
    assert health.may_use()
    assert not health.may_use()
    clock.advance(1)
    assert health.may_use()
