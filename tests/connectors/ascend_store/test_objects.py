"""A seal tells an object apart from everything else that may lie under its key."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpp_connect.connectors.ascend_store.objects import (
    HEADER_BYTES,
    PartialFolds,
    is_intact,
    object_bytes,
    seal,
)

SIZES = [1, 8, 511, 512, 513, 4096, 5000]


def sealed(payload_bytes, count=2, seed=0):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (count, object_bytes(payload_bytes)), np.uint8)
    keys = [f"key{i}" for i in range(count)]
    seal(rows, keys)
    return rows, keys


@pytest.mark.parametrize("size", SIZES)
def test_a_sealed_object_is_intact_under_its_key_only(size):
    rows, keys = sealed(size)
    assert [is_intact(row, key) for row, key in zip(rows, keys, strict=True)] == [True, True]
    assert not is_intact(rows[0], keys[1])


@given(st.sampled_from(SIZES), st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_anywhere_breaks_the_seal(size, where, flip):
    rows, keys = sealed(size, count=1)
    where %= rows.shape[1]
    if 48 <= where < HEADER_BYTES:
        return  # means nothing
    rows[0, where] ^= flip
    assert not is_intact(rows[0], keys[0])


@pytest.mark.parametrize("size", SIZES)
def test_an_object_of_which_a_part_was_not_written_is_not_intact(size):
    rows, keys = sealed(size, count=1)
    rows[0, HEADER_BYTES + size // 2 :] ^= 0x5A
    assert not is_intact(rows[0], keys[0])


def test_an_object_without_bytes_of_its_own_is_not_intact():
    assert not is_intact(np.zeros(object_bytes(512), np.uint8), "key")


def test_a_truncated_object_is_not_intact():
    rows, keys = sealed(1024, count=1)
    assert not is_intact(np.ascontiguousarray(rows[0, :-512]), keys[0])


@given(
    st.sampled_from([8, 504, 512, 520, 4096, 5000]),
    st.lists(st.integers(0, 630), max_size=6),
    st.randoms(),
)
def test_an_object_read_in_parts_is_checked_like_one_read_at_once(size, cuts, rng):
    rows, keys = sealed(size, count=3)
    edges = sorted({0, size, *(8 * cut for cut in cuts if 8 * cut < size)})
    parts = list(itertools.pairwise(edges))
    rng.shuffle(parts)

    def read(damaged=None):
        folds = PartialFolds(3, size)
        for begin, end in parts:
            # The first part brings the header.
            a, b = (0 if begin == 0 else begin + HEADER_BYTES), end + HEADER_BYTES
            part = rows[:, a:b].copy()
            if damaged is not None and a <= damaged < b:
                part[1, damaged - a] ^= 1
            folds.add(0, part[:1], a)
            folds.add(1, part[1:], a)
        return [folds.is_intact(i, key) for i, key in enumerate(keys)]

    assert read() == [True] * 3
    assert read(damaged=HEADER_BYTES + rng.randrange(size)) == [True, False, True]
