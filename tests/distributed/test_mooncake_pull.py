"""Pulls between real processes over real Mooncake, without a model.

Two producer ranks own different layers; a reader's puller fetches them through the real control
channel. After each trouble the reader either has the right bytes or reports a failure.
"""

import time

import pytest
from pull_nodes import LAYERS, P_BLOCKS, PROMPT, DecodeGroup

from kvpp_connect.errors import PeerError

pytestmark = pytest.mark.distributed


@pytest.fixture
def decode():
    group = DecodeGroup([range(4)])
    yield group
    group.close()


def test_each_layer_comes_from_its_owner_and_nothing_else_is_written(make_producer, decode):
    assert decode.pull(make_producer().hand_over("r", PROMPT, P_BLOCKS))
    decode.assert_pulled()
    sums = decode.stats[0].take()
    assert sums["pull_bytes"] == len(PROMPT) * 576 * 4 * len(LAYERS)
    assert sums["pull_tokens"] == len(PROMPT)
    assert sums["pull_pieces"] == 2 * len(LAYERS) + len(LAYERS)  # blocks 5,6 -> 1,3 do not merge


def test_a_locally_cached_prefix_is_not_pulled(make_producer, decode):
    assert decode.pull(make_producer().hand_over("r", PROMPT, P_BLOCKS), first_token=16)
    decode.assert_pulled(first_token=16)


def test_a_lease_that_ran_out_before_the_confirmation_is_a_failure(make_producer, decode):
    producer = make_producer(lease_s=0.05)
    params = producer.hand_over("r", PROMPT, P_BLOCKS)
    time.sleep(0.1)
    assert producer.take_ended() == {"r"}
    assert not decode.pull(params)
    assert decode.stats[0].take() == {"pull_failures/lease_lost": 1}


def test_a_restarted_producer_is_recognised(make_producer, decode):
    first = make_producer()
    params = first.hand_over("r", PROMPT, P_BLOCKS)
    first.close()
    make_producer(port=params["remote_port"])
    assert not decode.pull(params)
    assert decode.untouched()


def test_a_producer_that_is_not_there_is_a_failure_in_time(make_producer, decode):
    producer = make_producer()
    params = producer.hand_over("r", PROMPT, P_BLOCKS)
    producer.close()
    assert not decode.pull(params, timeout_s=20)


def test_blocks_that_the_producer_does_not_have_are_a_failure(make_producer, decode):
    params = make_producer(num_blocks=6).hand_over("r", PROMPT, [5, 6, 2])
    assert not decode.pull(params)
    assert decode.untouched()


def test_a_dead_owner_is_a_failure_and_other_requests_go_on(make_producer, ranks, decode, spawn):
    params = make_producer().hand_over("r", PROMPT, P_BLOCKS)
    ranks[0][1].kill()
    started = time.monotonic()
    assert not decode.pull(params, timeout_s=100)
    # The destination may be written late, so the failure is reported after the hold only.
    assert time.monotonic() - started >= 0.5


class FailingOnce:
    """A transfer engine whose first read of each session fails."""

    def __init__(self, engine):
        self.engine = engine
        self.failed = set()

    @property
    def session(self):
        return self.engine.session

    def register(self, address, length_bytes):
        self.engine.register(address, length_bytes)

    def read(self, session, *lists):
        if session not in self.failed:
            self.failed.add(session)
            raise PeerError("no progress")
        self.engine.read(session, *lists)


def test_a_read_that_fails_is_repeated_once(make_producer):
    decode = DecodeGroup([range(4)], wrap=FailingOnce)
    started = time.monotonic()
    decode.submit(make_producer().hand_over("r", PROMPT, P_BLOCKS))
    (result,) = decode.results()
    assert result.succeeded
    # The failed attempt may still write for the hold, counted from now on.
    assert result.written_until >= started + 0.5
    decode.assert_pulled()
    assert decode.stats[0].take()["pulls"] == 1
    decode.close()


def test_many_requests_one_after_the_other(make_producer, decode):
    producer = make_producer()
    for number in range(20):
        assert decode.pull(producer.hand_over(f"r{number}", PROMPT, P_BLOCKS))
    decode.assert_pulled()
