import json

import pytest

from kvpp_connect.connectors.ascend_store.backends.settings import (
    BACKENDS,
    MemcacheSettings,
    MooncakeSettings,
    YuanrongSettings,
    parse_store_settings,
)
from kvpp_connect.errors import ConfigError

MASTER = {"master_server_address": "10.0.0.1:50051"}


@pytest.fixture
def write(tmp_path):
    """Writes a settings file and answers its path."""

    def write(content):
        path = tmp_path / "store.conf"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def test_mooncake_needs_the_master_s_address_only():
    assert parse_store_settings("mooncake", MASTER, {}) == MooncakeSettings(**MASTER)


def test_mooncake_is_read_from_the_file_that_its_users_have(write):
    path = write(
        {
            "local_hostname": "10.0.0.9",
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "RDMA",
            "device_name": None,
            "master_server_address": "10.0.0.1:50051",
            "global_segment_size": "2GB",
            "local_buffer_size": 1048576,
            "preferred_segment": True,
            "prefer_alloc_in_same_node": "true",
            "replica_num": 2,
            "tenant_id": "blue",
            "enable_ssd_offload": True,
            "ssd_offload_path": "/var/pool",
            "staging_buffer_size": 5,
        }
    )
    settings = parse_store_settings("mooncake", {}, {"MOONCAKE_CONFIG_PATH": path})
    assert settings == MooncakeSettings(
        local_hostname="10.0.0.9",
        protocol="rdma",
        global_segment_size=2 << 30,
        local_buffer_size=1 << 20,
        preferred_segment=True,
        prefer_alloc_in_same_node=True,
        replica_num=2,
        tenant_id="blue",
        enable_ssd_offload=True,
        ssd_offload_path="/var/pool",
        **MASTER,
    )


def test_mooncake_is_read_from_its_environment_names():
    environ = {
        "MOONCAKE_MASTER": "10.0.0.1:50051",
        "MOONCAKE_TE_META_DATA_SERVER": "http://10.0.0.1:8080/metadata",
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_DEVICE": "mlx5_0,mlx5_1",
        "MOONCAKE_LOCAL_HOSTNAME": "node7",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "512mb",
        "MOONCAKE_LOCAL_BUFFER_SIZE": "1024",
        "MOONCAKE_TENANT_ID": "blue",
        "MOONCAKE_OFFLOAD_ENABLED": "0",
    }
    assert parse_store_settings("mooncake", {}, environ) == MooncakeSettings(
        metadata_server="http://10.0.0.1:8080/metadata",
        protocol="tcp",
        device_name="mlx5_0,mlx5_1",
        local_hostname="node7",
        global_segment_size=512 << 20,
        local_buffer_size=1024,
        tenant_id="blue",
        **MASTER,
    )


def test_plain_keys_go_over_environment_names_over_the_file(write):
    path = write({"master_server_address": "f:1", "global_segment_size": 1, "device_name": "file"})
    environ = {
        "MOONCAKE_CONFIG_PATH": path,
        "MOONCAKE_MASTER": "e:2",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "2",
        "MOONCAKE_DEVICE": "",
    }
    settings = parse_store_settings("mooncake", {"global_segment_size": 3}, environ)
    assert isinstance(settings, MooncakeSettings)
    assert settings.master_server_address == "e:2"
    assert settings.global_segment_size == 3
    assert settings.device_name == "file"


