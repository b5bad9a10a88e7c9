import contextlib
import importlib.util

import pytest
from pool_equipment import Memory, YuanrongWorker, content
from pool_nodes import yuanrong_beside_mooncake

from kvpp_connect.connectors.ascend_store.backends.base import (
    GetOutcome,
    PutOutcome,
    StoreError,
)
from kvpp_connect.connectors.ascend_store.backends.create import create_store
from kvpp_connect.connectors.ascend_store.backends.settings import parse_store_settings

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        importlib.util.find_spec("yr") is None, reason="openyuanrong-datasystem is not installed"
    ),
]

MIB = 1 << 20
STORED, PRESENT = PutOutcome.STORED, PutOutcome.PRESENT


@pytest.fixture(scope="module")
def worker():
    with YuanrongWorker(memory_mb=256) as server:
        yield server


@pytest.fixture
def client(worker, request):
    limit_ms = getattr(request, "param", 30_000)
    extra = {"worker_addr": worker.address, "request_timeout_ms": limit_ms}
    made = create_store(
        parse_store_settings("yuanrong", extra, {}), host="127.0.0.1", segment=False
    )
    yield made
    made.close()


@pytest.fixture
def memory(client):
    made = Memory(128 * MIB)
    client.register(made.whole)
    return made


def test_an_object_that_is_there_is_not_written_again(client, memory):
    first, second = memory.holding(b"first"), memory.holding(b"other")
    assert client.put(["p:a", "p:b"], [first] * 2) == [STORED] * 2
    assert client.put(["p:a", "p:c", "p:b"], [second] * 3) == [PRESENT, STORED, PRESENT]
    targets = [memory.take(5) for _ in range(3)]
    assert client.get(["p:a", "p:b", "p:c"], targets) == [GetOutcome.READ] * 3
    assert [memory.read(t) for t in targets] == [b"first", b"first", b"other"]


def test_a_key_twice_in_one_batch_is_written_once(client, memory):
    sources = [memory.holding(b"first"), memory.holding(b"other")]
    assert client.put(["t:a", "t:a"], sources) == [STORED, STORED]
    target = memory.take(5)
    assert client.get(["t:a"], [target]) == [GetOutcome.READ]
    assert memory.read(target) == b"first"


def test_more_keys_pass_than_the_client_takes_at_a_time(client, memory):
    names = [f"m:{n}" for n in range(4500)]
    sources = [memory.holding(n.to_bytes(4, "big")) for n in range(4500)]
    assert set(client.put(names, sources)) == {STORED}
    assert client.exists([*names, "m:none"]) == [True] * 4500 + [False]
    targets = [memory.take(4) for _ in names]
    assert set(client.get(names, targets)) == {GetOutcome.READ}
    assert [memory.read(t) for t in targets] == [memory.read(s) for s in sources]


def test_the_oldest_objects_make_room_for_new_ones(client, memory):
    block = memory.holding(content(1, MIB))
    names = [f"e:{n}" for n in range(400)]
    for start in range(0, 400, 20):
        assert set(client.put(names[start : start + 20], [block] * 20)) == {STORED}
    there = client.exists(names)
    assert not there[0]
    assert there[-1]


@pytest.mark.parametrize("client", [2000], indirect=True)  # it may seek room until the limit
def test_an_object_larger_than_the_pool_is_not_stored(client):
    memory = Memory(300 * MIB)
    client.register(memory.whole)
    with contextlib.suppress(StoreError):
        assert client.put(["l:a"], [memory.whole]) == [PutOutcome.FULL]
    assert exists_when_it_answers(client, "l:a") == [False]


@pytest.mark.parametrize("yuanrong_first", [True, False])
def test_mooncake_works_in_the_same_process(worker, spawn, yuanrong_first):
    assert spawn(yuanrong_beside_mooncake, worker.address, yuanrong_first).get() == "used"


@pytest.mark.parametrize("client", [2000], indirect=True)
def test_a_worker_that_hangs_is_given_up_and_left_alone_for_a_while(worker, client, memory):
    target = memory.holding(b"bytes")
    assert client.put(["h:a"], [target]) == [STORED]
    worker.stop()
    try:
        with pytest.raises(StoreError, match=f"no answer from the .* at {worker.address}"):
            client.exists(["h:a"])
    finally:
        worker.cont()
    for call in (
        lambda: client.exists(["h:a"]),
        lambda: client.put(["h:b"], [target]),
        lambda: client.get(["h:a"], [target]),
    ):
        with pytest.raises(StoreError, match="did not answer just now"):
            call()
    assert exists_when_it_answers(client, "h:a") == [True]


def exists_when_it_answers(client, key):
    """After an error no call is tried for some seconds."""
    while True:
        with contextlib.suppress(StoreError):
            return client.exists([key])
