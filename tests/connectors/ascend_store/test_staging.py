"""No two batches share staging, nor a batch and a read that was given up."""

import threading

import pytest
import torch
from clocks import Clock
from hypothesis import given
from hypothesis import strategies as st

from kvpp_connect.connectors.ascend_store.staging import (
    Staging,
    allocate,
    count_slots,
    row_array,
    row_buffers,
)
from kvpp_connect.errors import ConfigError


@pytest.fixture
def clock():
    return Clock()


def staging_of(size, slots, clock=None):
    return Staging(allocate(size, pinned=False), slots, clock or Clock())


def span(slot):
    begin = slot.memory.data_ptr()
    return begin, begin + slot.memory.numel()


@given(st.integers(2, 6), st.integers(1000, 9000))
def test_slots_are_aligned_and_lie_apart_inside_the_memory(slots, size):
    memory = allocate(size, pinned=False)
    staging = Staging(memory, slots, Clock())
    taken = sorted(span(staging.take(0)) for _ in range(slots))
    assert staging.take(0) is None
    edges = [memory.data_ptr(), *(end for _, end in taken)]
    for (begin, end), before in zip(taken, edges, strict=False):
        assert before <= begin
        assert begin % 64 == 0
        assert end <= memory.data_ptr() + size


@given(st.integers(65, 4096))
def test_rows_are_aligned_and_lie_apart_inside_their_slot(size):
    staging = staging_of(64 * 1024, 2)
    count = staging.rows_for([70, size])
    assert count == 32 * 1024 // (-(-max(size, 70) // 64) * 64)
    slot = staging.take(0)
    rows = slot.rows(count, size)
    begin, end = span(slot)
    buffers = row_buffers(rows)
    assert [buffer.size for buffer in buffers] == [size] * count
    for buffer, following in zip(buffers, [*(b.address for b in buffers[1:]), end], strict=True):
        assert begin <= buffer.address
        assert buffer.address % 64 == 0
        assert buffer.address + buffer.size <= following


def test_a_store_sees_the_bytes_of_the_rows():
    rows = staging_of(4096, 1).take(0).rows(3, 100)
    rows.copy_(torch.arange(300, dtype=torch.int32).to(torch.uint8).reshape(3, 100))
    array = row_array(rows)
    assert array.tolist() == rows.tolist()
    array[1, 5] = 77
    assert rows[1, 5] == 77
    assert [b.address for b in row_buffers(rows)] == [rows[i].data_ptr() for i in range(3)]


def test_objects_that_do_not_fit_are_refused_with_both_sizes():
    with pytest.raises(ConfigError, match=r"objects of 5000 bytes .* slot of 2048; raise .*bytes"):
        staging_of(4096, 2).rows_for([100, 5000])


def test_a_rank_without_shards_needs_no_rows():
    assert staging_of(4096, 2).rows_for([]) > 0


def test_a_slot_comes_back():
    staging = staging_of(4096, 1)
    slot = staging.take(0)
    assert staging.take(0) is None
    staging.give_back(slot)
    assert staging.take(0) is slot


def test_whoever_waits_gets_the_slot_that_is_given_back():
    staging = staging_of(4096, 1)
    slot, got = staging.take(0), []
    thread = threading.Thread(target=lambda: got.append(staging.take(60)))
    thread.start()
    staging.give_back(slot)
    thread.join(timeout=30)
    assert got == [slot]


def test_a_slot_that_may_still_be_written_is_kept_away_until_its_time_is_over(clock):
    staging = staging_of(8192, 2, clock)
    written, clean = staging.take(0), staging.take(0)
    staging.give_back(written, 30)
    staging.give_back(clean)
    assert staging.take(0) is clean
    assert staging.take(0) is None
    clock.advance(29.9)
    assert staging.take(0) is None
    clock.advance(0.1)
    assert staging.take(0) is written


def test_a_slot_is_kept_away_once(clock):
    staging = staging_of(4096, 1, clock)
    staging.give_back(staging.take(0), 30)
    clock.advance(30)
    staging.give_back(staging.take(0))
    assert staging.take(0) is not None


class ImpatientClock(Clock):
    """Goes on each time somebody looks."""

    def __call__(self):
        self.advance(0.01)
        return self.now


def test_waiting_for_a_slot_ends_in_time():
    staging = staging_of(4096, 1, ImpatientClock())
    staging.take(0)
    assert staging.take(0.025) is None


MIB = 1 << 20


@pytest.mark.parametrize(
    ("objects", "slots"), [([1000], 8), ([8 * MIB], 8), ([9 * MIB], 7), ([40 * MIB], 2), ([], 8)]
)
def test_memory_is_cut_into_batches_of_8_mib_or_one_object_and_always_in_two(objects, slots):
    assert count_slots(64 * MIB, objects) == slots


def test_an_object_that_just_fits_a_slot_fits_with_its_padding():
    size = 9 * MIB + 1
    staging = staging_of(64 * MIB, count_slots(64 * MIB, [size]))
    assert staging.rows_for([size]) == 1


def test_the_slot_that_came_back_last_is_taken_next():
    staging = staging_of(64 * 1024, 4)
    first, second = staging.take(0), staging.take(0)
    staging.give_back(second)
    staging.give_back(first)
    assert staging.take(0) is first