def test_what_is_given_is_not_changed():
    extra = {**MASTER, "global_segment_size": "1GB"}
    parse_store_settings("mooncake", extra, {})
    assert extra == {**MASTER, "global_segment_size": "1GB"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0, 0),
        (4096, 4096),
        (1e9, 10**9),
        ("4096", 4096),
        ("512MB", 512 << 20),
        ("4 GiB", 4 << 30),
        ("1.5g", 3 << 29),
        (" 2 tb ", 2 << 40),
        ("10B", 10),
    ],
)
def test_sizes_are_read_as_the_stores_files_write_them(given, expected):
    settings = parse_store_settings("mooncake", {**MASTER, "global_segment_size": given}, {})
    assert isinstance(settings, MooncakeSettings)
    assert settings.global_segment_size == expected


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"global_segment_size": "lots"}, "global_segment_size is 'lots'; expected bytes, or a"),
        ({"global_segment_size": "5XB"}, "global_segment_size is '5XB'"),
        ({"global_segment_size": -1}, "global_segment_size is -1"),
        ({"global_segment_size": True}, "global_segment_size is True"),
        ({"global_segment_size": 0.5}, r"global_segment_size is 0\.5"),
        ({"global_segment_size": None}, "global_segment_size is None"),
        ({"master_server_address": "10.0.0.1"}, "'10.0.0.1'; expected host:port"),
        ({"master_server_address": "10.0.0.1:99999"}, "expected host:port"),
        ({"master_server_address": 50051}, "is 50051; expected a string"),
        ({"protocol": "tpc"}, "protocol is 'tpc'; expected one of: tcp, rdma, ascend"),
        ({"replica_num": 0}, "replica_num is 0; expected a whole number from 1 on"),
        ({"preferred_segment": "maybe"}, "preferred_segment is 'maybe'; expected true or false"),
        ({"segment_size": "1GB"}, "unknown key 'segment_size'; did you mean 'global_segment_size'"),
        ({"worker_addr": "a:1"}, "unknown key 'worker_addr'"),
        ({"enable_ssd_offload": True}, "ssd_offload_path is ''; set ssd_offload_path to"),
        (
            {"enable_ssd_offload": True, "ssd_offload_path": "pool"},
            "ssd_offload_path is 'pool'",
        ),
    ],
)
def test_a_plain_value_that_cannot_be_used_is_refused_by_name(extra, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_store_settings("mooncake", {**MASTER, **extra}, {})
    assert str(caught.value).startswith("store backend 'mooncake': ")


def test_a_value_of_the_environment_is_refused_with_its_variable():
    with pytest.raises(ConfigError, match="environment variable MOONCAKE_MASTER is 'here'"):
        parse_store_settings("mooncake", {}, {"MOONCAKE_MASTER": "here"})


def test_a_value_of_the_file_is_refused_with_its_path_and_field(write):
    path = write({"master_server_address": "a:1", "global_segment_size": "big"})
    with pytest.raises(ConfigError, match=f"{path}: global_segment_size is 'big'"):
        parse_store_settings("mooncake", {}, {"MOONCAKE_CONFIG_PATH": path})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON: .* in line 1"),
        ("[1]", "holds no JSON object"),
        ("{}", "no master_server_address is set; set kv_connector_extra_config.master_server"),
        ('{"master_server_address": ""}', "master_server_address is ''; expected host:port"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(write, content, message):
    path = write(content)
    with pytest.raises(ConfigError, match=message) as caught:
        parse_store_settings("mooncake", {}, {"MOONCAKE_CONFIG_PATH": path})
    assert path in str(caught.value)


def test_a_wrong_path_is_named_with_its_variable(tmp_path):
    for path, reason in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=reason) as caught:
            parse_store_settings("mooncake", {}, {"MOONCAKE_CONFIG_PATH": str(path)})
        assert f"'{path}'" in str(caught.value)
        assert "MOONCAKE_CONFIG_PATH" in str(caught.value)


def test_a_missing_setting_is_told_with_all_places_where_it_may_stand():
    with pytest.raises(ConfigError) as caught:
        parse_store_settings("mooncake", {}, {})
    assert str(caught.value) == (
        "store backend 'mooncake': no master_server_address is set; set "
        "kv_connector_extra_config.master_server_address, environment variable MOONCAKE_MASTER or "
        "master_server_address in a file that MOONCAKE_CONFIG_PATH names"
    )


def test_an_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="'moncake'; did you mean 'mooncake'"):
        parse_store_settings("moncake", {}, {})


