import ctypes
import importlib.util
import tempfile
from contextlib import ExitStack

import pytest
from fake_store import FakePool, FakeStore
from pool_equipment import YuanrongWorker, memcache_meta_service, mooncake_master

from kvpp_connect.connectors.ascend_store.backends.create import create_store
from kvpp_connect.connectors.ascend_store.backends.settings import parse_store_settings


class FakePoolServer:
    """A FakePool that dies and comes back like a server."""

    lists_keys = True

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

    lists_keys = True

    def __init__(self, stack):
        self.master = stack.enter_context(mooncake_master(default_kv_lease_ttl=30_000))
        self.kill = self.master.kill
        self.restart = self.master.restart

    def client(self, segment=True):
        settings = parse_store_settings(
            "mooncake",
            {"master_server_address": self.master.address, "global_segment_size": "64MB"},
            {},
        )
        return create_store(settings, host="127.0.0.1", segment=segment)


class YuanrongPoolServer:
    """A datasystem worker and its clients."""

    lists_keys = False

    def __init__(self, stack):
        if importlib.util.find_spec("yr") is None:
            pytest.skip("openyuanrong-datasystem is not installed")
        self._worker = stack.enter_context(YuanrongWorker())
        self.kill = self._worker.kill
        self.restart = self._worker.restart

    def client(self, segment=True):
        settings = parse_store_settings("yuanrong", {"worker_addr": self._worker.address}, {})
        return create_store(settings, host="127.0.0.1", segment=segment)


class MemcachePoolServer:
    """A MetaService and its clients, whose objects survive it."""

    lists_keys = False

    def __init__(self, stack):
        if importlib.util.find_spec("memcache_hybrid") is None:
            pytest.skip("memcache-hybrid is not installed")
        try:
            ctypes.CDLL("libascend_hal.so")
        except OSError:
            pytest.skip("memcache's client needs the driver of an Ascend accelerator")
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        self._service = stack.enter_context(memcache_meta_service(folder))
        self.kill = self._service.kill
        self.restart = self._service.restart

    def client(self, segment=True):
        extra = {
            "meta_service_url": f"tcp://{self._service.address}",
            "config_store_url": f"tcp://{self._service.config_store}",
            "protocol": "host_shm",
            "dram_size": "64MB",
            "world_size": 16,
        }
        settings = parse_store_settings("memcache", extra, {})
        return create_store(settings, host="127.0.0.1", segment=segment)


SERVERS = {
    "fake": lambda stack: FakePoolServer(),
    "mooncake": MooncakePoolServer,
    "yuanrong": YuanrongPoolServer,
    "memcache": MemcachePoolServer,
}
BACKENDS = [
    name if name == "fake" else pytest.param(name, marks=pytest.mark.distributed)
    for name in SERVERS
]


@pytest.fixture(scope="module", params=BACKENDS)
def pool(request):
    """A pool that the module's tests share: they use keys of their own."""
    with ExitStack() as stack:
        yield SERVERS[request.param](stack)


@pytest.fixture(params=BACKENDS)
def own_pool(request):
    """A pool for one test, which may hurt it."""
    with ExitStack() as stack:
        yield SERVERS[request.param](stack)
