import os
import signal

import pytest

from kvpp_connect.demo.interrupt import Interrupted, SignalGuard


@pytest.fixture(autouse=True)
def known_handlers():
    """Python's own handlers: a test run started in the background ignores SIGINT."""
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


def entered():
    guard = SignalGuard()
    guard.enter()
    return guard


def test_only_the_first_signal_raises_the_next_one_waits_for_leave():
    guard = entered()
    with pytest.raises(Interrupted, match="SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(Interrupted, match="SIGINT"):
        guard.leave()


def test_leave_restores_the_former_handler():
    former = signal.getsignal(signal.SIGINT)
    guard = entered()
    guard.close()
    guard.leave()
    assert signal.getsignal(signal.SIGINT) is former


def test_a_guard_that_is_left_before_a_later_one_does_not_swallow_signals():
    first, second = entered(), entered()
    first.close()
    first.leave()
    second.close()
    second.leave()
    with pytest.raises(KeyboardInterrupt) as caught:
        os.kill(os.getpid(), signal.SIGINT)
    assert not isinstance(caught.value, Interrupted)


def test_the_later_guard_still_works_after_the_first_is_left():
    first, second = entered(), entered()
    first.close()
    first.leave()
    with pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGINT)
    second.leave()
