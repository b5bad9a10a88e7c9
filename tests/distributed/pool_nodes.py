"""Processes that lend memory to a real Mooncake pool."""

from pool_equipment import Memory

from kvpp_connect.connectors.ascend_store.backends.base import PutOutcome
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
