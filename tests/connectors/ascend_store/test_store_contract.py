"""What every store must do, shown on the fake and on every store that runs here."""

import itertools
import threading

import pytest
from pool_equipment import Memory, content

from kvpp_connect.connectors.ascend_store.backends.base import (
    MAX_KEY_LENGTH,
    GetOutcome,
    PutOutcome,
    StoreError,
)

READ, MISSING, SHORT = GetOutcome.READ, GetOutcome.MISSING, GetOutcome.SHORT
DONE = {PutOutcome.STORED, PutOutcome.PRESENT}
PATIENCE_S = 90


@pytest.fixture(scope="module")
def store(pool):
    """A client that lends memory to the pool."""
    client = pool.client()
    yield client
    client.close()


@pytest.fixture(scope="module")
def reader(pool):
    """A client of the same pool that lends none."""
    client = pool.client(segment=False)
    yield client
    client.close()


@pytest.fixture(scope="module")
def _kept_memory():
    """Stores may keep registered memory: it lives as long as they do."""
    return []


@pytest.fixture
def memory(store, reader, _kept_memory):
    made = Memory(24 << 20)
    _kept_memory.append(made)
    store.register(made.whole)
    reader.register(made.whole)
    return made


_tests = itertools.count()


@pytest.fixture
def key():
    """Makes keys that no other test has."""
    number = next(_tests)
    return lambda name: f"t{number}:{name}"


def put_all(store, memory, objects):
    outcomes = store.put(list(objects), [memory.holding(c) for c in objects.values()])
    assert set(outcomes) <= DONE
    return outcomes


def get_all(store, memory, keys, sizes):
    targets = [memory.take(size) for size in sizes]
    return store.get(keys, targets), [memory.read(target) for target in targets]


def test_what_is_put_is_there_and_reads_the_same(store, reader, memory, key):
    objects = {key("a"): content(1), key("b"): content(2, 1), key("c"): content(3, 100_000)}
    assert reader.exists(list(objects)) == [False] * 3
    put_all(store, memory, objects)
    for client in (store, reader):
        assert client.exists(list(objects)) == [True] * 3
        got = get_all(client, memory, list(objects), map(len, objects.values()))
        assert got == ([READ] * 3, list(objects.values()))


def test_a_client_without_memory_of_its_own_stores_too(store, reader, memory, key):
    put_all(reader, memory, {key("a"): content(1)})
    assert get_all(store, memory, [key("a")], [5000]) == ([READ], [content(1)])


def test_the_source_may_change_once_put_returns(store, memory, key):
    source = memory.holding(content(1))
    store.put([key("a")], [source])
    memory.write(source, content(2))
    assert get_all(store, memory, [key("a")], [5000]) == ([READ], [content(1)])


def test_nothing_is_asked_and_nothing_answered(store):
    assert store.exists([]) == []
    assert store.put([], []) == []
    assert store.get([], []) == []


def test_keys_of_the_whole_alphabet_and_greatest_length_are_taken(store, memory, key):
    long_key = key("aZ09-_:@#").ljust(MAX_KEY_LENGTH, "x")
    put_all(store, memory, {long_key: content(1)})
    assert store.exists([long_key, long_key[:-1]]) == [True, False]


def test_a_second_put_of_the_same_bytes_counts_as_stored(store, reader, memory, key):
    for client in (store, reader):
        put_all(client, memory, {key("a"): content(1)})
    assert get_all(reader, memory, [key("a")], [5000]) == ([READ], [content(1)])


def test_a_second_put_of_other_bytes_never_mixes_them(store, memory, key):
    put_all(store, memory, {key("a"): content(1)})
    store.put([key("a")], [memory.holding(content(2))])
    (outcome,), (found,) = get_all(store, memory, [key("a")], [5000])
    assert outcome is READ
    assert found in (content(1), content(2))


def test_present_objects_do_not_keep_others_of_the_batch_out(store, memory, key):
    put_all(store, memory, {key("a"): content(1)})
    put_all(store, memory, {key("a"): content(1), key("b"): content(2)})
    got = get_all(store, memory, [key("a"), key("b")], [5000] * 2)
    assert got == ([READ] * 2, [content(1), content(2)])


def test_missing_objects_are_told_apart_within_a_batch(store, reader, memory, key):
    put_all(store, memory, {key("b"): content(2)})
    keys = [key("a"), key("b"), key("c")]
    assert reader.exists(keys) == [False, True, False]
    outcomes, found = get_all(reader, memory, keys, [5000] * 3)
    assert outcomes == [MISSING, READ, MISSING]
    assert found[1] == content(2)


def test_a_batch_of_missing_objects_is_no_error(reader, memory, key):
    assert get_all(reader, memory, [key("a"), key("b")], [10, 10])[0] == [MISSING] * 2


