"""A job holds its blocks until every rank has copied them, and ends when every rank is through."""

import pytest

pytest.importorskip("vllm")

from pool_scheduling import RecordingPins

from kvpp_connect.connectors.ascend_store.holds import EndedPut, PutLedger
from kvpp_connect.connectors.ascend_store.orders import PutReport, block_list

A, B, C = (bytes([i]) * 32 for i in range(3))


@pytest.fixture
def pins():
    return RecordingPins(held=range(1, 10))


@pytest.fixture
def ledger(pins):
    """The books of an engine of two ranks."""
    ledger = PutLedger(2)
    ledger.bind(pins)
    return ledger


def copied(ranks=1):
    return PutReport(copied=ranks)


def ended(*failed, ranks=1):
    return PutReport(ended=ranks, failed=set(failed))


def test_an_order_pins_its_blocks(ledger, pins):
    order = ledger.open(block_list([A, B], [3, 4]))
    assert (order.job, order.blocks.block_ids) == (0, (3, 4))
    assert pins.pinned == {3: 1, 4: 1}
    assert (len(ledger), ledger.pinned_blocks) == (1, 2)


def test_each_order_has_a_number_of_its_own(ledger):
    numbers = [ledger.open(block_list([A], [1])).job for _ in range(3)]
    ledger.drop(numbers[2])
    assert [*numbers, ledger.open(block_list([A], [1])).job] == [0, 1, 2, 3]


def test_blocks_are_released_when_the_last_rank_has_copied_and_not_before(ledger, pins):
    job = ledger.open(block_list([A], [5])).job
    assert ledger.take_in({job: copied()}) == []
    assert pins.pinned == {5: 1}
    assert ledger.take_in({job: copied()}) == []
    assert pins.pinned == {}
    assert (len(ledger), ledger.pinned_blocks) == (1, 0)


def test_reports_of_several_ranks_may_come_as_one(ledger, pins):
    job = ledger.open(block_list([A], [5])).job
    both = copied()
    both.add(copied())
    both.add(ended(ranks=2))
    assert ledger.take_in({job: both}) == [EndedPut(job=job, stored=(A,), failed=())]
    assert pins.pinned == {}
    assert pins.unpinned == 1


def test_a_rank_that_is_through_does_not_release_what_another_still_copies(ledger, pins):
    job = ledger.open(block_list([A], [5])).job
    ledger.take_in({job: PutReport(copied=1, ended=1)})
    assert pins.pinned == {5: 1}
    ledger.take_in({job: PutReport(copied=1, ended=1)})
    assert pins.pinned == {}
    assert pins.unpinned == 1


def test_a_block_is_stored_only_if_no_rank_failed(ledger):
    job = ledger.open(block_list([A, B, C], [1, 2, 3])).job
    assert ledger.take_in({job: PutReport(copied=1, ended=1, failed={0})}) == []
    done = ledger.take_in({job: PutReport(copied=1, ended=1, failed={2})})
    assert done == [EndedPut(job=job, stored=(B,), failed=(A, C))]
    assert len(ledger) == 0


def test_blocks_of_two_jobs_are_pinned_twice(ledger, pins):
    first, second = (ledger.open(block_list([A], [5])).job for _ in range(2))
    ledger.take_in({first: PutReport(copied=2, ended=2)})
    assert pins.pinned == {5: 1}
    assert ledger.pinned_blocks == 1
    ledger.take_in({second: PutReport(copied=2, ended=2)})
    assert pins.pinned == {}


def test_a_dropped_job_gives_its_blocks_back(ledger, pins):
    job = ledger.open(block_list([A, B], [5, 6])).job
    ledger.drop(job)
    assert pins.pinned == {}
    assert (len(ledger), ledger.pinned_blocks) == (0, 0)
