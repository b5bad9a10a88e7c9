"""What every store does when its server dies, and when it comes back."""

import contextlib
import time

import pytest
from pool_equipment import Memory, content

from kvpp_connect.connectors.ascend_store.backends.base import (
    GetOutcome,
    PutOutcome,
    StoreError,
)

READ, MISSING = GetOutcome.READ, GetOutcome.MISSING
DONE = {PutOutcome.STORED, PutOutcome.PRESENT}
PATIENCE_S = 90


def test_calls_after_the_server_died_end_in_errors(own_pool):
    client = own_pool.client()
    memory = Memory(1 << 20)
    client.register(memory.whole)
    assert client.put(["a"], [memory.holding(content(1))]) == [PutOutcome.STORED]
    own_pool.kill()
    try:
        with pytest.raises(StoreError):
            client.exists(["a", "b"])
        with pytest.raises(StoreError):
            client.put(["b", "c"], [memory.take(10), memory.take(10)])
        with contextlib.suppress(StoreError):
            assert client.remove_prefix("a") == 0
        assert outcomes_after_death(client.get, ["a"] * 3, memory) <= {GetOutcome.FAILED}
        if client.supports_ranges:
            ranged = lambda keys, targets: client.get_ranges(keys, targets, 0)  # noqa: E731
            assert outcomes_after_death(ranged, ["a"] * 3, memory) <= {GetOutcome.FAILED}
    finally:
        client.close()


def outcomes_after_death(get, keys, memory):
    """What a get says of a dead server: nothing (StoreError), or that it failed."""
    try:
        return set(get(keys, [memory.take(5000) for _ in keys]))
    except StoreError:
        return set()


def test_a_client_goes_on_when_its_server_is_back(own_pool):
    client = own_pool.client()
    memory = Memory(1 << 20)
    client.register(memory.whole)
    assert client.put(["a"], [memory.holding(content(1))]) == [PutOutcome.STORED]
    own_pool.kill()
    with pytest.raises(StoreError):
        client.exists(["a"])
    own_pool.restart()
    source, target = memory.holding(content(2)), memory.take(5000)
    limit = time.monotonic() + PATIENCE_S
    try:
        while not works_again(client, source, target):
            assert time.monotonic() < limit, "the client does not find its server again"
        assert memory.read(target) == content(2)
        assert client.get(["a"], [target])[0] in (READ, MISSING)
        assert memory.read(target) in (content(1), content(2))
    finally:
        client.close()


def works_again(client, source, target):
    try:
        stored = client.put(["b"], [source])[0] in DONE
        return stored and client.get(["b"], [target]) == [READ]
    except StoreError:
        return False
