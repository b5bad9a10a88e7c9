"""How the codes of native clients become outcomes, shown with clients that answer as they are told.

memcache's needs the driver of an accelerator: here this is all that its store is run against.
"""

import importlib.util
import socket
import sys
from types import ModuleType, SimpleNamespace

import pytest
from pool_equipment import Memory

from kvpp_connect.connectors.ascend_store.backends.base import (
    GetOutcome,
    PutOutcome,
    StoreError,
)
from kvpp_connect.connectors.ascend_store.backends.create import create_store
from kvpp_connect.connectors.ascend_store.backends.memcache import local_config
from kvpp_connect.connectors.ascend_store.backends.settings import (
    MemcacheSettings,
    MooncakeSettings,
    YuanrongSettings,
    parse_store_settings,
)
from kvpp_connect.errors import ConfigError

# What memcache's file may set beside our own settings, without "ock.mmc." in front.
MEMCACHE_OPTIONS = (
    *(f"tls.{name}.path" for name in ("ca", "ca.crl", "cert", "key", "key.pass", "package")),
    *("tls.enable", "tls.decrypter.path", "config_store.tls.enable", "config_store.tls.key.path"),
    *("client.aggregate.io", "client.aggregate.num", "client.retry_milliseconds"),
    *("client.read_thread_pool.size", "client.write_thread_pool.size"),
    *("local_service.hcom.tls.enable", "local_service.hcom.tls.key.pass.path"),
    *("local_service.hbm.size", "local_service.max.hbm.size", "local_service.hcom_url"),
    *("local_service.backend_id", "local_service.tag", "local_service.tag_op_info"),
)

STORED, PRESENT, FULL, PUT_FAILED = PutOutcome
READ, MISSING, SHORT, GET_FAILED = GetOutcome


class ScriptedClient:
    """A native client: answers what ``answers`` holds for a method, 0 if nothing."""

    def __init__(self):
        self.answers = {}
        self.calls = []

    def __getattr__(self, method):
        def call(*arguments, **named):
            self.calls.append((method, *arguments))
            return self.answers.get(method, 0)

        return call


class LocalConfig:
    """memcache's configuration object, with attributes of each type."""

    def __init__(self):
        self.tls_enable = False
        self.tls_key_path = ""
        self.aggregate_num = 122