@pytest.mark.parametrize("stored", [4999, 5001])
def test_an_object_of_another_size_is_short_and_the_others_are_read(
    store, reader, memory, key, stored
):
    put_all(store, memory, {key("a"): content(1, stored), key("b"): content(2)})
    outcomes, found = get_all(reader, memory, [key("a"), key("b")], [5000] * 2)
    assert outcomes == [SHORT, READ]
    assert found[1] == content(2)


def test_parts_of_objects_are_read(store, reader, memory, key):
    if not reader.supports_ranges:
        pytest.skip("this store reads whole objects only")
    objects = {key(n): content(n) for n in range(3)}
    put_all(store, memory, objects)
    targets = [memory.take(1200) for _ in range(4)]
    outcomes = reader.get_ranges([*objects, key("none")], targets, 2000)
    assert outcomes == [READ] * 3 + [MISSING]
    expected = [c[2000:3200] for c in objects.values()]
    assert [memory.read(t) for t in targets[:3]] == expected
    assert reader.get_ranges([key(0)], [memory.take(1200)], 4000) == [SHORT]
    assert reader.get_ranges([key("none")], [memory.take(5)], 0) == [MISSING]


def test_big_batches_pass(store, reader, memory, key):
    objects = {key(n): content(n, 2048 + n % 7) for n in range(2000)}
    put_all(store, memory, objects)
    assert reader.exists(list(objects)) == [True] * 2000
    got = get_all(reader, memory, list(objects), map(len, objects.values()))
    assert got == ([READ] * 2000, list(objects.values()))


def test_one_client_serves_several_threads(store, memory, key):
    problems = []
    batches = [
        ({key(f"{t}-{b}-{n}"): content(f"{t}{b}{n}", 3000) for n in range(20)})
        for t in range(4)
        for b in range(10)
    ]
    sources = [[memory.holding(c) for c in batch.values()] for batch in batches]
    targets = [[memory.take(3000) for _ in batch] for batch in batches]

    def work(thread):
        try:
            for index in range(thread * 10, thread * 10 + 10):
                keys = list(batches[index])
                assert set(store.put(keys, sources[index])) <= DONE
                assert store.exists(keys) == [True] * 20
                assert store.get(keys, targets[index]) == [READ] * 20
                if store.supports_ranges:
                    assert store.get_ranges(keys, targets[index], 0) == [READ] * 20
                assert [memory.read(t) for t in targets[index]] == list(batches[index].values())
        except BaseException as error:  # noqa: BLE001 - told to the test's own thread
            problems.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert problems == []


def test_threads_that_race_for_a_key_leave_one_writer_s_bytes(store, memory, key):
    names = [key(n) for n in range(20)]
    writers = [[memory.holding(content(w, 3000)) for _ in names] for w in range(4)]
    threads = [threading.Thread(target=store.put, args=(names, sources)) for sources in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    outcomes, found = get_all(store, memory, names, [3000] * 20)
    assert outcomes == [READ] * 20
    assert set(found) <= {content(w, 3000) for w in range(4)}


def test_objects_are_removed_by_their_first_characters(pool, store, reader, memory, key):
    keys = [key("x-a"), key("x-b#1"), key("xxa"), "y" + key("x-a")]
    put_all(store, memory, {k: content(k) for k in keys})
    removed = reader.remove_prefix(key("x-"))
    if not pool.lists_keys:
        assert removed == 0
        assert store.exists(keys) == [True] * 4
        return
    assert removed == 2
    assert store.exists(keys) == [False, False, True, True]
    assert reader.remove_prefix(key("x-")) == 0


def test_objects_that_were_just_read_are_removed_too(pool, store, reader, memory, key):
    if not pool.lists_keys:
        pytest.skip("this store cannot list its keys")
    put_all(store, memory, {key("a"): content(1)})
    get_all(reader, memory, [key("a")], [5000])
    assert reader.remove_prefix(key("a")) == 1
    assert store.exists([key("a")]) == [False]


def test_memory_that_was_not_registered_is_refused(store, key):
    strange = Memory(100)
    with pytest.raises(AssertionError, match="regist"):
        store.put([key("a")], [strange.take(10)])
    with pytest.raises(AssertionError, match="regist"):
        store.get([key("a")], [strange.take(10)])


def test_a_closed_client_says_so_and_closes_twice(pool):
    client = pool.client(segment=False)
    memory = Memory(100)
    client.register(memory.whole)
    client.close()
    client.close()
    for call in (
        lambda: client.exists(["a"]),
        lambda: client.put(["a"], [memory.take(10)]),
        lambda: client.get(["a"], [memory.take(10)]),
        lambda: client.remove_prefix("a"),
    ):
        with pytest.raises(StoreError, match="closed"):
            call()
