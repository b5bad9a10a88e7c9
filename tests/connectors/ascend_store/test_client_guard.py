import threading

import pytest

from kvpp_connect.connectors.ascend_store.backends.base import Buffer, StoreError
from kvpp_connect.connectors.ascend_store.backends.guard import ClientGuard


@pytest.fixture
def guard():
    made = ClientGuard("the store")
    made.registered(Buffer(1000, 100))
    made.registered(Buffer(5000, 50))
    return made


def test_a_closed_client_is_called_no_more(guard):
    with guard.call():
        pass
    assert guard.shut()
    with pytest.raises(StoreError, match="the store is closed"), guard.call():
        pytest.fail("the call went through")


def test_only_one_caller_closes_the_client(guard):
    assert [guard.shut(), guard.shut()] == [True, False]


def test_the_client_is_closed_when_the_last_call_has_ended(guard):
    inside, leave, events = threading.Event(), threading.Event(), []

    def call():
        with guard.call():
            inside.set()
            leave.wait(60)
            events.append("call ended")

    def close():
        assert guard.shut(60)
        events.append("closed")

    threads = [threading.Thread(target=call), threading.Thread(target=close)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    while not refuses(guard):  # then the other thread is within shut()
        pass
    leave.set()
    for thread in threads:
        thread.join(60)
    assert events == ["call ended", "closed"]


def refuses(guard):
    try:
        with guard.call():
            return False
    except StoreError:
        return True


def test_a_client_that_a_call_still_uses_is_left_open(guard):
    with guard.call():
        assert not guard.shut(0.01)


def test_a_call_that_fails_does_not_keep_the_client_open(guard):
    with pytest.raises(ValueError, match="bad"), guard.call():
        raise ValueError("bad")
    assert guard.shut(0.01)


@pytest.mark.parametrize(
    "buffer",
    [Buffer(1000, 100), Buffer(1099, 1), Buffer(5000, 50)],
)
def test_ranges_of_registered_memory_pass(guard, buffer):
    guard.check(["a"], [buffer])


@pytest.mark.parametrize(
    "buffer",
    [Buffer(999, 10), Buffer(1000, 101), Buffer(1100, 1), Buffer(5040, 11), Buffer(1010, 0)],
)
def test_other_ranges_and_empty_ones_are_refused(guard, buffer):
    with pytest.raises(AssertionError):
        guard.check(["a"], [buffer])


def test_as_many_buffers_as_keys_are_wanted(guard):
    with pytest.raises(AssertionError, match="2 keys for 1 buffers"):
        guard.check(["a", "b"], [Buffer(1000, 1)])
