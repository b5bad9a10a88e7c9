"""Settings of the pool: what is not understood is refused in one line that names it."""

import os

import pytest

from kvpp_connect.connectors.ascend_store.config import PoolConfig, parse_extra_config
from kvpp_connect.errors import ConfigError

MASTER = {"master_server_address": "10.0.0.9:50051"}


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MOONCAKE_")]:
        monkeypatch.delenv(name)


def parse(role="kv_both", **extra):
    return parse_extra_config({**MASTER, **extra}, role)


def test_defaults():
    config = parse()
    assert config == PoolConfig(store=config.store)
    assert (config.backend, config.load_mode) == ("mooncake", "async")
    assert (config.loads, config.puts, config.verify) == (True, True, True)
    assert config.store.master_server_address == "10.0.0.9:50051"


def test_values_are_taken():
    config = parse(
        namespace="blue",
        host="10.0.0.1",
        lookup_timeout_s=2,
        load_timeout_s=0.5,
        staging_bytes=1 << 20,
        verify="false",
        discard_partial_chunks=False,
        replica_num=2,
    )
    assert (config.namespace, config.host) == ("blue", "10.0.0.1")
    assert (config.lookup_timeout_s, config.load_timeout_s) == (2.0, 0.5)
    assert config.staging_bytes == 1 << 20
    assert (config.verify, config.keep_partial) == (False, True)
    assert config.store.replica_num == 2


def test_the_settings_that_were_given_are_left_as_they_are():
    extra = {**MASTER, "load_async": "true", "namespace": "blue"}
    before = dict(extra)
    parse_extra_config(extra, "kv_consumer")
    assert extra == before


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"backend": "moncake"}, "backend is 'moncake'; expected one of mooncake, memcache"),
        ({"backend": 3}, "backend is 3; expected one of"),
        ({"backend": None}, "backend is None; expected one of"),
        ({"backend": ["mooncake"]}, r"backend is \['mooncake'\]; expected one of"),
        ({"load_asynch": True}, "unknown key 'load_asynch'; did you mean 'load_async'"),
        ({"worker_addr": "a:1"}, "with backend mooncake: unknown key 'worker_addr'"),
        ({"load_async": 1}, r"load_async is 1 \(int\); expected true or false"),
        ({"use_layerwise": "yes"}, "use_layerwise is 'yes'"),
        ({"consumer_is_to_put": None}, "consumer_is_to_put is None"),
        ({"consumer_is_to_load": "1"}, "consumer_is_to_load is '1'"),
        ({"discard_partial_chunks": 0}, "discard_partial_chunks is 0"),
        ({"verify": []}, r"verify is \[\]"),
        ({"namespace": 5}, "namespace is 5; expected a string"),
        ({"host": None}, "host is None; expected a string"),
        ({"lookup_timeout_s": 0}, "lookup_timeout_s is 0; expected a number of seconds"),
        ({"lookup_timeout_s": True}, "lookup_timeout_s is True"),
        ({"load_timeout_s": "10"}, "load_timeout_s is '10'"),
        ({"load_timeout_s": float("nan")}, "load_timeout_s is nan"),
        ({"staging_bytes": 1000}, "staging_bytes is 1000; expected at least 1048576 bytes"),
        ({"staging_bytes": "64MB"}, "staging_bytes is '64MB'"),
        ({"staging_bytes": True}, "staging_bytes is True"),
        ({"staging_bytes": 2e6}, "staging_bytes is 2000000.0"),
        ({"replica_num": 0}, "replica_num"),
        ({"load_async": True, "use_layerwise": True}, "set one of them"),
    ],
)
def test_a_bad_value_is_refused_by_name_in_one_line(extra, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse(**extra)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "mode"),
    [
        ({}, "async"),
        ({"load_async": True}, "async"),
        ({"load_async": "False"}, "sync"),
        ({"use_layerwise": True}, "layerwise"),
        ({"use_layerwise": True, "load_async": False}, "layerwise"),
        ({"use_layerwise": False, "load_async": False}, "sync"),
    ],
)
def test_how_blocks_are_loaded(extra, mode):
    assert parse(**extra).load_mode == mode


@pytest.mark.parametrize(
    ("role", "extra", "loads", "puts"),
    [
        ("kv_both", {}, True, True),
        ("kv_producer", {}, True, True),
        ("kv_consumer", {}, True, False),
        ("kv_consumer", {"consumer_is_to_put": True}, True, True),
        ("kv_consumer", {"consumer_is_to_load": False}, False, False),
        ("kv_consumer", {"consumer_is_to_load": False, "consumer_is_to_put": True}, False, True),
        # These two are about consumers only.
        ("kv_producer", {"consumer_is_to_load": False}, True, True),
        ("kv_both", {"consumer_is_to_put": False}, True, True),
    ],
)
def test_what_a_node_of_each_role_does(role, extra, loads, puts):
    config = parse(role, **extra)
    assert (config.loads, config.puts) == (loads, puts)


def test_keys_that_others_read_are_accepted_and_ignored():
    assert parse(lookup_rpc_port="0", mooncake_rpc_port=1234) == parse()
