"""Processes that lend memory to a real Mooncake pool."""

from pool_equipment import Memory

from kvpp_connect.connectors.ascend_store.backends.base import GetOutcome, PutOutcome
from kvpp_connect.connectors.ascend_store.backends.create import create_store
from kvpp_connect.connectors.ascend_store.backends.settings import parse_store_settings
from kvpp_connect.connectors.mooncake_engine import MooncakeEngine

HOST = "127.0.0.1"


def make_client(address, *, segment, engine=None, **extra):
    extra = {"master_server_address": address, "global_segment_size": "64MB", **extra}
    settings = parse_store_settings("mooncake", extra, {})
    return create_store(settings, host=HOST, segment=segment, engine=engine)


def lender(pipe, address, objects):
    """Lends memory, stores objects in it, and waits for the end."""
    client = make_client(address, segment=True, preferred_segment=True)
    memory = Memory(sum(map(len, objects.values())))
    client.register(memory.whole)
    outcomes = client.put(list(objects), [memory.holding(c) for c in objects.values()])
    assert outcomes == [PutOutcome.STORED] * len(objects)
    pipe.send("stored")
    pipe.recv()


def engine_reader(pipe, session, address, size):
    """Reads a range of another process through an engine of its own."""
    engine = MooncakeEngine(HOST, "tcp")
    memory = Memory(size)
    engine.register(memory.whole.address, size)
    engine.read(session, [memory.whole.address], [address], [size])
    pipe.send(memory.read(memory.whole))


def yuanrong_beside_mooncake(pipe, address, yuanrong_first):
    """Uses both in one process."""

    def use_yuanrong():
        settings = parse_store_settings("yuanrong", {"worker_addr": address}, {})
        client = create_store(settings, host=HOST, segment=False)
        memory = Memory(100)
        client.register(memory.whole)
        key = f"beside:{yuanrong_first}"
        assert client.put([key], [memory.holding(b"bytes")]) == [PutOutcome.STORED]
        target = memory.take(5)
        assert client.get([key], [target]) == [GetOutcome.READ]
        assert memory.read(target) == b"bytes"

    def use_mooncake():
        reader, memory = MooncakeEngine(HOST, "tcp"), Memory(100)
        source, target = memory.holding(b"bytes"), memory.take(5)
        reader.register(memory.whole.address, 100)
        reader.read(reader.session, [target.address], [source.address], [5])
        assert memory.read(target) == b"bytes"

    for use in [use_yuanrong, use_mooncake] if yuanrong_first else [use_mooncake, use_yuanrong]:
        use()
    use_mooncake()
    pipe.send("used")
