"""The decode node's scheduler side: whatever happens to a request, its lease is given back once."""

from collections import Counter

import pytest

pytest.importorskip("zmq")

from kvpp_connect.connectors.mooncake_v2.consumer import Consumer
from kvpp_connect.connectors.mooncake_v2.metadata import handover_params
from kvpp_connect.connectors.mooncake_v2.quarantine import BlockQuarantine
from kvpp_connect.connectors.mooncake_v2.wire import LeaseRef

PROMPT = list(range(40))


class NotingReleaser:
    def __init__(self):
        self.released = []
        self.delays_s = []
        self.kept = []

    def keep(self, remote):
        self.kept.append(remote.lease.request_id)

    def release(self, remote, delay_s=0.0):
        self.released.append(remote.lease.request_id)
        self.delays_s.append(delay_s)


class CountedPins:
    def __init__(self):
        self.pins = Counter()

    def pin(self, block_ids):
        self.pins.update(block_ids)

    def unpin(self, block_ids):
        self.pins.subtract(block_ids)


@pytest.fixture
def releaser():
    return NotingReleaser()


@pytest.fixture
def pool():
    return CountedPins()


@pytest.fixture
def quarantine(pool):
    quarantine = BlockQuarantine()
    quarantine.bind(pool)
    return quarantine


@pytest.fixture
def consumer(releaser, quarantine):
    return Consumer(releaser, quarantine)


def params(prompt=PROMPT, request_id="remote-1"):
    lease = LeaseRef(incarnation="i", request_id=request_id, generation=1)
    return handover_params(
        engine_id="e",
        host="h",
        port=1,
        lease=lease,
        lease_s=60.0,
        block_ids=[7, 8, 9],
        prompt=prompt,
    )


def pull(consumer, computed=0):
    tokens = consumer.offered_tokens("r", params(), PROMPT, computed)
    consumer.allocated("r", [1, 2, 3], computed, tokens)
    return consumer.take_pulls()


def test_what_is_not_computed_is_offered_and_asking_twice_changes_nothing(consumer, releaser):
    assert consumer.offered_tokens("r", params(), PROMPT, 0) == 40
    assert consumer.offered_tokens("r", params(), PROMPT, 16) == 24
    assert consumer.take_pulls() == ()
    assert releaser.released == []


def test_a_pull_is_ordered_once_with_the_computed_prefix_left_out(consumer):
    (order,) = pull(consumer, computed=16)
    assert (order.first_token, order.end_token) == (16, 40)
    assert order.local_block_ids == (1, 2, 3)
    assert consumer.take_pulls() == ()


def test_a_finished_pull_releases_the_lease_once(consumer, releaser):
    pull(consumer)
    consumer.received(["r"])
    consumer.received(["r"])
    consumer.finished("r", params(), PROMPT)
    assert releaser.released == ["remote-1"]


def test_a_preempted_or_failed_request_is_not_offered_again(consumer):
    pull(consumer)
    consumer.received(["r"])
    assert consumer.offered_tokens("r", params(), PROMPT, 0) == 0


def test_an_abort_before_the_pull_releases_at_once(consumer, releaser):
    consumer.offered_tokens("r", params(), PROMPT, 0)
    consumer.finished("r", params(), PROMPT)
    assert releaser.released == ["remote-1"]


def test_an_abort_of_a_request_never_scheduled_releases_at_once(consumer, releaser):
    consumer.finished("r", params(), PROMPT)
    assert releaser.released == ["remote-1"]


def test_an_abort_during_the_pull_releases_only_when_the_workers_are_done(consumer, releaser):
    pull(consumer)
    consumer.finished("r", params(), PROMPT)
    assert releaser.released == []
    consumer.received(["r"])
    assert releaser.released == ["remote-1"]


def test_blocks_that_a_read_may_still_write_are_pinned_and_the_lease_is_kept(
    consumer, releaser, pool
):
    pull(consumer)
    consumer.still_written({"r": 30.0})
    consumer.received(["r"])
    assert pool.pins == {1: 1, 2: 1, 3: 1}
    assert releaser.released == ["remote-1"]
    assert 29 < releaser.delays_s[0] <= 30


def test_a_pull_that_ends_well_pins_nothing_and_releases_without_delay(consumer, releaser, pool):
    pull(consumer)
    consumer.still_written({"somebody else": 30.0})
    consumer.received(["r"])
    assert not pool.pins
    assert releaser.delays_s[0] <= 0


