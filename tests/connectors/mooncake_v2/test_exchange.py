import time

import msgspec
import pytest
import zmq

from kvpp_connect.connectors.mooncake_v2.exchange import ShareExchange, ShareKey
from kvpp_connect.connectors.mooncake_v2.secret import derive_keys
from kvpp_connect.errors import ConfigError

KEY = ShareKey("r", "one", 1)


@pytest.fixture
def three():
    made = [ShareExchange(rank, "127.0.0.1") for rank in range(3)]
    for rank, exchange in enumerate(made):
        exchange.connect({r: e.address for r, e in enumerate(made) if r != rank})
    yield made
    for exchange in made:
        exchange.close()


def test_who_waits_is_woken_when_all_shares_are_there(three):
    arrival = three[0].expect(KEY, [1, 2], 30)
    three[1].tell(KEY, [0, 2], arrived=True)
    with pytest.raises(TimeoutError):
        arrival.result(0.3)
    three[2].tell(KEY, [0], arrived=True)
    assert arrival.result(60) == frozenset()


def test_notices_that_come_before_they_are_expected_are_kept(three):
    three[1].tell(KEY, [0], arrived=True)
    time.sleep(0.5)
    assert three[0].expect(KEY, [1], 30).result(60) == frozenset()


def test_a_share_that_will_not_come_wakes_at_once_and_is_named(three):
    arrival = three[0].expect(KEY, [1, 2], 30)
    three[2].tell(KEY, [0], arrived=False)
    assert arrival.result(60) == {2}


def test_another_lease_of_the_same_request_is_another_pull(three):
    arrival = three[0].expect(KEY, [1], 1)
    three[1].tell(ShareKey("r", "one", 2), [0], arrived=True)
    assert arrival.result(60) == {1}


def test_a_rank_that_says_nothing_is_given_up(three):
    assert three[0].expect(KEY, [1, 2], 0.3).result(60) == {1, 2}


def test_forgetting_and_closing_wake_who_waits(three):
    arrival = three[0].expect(KEY, [1], 60)
    three[0].forget(KEY)
    assert arrival.result(60) == {1}
    arrival = three[1].expect(KEY, [2], 60)
    three[1].close()
    assert arrival.result(60) == {2}


@pytest.mark.parametrize("token", [b"", b"x" * 16])
def test_notices_without_the_token_are_dropped(three, token):
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(three[0].address.endpoint)
    arrival = three[0].expect(KEY, [1], 2)
    socket.send(b"noise")
    socket.send(msgspec.msgpack.encode([token, 1, KEY, True]))
    socket.send(msgspec.msgpack.encode({"token": token, "sender": 1, "key": KEY, "arrived": True}))
    assert arrival.result(60) == {1}
    context.destroy(linger=0)


def test_a_host_that_is_not_ours_is_a_clear_error():
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.7"):
        ShareExchange(0, "203.0.113.7")


@pytest.mark.parametrize(
    ("sender_keys", "lost"),
    [(derive_keys(b"s" * 16), set()), (derive_keys(b"x" * 16), {1}), (None, {1})],
)
def test_with_a_secret_only_ranks_that_have_it_are_heard(sender_keys, lost):
    listener = ShareExchange(0, "127.0.0.1", derive_keys(b"s" * 16))
    sender = ShareExchange(1, "127.0.0.1", sender_keys)
    sender.connect({0: listener.address})
    arrival = listener.expect(KEY, [1], 3)
    sender.tell(KEY, [0], arrived=True)
    assert arrival.result(60) == lost
    sender.close()
    listener.close()