@pytest.fixture
def server():
    """An address where somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def mooncake(monkeypatch, server):
    """A Mooncake store and its scripted client."""
    client = ScriptedClient()
    package, module = ModuleType("mooncake"), ModuleType("mooncake.store")
    module.MooncakeDistributedStore = lambda: client
    module.ReplicateConfig = SimpleNamespace
    package.store = module
    monkeypatch.setitem(sys.modules, "mooncake", package)
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    settings = MooncakeSettings(master_server_address=server)
    return create_store(settings, host="127.0.0.1", segment=True), client


@pytest.fixture
def memcache_client(monkeypatch):
    client = ScriptedClient()
    module = ModuleType("memcache_hybrid")
    module.DistributedObjectStore = lambda: client
    module.LocalConfig = LocalConfig
    monkeypatch.setitem(sys.modules, "memcache_hybrid", module)
    return client


def memcache_settings(server, **others):
    url = f"tcp://{server}"
    return MemcacheSettings(meta_service_url=url, config_store_url=url, **others)


@pytest.fixture
def memcache(memcache_client, server):
    """A memcache store and its scripted client."""
    store = create_store(memcache_settings(server), host="127.0.0.1", segment=True, device_index=3)
    return store, memcache_client


def ranges(store, sizes):
    memory = Memory(sum(sizes))
    store.register(memory.whole)
    return [memory.take(size) for size in sizes]


def test_mooncake_s_codes_of_puts(mooncake):
    store, client = mooncake
    client.answers["batch_put_from"] = [0, -705, -200, -101, -800]
    outcomes = store.put(list("abcde"), ranges(store, [10] * 5))
    assert outcomes == [STORED, PRESENT, FULL, PUT_FAILED, PUT_FAILED]


def test_mooncake_s_codes_of_gets(mooncake):
    store, client = mooncake
    client.answers["batch_get_into"] = [10, 9, 0, -600, -703, -704, -707, -800]
    outcomes = store.get(list("abcdefgh"), ranges(store, [10] * 8))
    assert outcomes == [READ, SHORT, SHORT, SHORT, MISSING, MISSING, GET_FAILED, GET_FAILED]


def test_mooncake_s_codes_of_ranges(mooncake):
    store, client = mooncake
    client.answers["batch_get_session_start"] = [0, -704, 0, -101, 0]
    client.answers["batch_get_into_multi_buffer_ranges"] = [10, -600, -707]
    outcomes = store.get_ranges(list("abcde"), ranges(store, [10] * 5), 7)
    assert outcomes == [READ, MISSING, SHORT, GET_FAILED, GET_FAILED]
    assert client.calls[-1] == ("batch_get_session_end", list("abcde"))
    assert client.calls[-2][1] == ["a", "c", "e"]


@pytest.mark.parametrize("answer", [[], [0], [0, -900], [-901, 0]])
@pytest.mark.parametrize(
    ("method", "native"),
    [
        ("put", "batch_put_from"),
        ("get", "batch_get_into"),
        ("get_ranges", "batch_get_session_start"),
        ("exists", "batch_is_exist"),
    ],
)
def test_a_mooncake_that_answers_for_some_keys_only_or_lost_its_master_answers_for_none(
    mooncake, answer, method, native
):
    store, client = mooncake
    client.answers[native] = answer
    arguments = {"exists": [], "get_ranges": [ranges(store, [5, 5]), 0]}
    with pytest.raises(StoreError):
        getattr(store, method)(["a", "b"], *arguments.get(method, [ranges(store, [5, 5])]))


def test_mooncake_s_sessions_end_when_a_read_fails(mooncake):
    store, client = mooncake
    client.answers["batch_get_session_start"] = [0]
    client.answers["batch_get_into_multi_buffer_ranges"] = []
    with pytest.raises(StoreError):
        store.get_ranges(["a"], ranges(store, [5]), 0)
    assert client.calls[-1] == ("batch_get_session_end", ["a"])


def test_an_error_code_never_says_that_an_object_is_there(mooncake):
    store, client = mooncake
    client.answers["batch_is_exist"] = [1, -1]
    with pytest.raises(StoreError, match="code -1"):
        store.exists(["a", "b"])


def test_mooncake_that_refuses_memory_says_how_much(mooncake):
    store, client = mooncake
    client.answers["register_buffer"] = -600
    with pytest.raises(ConfigError, match=r"register 10 bytes .*ulimit -l"):
        ranges(store, [10])


def test_memcache_s_codes_of_puts(memcache):
    store, client = memcache
    client.answers["batch_put_from"] = [0, -1, -2]
    sources = ranges(store, [10] * 3)
    assert store.put(list("abc"), sources) == [STORED, FULL, PUT_FAILED]
    addresses = [source.address for source in sources]
    assert client.calls[-1] == ("batch_put_from", list("abc"), addresses, [10] * 3, 3)


def test_memcache_s_codes_of_gets(memcache):
    store, client = memcache
    client.answers["batch_get_into"] = [0, -3007, -3012, -1]
    targets = ranges(store, [10] * 4)
    assert store.get(list("abcd"), targets) == [READ, MISSING, SHORT, GET_FAILED]
    addresses = [target.address for target in targets]
    assert client.calls[-1] == ("batch_get_into", list("abcd"), addresses, [10] * 4, 2)


@pytest.mark.parametrize(
    ("method", "native", "answer"),
    [
        ("put", "batch_put_from", [-3000]),
        ("put", "batch_put_from", [0]),
        ("get", "batch_get_into", [-3000]),
        ("get", "batch_get_into", []),
        ("exists", "batch_is_exist", [-3014]),
        ("exists", "batch_is_exist", [1, -1]),
    ],
)
def test_a_memcache_without_its_service_answers_for_no_key(memcache, method, native, answer):
    store, client = memcache
    client.answers[native] = answer
    arguments = [] if method == "exists" else [ranges(store, [5, 5])]
    with pytest.raises(StoreError):
        getattr(store, method)(["a", "b"], *arguments)


def test_memcache_reads_whole_objects_and_lists_none(memcache):
    store, _ = memcache
    assert not store.supports_ranges
    assert store.remove_prefix("a") == 0


@pytest.mark.parametrize(("segment", "dram"), [(True, "4096"), (False, "0")])
def test_memcache_is_set_up_as_its_settings_say(memcache_client, server, segment, dram):
    settings = memcache_settings(
        server,
        protocol="host_shm",
        dram_size=4096,
        world_size=8,
        options=(("tls_enable", "TRUE"), ("tls_key_path", "/k"), ("aggregate_num", "7")),
    )
    create_store(settings, host="127.0.0.1", segment=segment, device_index=3)
    (_, config), start = memcache_client.calls
    assert vars(config) == {
        "meta_service_url": f"tcp://{server}",
        "config_store_url": f"tcp://{server}",
        "protocol": "host_shm",
        "dram_size": dram,
        "max_dram_size": "4096",
        "world_size": 8,
        "client_timeout_seconds": 60,
        "log_level": "error",
        "tls_enable": True,
        "tls_key_path": "/k",
        "aggregate_num": 7,
    }
    assert start == ("init", 3, segment)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("aggregate_num", "x", "aggregate_num is 'x'; expected int"),
        ("tls_enable", "maybe", "tls_enable is 'maybe'; expected bool"),
        ("tls_colour", "red", "has no setting tls_colour"),
    ],
)
def test_a_memcache_option_that_cannot_be_used_is_named(server, name, value, message):
    settings = memcache_settings(server, options=((name, value),))
    with pytest.raises(ConfigError, match=message):
        local_config(LocalConfig(), settings, segment=True)


@pytest.mark.parametrize("step", ["setup", "init"])
def test_a_memcache_that_refuses_this_client_is_an_error(memcache_client, server, step):
    memcache_client.answers[step] = -1
    with pytest.raises(ConfigError, match=rf"of this client of tcp://{server} \(code -1\)"):
        create_store(memcache_settings(server), host="127.0.0.1", segment=True)


def test_all_options_of_memcache_s_file_are_attributes_of_the_real_configuration(tmp_path):
    if importlib.util.find_spec("memcache_hybrid") is None:
        pytest.skip("memcache-hybrid is not installed")
    from memcache_hybrid import LocalConfig as RealConfig

    default = RealConfig()
    path = tmp_path / "mmc-local.conf"
    urls = {"meta_service_url": "tcp://a:1", "config_store_url": "tcp://a:2"}
    path.write_text("".join(f"ock.mmc.{name} = 1\n" for name in MEMCACHE_OPTIONS))
    settings = parse_store_settings("memcache", urls, {"MMC_LOCAL_CONFIG_PATH": str(path)})
    assert isinstance(settings, MemcacheSettings)
    assert len(settings.options) == len(MEMCACHE_OPTIONS)
    assert [name for name, _ in settings.options if not hasattr(default, name)] == []
    assert local_config(default, MemcacheSettings(**urls), segment=False).dram_size == "0"


@pytest.mark.parametrize(
    ("module", "make", "package"),
    [
        ("mooncake.store", lambda a: MooncakeSettings(master_server_address=a), "mooncake-transf"),
        ("memcache_hybrid", memcache_settings, "Install memcache-hybrid"),
        ("yr.datasystem", lambda a: YuanrongSettings(worker_addr=a), "openyuanrong-datasystem"),
    ],
)
def test_a_store_whose_package_is_missing_names_it(monkeypatch, server, module, make, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=package):
        create_store(make(server), host="127.0.0.1", segment=False)


@pytest.mark.parametrize(
    ("make", "server_name"),
    [
        (memcache_settings, "memcache MetaService"),
        (lambda a: YuanrongSettings(worker_addr=a), "datasystem worker"),
        (lambda a: MooncakeSettings(master_server_address=a), "mooncake_master"),
    ],
)
def test_a_server_that_nobody_started_is_named_with_its_address(make, server_name):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"no {server_name} at {address}") as caught:
            create_store(make(address), host="127.0.0.1", segment=False)
    assert "start it" in str(caught.value)
