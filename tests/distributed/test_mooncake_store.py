import contextlib
import os
import re
import signal
import socket
import threading

import pytest
from pool_equipment import Memory, content, mooncake_master, wait_until_stopped
from pool_nodes import HOST, engine_reader, lender, make_client

from kvpp_connect.connectors.ascend_store.backends.base import (
    GetOutcome,
    PutOutcome,
    StoreError,
)
from kvpp_connect.connectors.mooncake_engine import MooncakeEngine
from kvpp_connect.errors import ConfigError

pytestmark = pytest.mark.distributed

MIB = 1 << 20
READ, MISSING, FAILED = GetOutcome.READ, GetOutcome.MISSING, GetOutcome.FAILED


@pytest.fixture
def master():
    with mooncake_master() as server:
        yield server


@pytest.fixture
def connect():
    """Makes clients with 32 MiB of registered memory each."""
    made = []

    def make(server, segment=True, **extra):
        client, memory = make_client(server.address, segment=segment, **extra), Memory(32 * MIB)
        client.register(memory.whole)
        made.append((client, memory))
        return client, memory

    yield make
    for client, _ in made:
        client.close()


def numbered(count, size=MIB):
    return {f"o{n}": content(n, size) for n in range(count)}


def put(client, memory, objects):
    return client.put(list(objects), [memory.holding(c) for c in objects.values()])


def test_an_unreachable_master_is_one_clear_line_at_start():
    with socket.socket() as nobody:
        nobody.bind((HOST, 0))
        address = f"{HOST}:{nobody.getsockname()[1]}"
        with pytest.raises(ConfigError) as caught:
            make_client(address, segment=False)
    assert str(caught.value) == (
        f"no mooncake_master at {address} (Connection refused); start it, or correct "
        "master_server_address (environment: MOONCAKE_MASTER)"
    )


def test_a_port_that_is_no_master_s_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "1000")
    with socket.create_server((HOST, 0)) as silent:
        address = f"{HOST}:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"the master at {address} .*its RPC port"):
            make_client(address, segment=False)


def test_a_segment_that_there_is_no_memory_for_is_an_error(master):
    with pytest.raises(ConfigError, match=f"memory for {1 << 50} bytes .*global_segment_size"):
        make_client(master.address, segment=True, global_segment_size=1 << 50)


def test_a_master_that_hangs_is_given_up(master, connect, monkeypatch):
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "3000")
    client, memory = connect(master)
    target = memory.take(10)
    master.stop()
    try:
        for call in (
            lambda: client.exists(["a"]),
            lambda: client.put(["a"], [target]),
            lambda: client.get(["a"], [target]),
            lambda: client.get_ranges(["a"], [target], 0),
            lambda: client.remove_prefix("a"),
        ):
            with pytest.raises(StoreError, match=re.escape(f"at {master.address}") + ".*-901"):
                call()
    finally:
        master.cont()
    assert exists_when_it_answers(client, "a") == [False]


def exists_when_it_answers(client, key):
    while True:
        with contextlib.suppress(StoreError):
            return client.exists([key])


def test_a_full_pool_takes_what_fits_and_says_so_of_the_rest(master, connect):
    client, memory = connect(master, global_segment_size="16MB")
    objects = numbered(24)
    outcomes = put(client, memory, objects)
    assert set(outcomes) == {PutOutcome.STORED, PutOutcome.FULL}
    stored = [outcome is PutOutcome.STORED for outcome in outcomes]
    assert client.exists(list(objects)) == stored


def test_a_pool_without_memory_is_full(master, connect):
    client, memory = connect(master, segment=False)
    assert put(client, memory, numbered(2)) == [PutOutcome.FULL] * 2


@pytest.mark.parametrize(
    "extra",
    [
        {"replica_num": 2},
        {"preferred_segment": True},
        {"prefer_alloc_in_same_node": True},
        {"tenant_id": "blue"},
        {"local_buffer_size": 0},
    ],
)
def test_settings_of_placement_keep_the_bytes(master, connect, extra):
    client, memory = connect(master, **extra)
    objects = numbered(3, 5000)
    assert put(client, memory, objects) == [PutOutcome.STORED] * 3
    assert put(client, memory, objects) == [PutOutcome.STORED] * 3
    targets = [memory.take(5000) for _ in objects]
    assert client.get(list(objects), targets) == [READ] * 3
    assert [memory.read(t) for t in targets] == list(objects.values())


def test_objects_of_a_killed_lender_fail_and_then_are_missing(connect, spawn):
    with mooncake_master(client_ttl=15) as master:
        objects = numbered(4, 5000)
        other = spawn(lender, master.address, objects)
        assert other.get() == "stored"
        client, memory = connect(master, segment=False)
        targets = [memory.take(5000) for _ in objects]
        assert client.get(list(objects), targets) == [READ] * 4
        other.kill()
        keys, seen = list(objects), set()
        while MISSING not in seen:
            seen |= {*client.get(keys, targets), *client.get_ranges(keys, targets, 0)}
            assert READ not in seen
        assert seen <= {MISSING, FAILED}


def test_a_read_that_outlasts_its_lease_is_no_success(connect, spawn):
    with mooncake_master(default_kv_lease_ttl=2000) as master:
        objects = numbered(4)
        other = spawn(lender, master.address, objects)
        assert other.get() == "stored"
        client, memory = connect(master, segment=False)
        keys, targets = list(objects), [memory.take(MIB) for _ in objects]

        def ranged():
            return client.get_ranges(keys, targets, 0)

        for read in (lambda: client.get(keys, targets), ranged):
            assert read() == [READ] * 4
            os.kill(other.process.pid, signal.SIGSTOP)
            wait_until_stopped(other.process.pid)
            # Longer than the lease: its objects may be evicted and others take their place.
            go_on = threading.Timer(4, os.kill, (other.process.pid, signal.SIGCONT))
            go_on.start()
            assert read() == [FAILED] * 4
            go_on.join()


def test_store_and_transfer_engine_share_one_engine_which_outlives_the_store(master, spawn):
    engine, cache = MooncakeEngine(HOST, "tcp"), Memory(MIB)
    cache.write(cache.whole, content(1, MIB))
    engine.register(cache.whole.address, MIB)
    client, memory = make_client(master.address, segment=True, engine=engine), Memory(32 * MIB)
    client.register(memory.whole)
    objects = numbered(3)
    assert put(client, memory, objects) == [PutOutcome.STORED] * 3
    other = make_client(master.address, segment=False)
    targets = [memory.take(MIB) for _ in objects]
    other.register(memory.whole)
    assert other.get(list(objects), targets) == [READ] * 3
    assert [memory.read(t) for t in targets] == list(objects.values())
    other.close()
    client.close()
    reader = spawn(engine_reader, engine.session, cache.whole.address, MIB)
    assert reader.get() == content(1, MIB)


def test_an_engine_of_another_protocol_is_not_shared(master):
    engine = MooncakeEngine(HOST, "tcp")
    with pytest.raises(ConfigError, match=r"protocol is 'rdma', and the engine .* uses 'tcp'"):
        make_client(master.address, segment=False, engine=engine, protocol="rdma")
