from contextlib import ExitStack

import pytest
from fake_store import FakePool, FakeStore
from pool_equipment import mooncake_master

from kvpp_connect.connectors.ascend_store.backends.create import create_store
from kvpp_connect.connectors.ascend_store.backends.settings import parse_store_settings


class FakePoolServer:
    """A FakePool that dies and comes back like a server."""

    forgets = True

    def __init__(self):
        self._pool = FakePool()

    def client(self, segment=True):
        return FakeStore(self._pool)

    def kill(self):
        self._pool.down = True

    def restart(self):
        self._pool.objects.clear()
        self._pool.down = False


class MooncakePoolServer:
    """A mooncake_master and its clients."""

    def __init__(self, stack):
        self.master = stack.enter_context(mooncake_master(default_kv_lease_ttl=30_000))

    def client(self, segment=True):
        settings = parse_store_settings(
            "mooncake",
            {"master_server_address": self.master.address, "global_segment_size": "64MB"},
            {},
        )
        return create_store(settings, host="127.0.0.1", segment=segment)

    def kill(self):
        self.master.kill()

    def restart(self):
        self.master.restart()


BACKENDS = [
    "fake",
    pytest.param("mooncake", marks=pytest.mark.distributed),
]


def start_pool(name, stack):
    if name == "fake":
        return FakePoolServer()
    return MooncakePoolServer(stack)


@pytest.fixture(scope="module", params=BACKENDS)
def pool(request):
    """A pool that the module's tests share: they use keys of their own."""
    with ExitStack() as stack:
        yield start_pool(request.param, stack)


@pytest.fixture(params=BACKENDS)
def own_pool(request):
    """A pool for one test, which may hurt it."""
    with ExitStack() as stack:
        yield start_pool(request.param, stack)