def test_memcache_is_read_from_its_conf_file(write, caplog):
    path = write(
        """
        # the pool of the first floor
        ock.mmc.meta_service_url = tcp://10.0.0.1:5000
        ock.mmc.local_service.config_store_url=tcp://10.0.0.1:6000
        ock.mmc.local_service.protocol = device_sdma
        ock.mmc.local_service.dram.size = 2GB
        ock.mmc.local_service.max.dram.size = 4GB
        ock.mmc.local_service.world_size = 16
        ock.mmc.client.timeout.seconds = 20
        ock.mmc.log_level = warn
        ock.mmc.tls.enable = true
        ock.mmc.tls.key.pass.path = /etc/pass
        ock.mmc.local_service.hcom.tls.ca.path = /etc/ca
        ock.mmc.config_store.tls.enable = false
        ock.mmc.client.read_thread_pool.size = 8
        ock.mmc.client.aggregate.num = 3
        ock.mmc.local_service.tag_op_info = t
        ock.mmc.local_service.storage.enabled = true
        """
    )
    settings = parse_store_settings("memcache", {}, {"MMC_LOCAL_CONFIG_PATH": path})
    assert settings == MemcacheSettings(
        meta_service_url="tcp://10.0.0.1:5000",
        config_store_url="tcp://10.0.0.1:6000",
        protocol="device_sdma",
        dram_size=2 << 30,
        max_dram_size=4 << 30,
        world_size=16,
        client_timeout_seconds=20,
        log_level="warn",
        options=(
            ("tls_enable", "true"),
            ("tls_key_pass_path", "/etc/pass"),
            ("hcom_tls_ca_path", "/etc/ca"),
            ("config_store_tls_enable", "false"),
            ("read_thread_pool_size", "8"),
            ("aggregate_num", "3"),
            ("tag_op_info", "t"),
        ),
    )
    assert "takes no ock.mmc.local_service.storage.enabled" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("meta", "line 1: 'meta' is not of the form key = value"),
        ("ock.mmc.meta_service_url = 10.0.0.1:5000", "expected tcp://host:port"),
        ("ock.mmc.meta_service_url = tcp://10.0.0.1", "expected host:port"),
        ("ock.mmc.meta_service_url = tcp://a:1", "no config_store_url is set"),
        ("", "no meta_service_url is set"),
    ],
)
def test_a_conf_file_that_cannot_be_used_is_named(write, content, message):
    path = write(content)
    with pytest.raises(ConfigError, match=message) as caught:
        parse_store_settings("memcache", {}, {"MMC_LOCAL_CONFIG_PATH": path})
    assert path in str(caught.value)


def test_yuanrong_is_read_from_file_environment_and_plain_keys(write):
    path = write({"worker_addr": "f:1", "connect_timeout_ms": 700, "enable_remote_h2d": False})
    environ = {"YR_CONFIG_PATH": path, "DS_ENABLE_EXCLUSIVE_CONNECTION": "1"}
    expected = YuanrongSettings(
        worker_addr="f:1",
        connect_timeout_ms=700,
        request_timeout_ms=5,
        enable_exclusive_connection=True,
    )
    assert parse_store_settings("yuanrong", {"request_timeout_ms": 5}, environ) == expected
    changed = parse_store_settings("yuanrong", {}, {**environ, "DS_WORKER_ADDR": "e:2"})
    assert isinstance(changed, YuanrongSettings)
    assert changed.worker_addr == "e:2"


def test_each_backend_tells_its_plain_keys():
    assert BACKENDS["yuanrong"].plain_keys == {
        "worker_addr",
        "connect_timeout_ms",
        "request_timeout_ms",
        "enable_exclusive_connection",
    }
    assert "dram_size" in BACKENDS["memcache"].plain_keys
    assert "global_segment_size" in BACKENDS["mooncake"].plain_keys