def test_an_abort_during_a_repeated_read_keeps_blocks_and_lease(consumer, releaser, pool):
    pull(consumer)
    consumer.finished("r", params(), PROMPT)
    consumer.still_written({"r": 30.0})
    consumer.received(["r"])
    assert pool.pins == {1: 1, 2: 1, 3: 1}
    assert releaser.delays_s[0] > 29


def test_a_full_local_hit_releases_without_pulling(consumer, releaser):
    assert consumer.offered_tokens("r", params(), PROMPT, 40) == 0
    consumer.allocated("r", [1, 2, 3], 40, 0)
    assert consumer.take_pulls() == ()
    assert releaser.released == ["remote-1"]


@pytest.mark.parametrize("prompt", [[*PROMPT[:-1], 99], PROMPT[:-1]])
def test_another_prompt_is_computed_here_and_the_lease_given_back(consumer, releaser, prompt):
    assert consumer.offered_tokens("r", params(), prompt, 0) == 0
    assert consumer.offered_tokens("r", params(), prompt, 0) == 0
    consumer.finished("r", params(), prompt)
    assert releaser.released == ["remote-1"]


def test_a_damaged_handover_is_computed_here(consumer, releaser):
    assert consumer.offered_tokens("r", {"do_remote_prefill": True}, PROMPT, 0) == 0
    consumer.finished("r", {"do_remote_prefill": True}, PROMPT)
    assert releaser.released == []


def test_a_request_id_that_comes_again_is_a_new_request(consumer, releaser):
    pull(consumer)
    consumer.received(["r"])
    consumer.finished("r", params(), PROMPT)
    assert consumer.offered_tokens("r", params(request_id="remote-2"), PROMPT, 0) == 40


def test_a_lease_is_kept_from_the_arrival_on_and_only_once(consumer, releaser):
    consumer.arrived("r", params(), PROMPT)
    consumer.arrived("r", params(), PROMPT)
    assert releaser.kept == ["remote-1"]
    pull(consumer)
    assert releaser.kept == ["remote-1"]
    assert releaser.released == []


def test_a_request_that_was_not_announced_is_kept_when_it_is_first_asked_about(consumer, releaser):
    consumer.offered_tokens("r", params(), PROMPT, 0)
    assert releaser.kept == ["remote-1"]


def test_a_hand_over_of_another_prompt_is_given_back_on_arrival_and_not_kept(consumer, releaser):
    consumer.arrived("r", params(), PROMPT[:-1])
    assert (releaser.kept, releaser.released) == ([], ["remote-1"])


def test_an_abort_before_the_pull_cancels_nothing(consumer):
    consumer.arrived("r", params(), PROMPT)
    consumer.finished("r", params(), PROMPT)
    assert consumer.take_cancelled() == frozenset()


def test_an_abort_during_the_pull_is_told_to_the_workers_once(consumer, releaser):
    pull(consumer)
    assert consumer.take_cancelled() == frozenset()
    consumer.finished("r", params(), PROMPT)
    assert consumer.take_cancelled() == {"r"}
    consumer.finished("r", params(), PROMPT)
    assert consumer.take_cancelled() == frozenset()
    consumer.received(["r"])
    assert releaser.released == ["remote-1"]


def test_an_abort_before_the_workers_know_of_the_pull_gives_them_both(consumer):
    tokens = consumer.offered_tokens("r", params(), PROMPT, 0)
    consumer.allocated("r", [1, 2, 3], 0, tokens)
    consumer.finished("r", params(), PROMPT)
    assert [order.request_id for order in consumer.take_pulls()] == ["r"]
    assert consumer.take_cancelled() == {"r"}


def test_a_pull_that_ended_meanwhile_is_not_cancelled(consumer, releaser):
    pull(consumer)
    consumer.finished("r", params(), PROMPT)
    consumer.received(["r"])
    assert consumer.take_cancelled() == frozenset()
    assert releaser.released == ["remote-1"]


def test_an_abort_after_the_pull_cancels_nothing(consumer):
    pull(consumer)
    consumer.received(["r"])
    consumer.finished("r", params(), PROMPT)
    assert consumer.take_cancelled() == frozenset()
