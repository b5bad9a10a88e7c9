"""One Mooncake engine for a P/D connector and a pool's store in one process, over TCP."""

import gc

import pytest
from pool_equipment import Memory, StoreNode, mooncake_master

from kvpp_connect.connectors.ascend_store.backends.base import GetOutcome, PutOutcome
from kvpp_connect.connectors.ascend_store.backends.create import create_store, engine_to_share
from kvpp_connect.connectors.ascend_store.backends.settings import parse_store_settings
from kvpp_connect.connectors.mooncake_engine import MooncakeEngine, find_engine, share_engine

pytestmark = pytest.mark.distributed

HOST = "127.0.0.1"
SIZE = 5000


@pytest.fixture(scope="module")
def master():
    with mooncake_master() as server, StoreNode(server, 64 << 20):
        yield server


@pytest.fixture
def peer():
    """An engine of another node, and memory of its own."""
    engine, memory = MooncakeEngine(HOST, "tcp"), Memory(1 << 20)
    engine.register(memory.whole.address, memory.whole.size)
    return engine, memory


def settings(master, **extra):
    given = {"master_server_address": master.address, "global_segment_size": 0, **extra}
    return parse_store_settings("mooncake", given, {})


def open_store(wanted):
    engine = engine_to_share(wanted, HOST)
    return create_store(wanted, host=HOST, segment=True, engine=engine)


def assert_read(peer, engine, source, content):
    other, memory = peer
    target = memory.take(SIZE)
    other.read(engine.session, [target.address], [source.address], [SIZE])
    assert memory.read(target) == content


def assert_store_works(store, memory, key):
    source, target = memory.holding(key.encode() * 100), memory.take(len(key) * 100)
    assert store.put([key], [source]) == [PutOutcome.STORED]
    assert store.get([key], [target]) == [GetOutcome.READ]
    assert memory.read(target) == memory.read(source)


@pytest.mark.parametrize("segment", [0, 16 << 20])
def test_a_store_that_closes_leaves_the_engine_to_the_others(master, peer, segment):
    engine = share_engine(HOST, "tcp")
    caches = Memory(1 << 20)
    engine.register(caches.whole.address, caches.whole.size)
    source = caches.holding(b"x" * SIZE)
    for number in range(2):
        store, staging = open_store(settings(master, global_segment_size=segment)), Memory(1 << 20)
        store.register(staging.whole)
        assert_store_works(store, staging, f"first-{segment}-{number}")
        assert_read(peer, engine, source, b"x" * SIZE)
        store.close()
        del store
        gc.collect()
        assert_read(peer, engine, source, b"x" * SIZE)
        engine.read(peer[0].session, [source.address], [peer[1].whole.address], [SIZE])
        caches.write(source, b"x" * SIZE)


def test_a_store_outlives_whoever_started_its_engine(master):
    engine = share_engine(HOST, "tcp")
    store, staging = open_store(settings(master)), Memory(1 << 20)
    store.register(staging.whole)
    del engine
    gc.collect()
    assert_store_works(store, staging, "second")
    store.close()


def test_memory_is_registered_once_with_a_shared_engine(master):
    engine, memory = share_engine(HOST, "tcp"), Memory(1 << 20)
    store = open_store(settings(master))
    store.register(memory.whole)
    with pytest.raises(Exception, match="refuses to register"):
        engine.register(memory.whole.address, memory.whole.size)
    store.close()


def test_one_engine_per_host_and_protocol_as_long_as_it_is_used(master):
    assert find_engine(HOST) is None
    assert engine_to_share(settings(master), HOST) is None
    engine = share_engine(HOST, "tcp")
    assert share_engine(HOST, "tcp") is engine
    assert find_engine(HOST) is find_engine(HOST, "tcp") is engine
    assert find_engine(HOST, "rdma") is find_engine("10.0.0.1") is None
    for extra in ({"protocol": "rdma"}, {"device_name": "mlx5_0"}, {"local_hostname": "10.0.0.1"}):
        assert engine_to_share(settings(master, **extra), HOST) is None
    del engine
    gc.collect()
    assert find_engine(HOST) is None
