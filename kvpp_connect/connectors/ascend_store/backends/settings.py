"""Settings of the pool's stores, one frozen object per backend.

Each setting may stand as a plain key in ``kv_connector_extra_config``, over an environment variable
that the store's users know, over the file that they have. Files are shared with other programs:
names in them that mean nothing here are left alone.
"""

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpp_connect._log import get_logger
from kvpp_connect.connectors.ascend_store.backends import values
from kvpp_connect.connectors.ascend_store.backends.sources import (
    EXTRA,
    Setting,
    SettingsFile,
    collect,
    missing,
    read_file,
)
from kvpp_connect.connectors.mooncake_engine import PROTOCOLS
from kvpp_connect.errors import ConfigError

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings:
    """Settings of a Mooncake store.

    Attributes:
        master_server_address: ``host:port`` of the mooncake_master; ``scheme://...`` where masters
            are found through a registry.
        metadata_server: address of a metadata server; "P2PHANDSHAKE": none is used.
        local_hostname: address at which other nodes reach this one; empty: the node's own choice.
        protocol: transfer protocol; empty: what the platform uses.
        device_name: RDMA devices, separated by commas; empty: all.
        global_segment_size: bytes of memory that each rank lends to the pool.
        local_buffer_size: bytes that Mooncake registers for copies of its own; not used here.
        replica_num: copies of each object, on different nodes.
        preferred_segment: store objects on this node as long as there is room.
        prefer_alloc_in_same_node: store the objects of one call on one node.
        tenant_id: name space in the pool.
        enable_ssd_offload: let Mooncake keep objects on a local disk as well.
        ssd_offload_path: absolute path of the directory for them.
    """

    master_server_address: str
    metadata_server: str = "P2PHANDSHAKE"
    local_hostname: str = ""
    protocol: str = ""
    device_name: str = ""
    global_segment_size: int = 1 << 30
    local_buffer_size: int = 16 << 20
    replica_num: int = 1
    preferred_segment: bool = False
    prefer_alloc_in_same_node: bool = False
    tenant_id: str = "default"
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemcacheSettings:
    """Settings of a memcache_hybrid store.

    Attributes:
        meta_service_url: ``tcp://host:port`` of the MetaService.
        config_store_url: ``tcp://host:port`` of its configuration store.
        protocol: transfer protocol, such as "device_sdma" or "host_shm".
        dram_size: bytes of host memory that each rank lends to the pool.
        max_dram_size: the largest ``dram_size`` of any rank in bytes; 0: memcache's default.
        world_size: ranks that may ever join the pool.
        client_timeout_seconds: seconds for one request.
        log_level: of memcache's own log.
        options: further attributes of memcache's LocalConfig that its file sets, such as TLS.
    """

    meta_service_url: str
    config_store_url: str
    protocol: str = "host_rdma"
    dram_size: int = 1 << 30
    max_dram_size: int = 0
    world_size: int = 256
    client_timeout_seconds: int = 60
    log_level: str = "error"
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class YuanrongSettings:
    """Settings of an openyuanrong-datasystem store.

    Attributes:
        worker_addr: ``host:port`` of the datasystem worker on this node.
        connect_timeout_ms: milliseconds to reach the worker.
        request_timeout_ms: milliseconds for one request, for which a worker that hangs stops this
            process; 0: as ``connect_timeout_ms``.
        enable_exclusive_connection: give each client thread a connection of its own.
    """

    worker_addr: str
    connect_timeout_ms: int = 9000
    request_timeout_ms: int = 3000
    enable_exclusive_connection: bool = False


StoreSettings = MooncakeSettings | MemcacheSettings | YuanrongSettings

_MOONCAKE = (
    Setting(
        key="master_server_address",
        parse=lambda value, where: (
            value if "://" in values.text(value, where) else values.address(value, where)
        ),
        env=("MOONCAKE_MASTER",),
    ),
    Setting(key="metadata_server", parse=values.text, env=("MOONCAKE_TE_META_DATA_SERVER",)),
    Setting(key="local_hostname", parse=values.text, env=("MOONCAKE_LOCAL_HOSTNAME",)),
    Setting(key="protocol", parse=values.choice("", *PROTOCOLS), env=("MOONCAKE_PROTOCOL",)),
    Setting(key="device_name", parse=values.text, env=("MOONCAKE_DEVICE",)),
    Setting(key="global_segment_size", parse=values.size, env=("MOONCAKE_GLOBAL_SEGMENT_SIZE",)),
    Setting(key="local_buffer_size", parse=values.size, env=("MOONCAKE_LOCAL_BUFFER_SIZE",)),
    Setting(key="replica_num", parse=values.integer(1)),
    Setting(key="preferred_segment", parse=values.switch),
    Setting(key="prefer_alloc_in_same_node", parse=values.switch),
    Setting(key="tenant_id", parse=values.text, env=("MOONCAKE_TENANT_ID",)),
    Setting(key="enable_ssd_offload", parse=values.switch, env=("MOONCAKE_OFFLOAD_ENABLED",)),
    Setting(key="ssd_offload_path", parse=values.text, env=("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",)),
)

_SERVICE = "ock.mmc.local_service"
_MEMCACHE = (
    Setting(key="meta_service_url", parse=values.url, in_file="ock.mmc.meta_service_url"),
    Setting(key="config_store_url", parse=values.url, in_file=f"{_SERVICE}.config_store_url"),
    Setting(key="protocol", parse=values.text, in_file=f"{_SERVICE}.protocol"),
    Setting(key="dram_size", parse=values.size, in_file=f"{_SERVICE}.dram.size"),
    Setting(key="max_dram_size", parse=values.size, in_file=f"{_SERVICE}.max.dram.size"),
    Setting(key="world_size", parse=values.integer(1), in_file=f"{_SERVICE}.world_size"),
    Setting(
        key="client_timeout_seconds",
        parse=values.integer(1),
        in_file="ock.mmc.client.timeout.seconds",
    ),
    Setting(key="log_level", parse=values.text, in_file="ock.mmc.log_level"),
)

_YUANRONG = (
    Setting(key="worker_addr", parse=values.address, env=("DS_WORKER_ADDR",)),
    Setting(key="connect_timeout_ms", parse=values.integer(500)),
    Setting(key="request_timeout_ms", parse=values.integer(0)),
    Setting(
        key="enable_exclusive_connection",
        parse=values.switch,
        env=("DS_ENABLE_EXCLUSIVE_CONNECTION",),
    ),
)


def _finish_mooncake(given: dict[str, Any], _: Mapping[str, object]) -> MooncakeSettings:
    settings = MooncakeSettings(**given)
    if settings.enable_ssd_offload and not os.path.isabs(settings.ssd_offload_path):
        raise ConfigError(
            f"enable_ssd_offload is true and ssd_offload_path is {settings.ssd_offload_path!r}; "
            "set ssd_offload_path to the absolute path of a directory, or turn the offload off"
        )
    return settings


# Tells how memcache's file names the attributes of its LocalConfig, longest beginning first.
_LOCAL_CONFIG_NAMES = (
    (f"{_SERVICE}.hcom.tls.", "hcom_tls_"),
    ("ock.mmc.config_store.tls.", "config_store_tls_"),
    ("ock.mmc.tls.", "tls_"),
    ("ock.mmc.client.aggregate.", "aggregate_"),
    ("ock.mmc.client.read_thread_pool.", "read_thread_pool_"),
    ("ock.mmc.client.write_thread_pool.", "write_thread_pool_"),
    ("ock.mmc.client.retry_milliseconds", "client_retry_milliseconds"),
    (f"{_SERVICE}.hbm.size", "hbm_size"),
    (f"{_SERVICE}.max.hbm.size", "max_hbm_size"),
    (f"{_SERVICE}.hcom_url", "hcom_url"),
    (f"{_SERVICE}.backend_id", "backend_id"),
    (f"{_SERVICE}.tag_op_info", "tag_op_info"),
    (f"{_SERVICE}.tag", "tag"),
)


def _finish_memcache(given: dict[str, Any], in_file: Mapping[str, object]) -> MemcacheSettings:
    known = {setting.in_file for setting in _MEMCACHE}
    options: list[tuple[str, str]] = []
    dropped: list[str] = []
    for name, value in in_file.items():
        if name in known:
            continue
        prefix, start = next((p for p in _LOCAL_CONFIG_NAMES if name.startswith(p[0])), ("", ""))
        if prefix:
            options.append((start + name.removeprefix(prefix).replace(".", "_"), str(value)))
        elif name.startswith(("ock.mmc.", "ubsio.")):
            dropped.append(name)
    if dropped:
        logger.warning(
            "memcache's Python client takes no %s: left to its defaults", ", ".join(dropped)
        )
    return MemcacheSettings(**given, options=tuple(options))


def _finish_yuanrong(given: dict[str, Any], _: Mapping[str, object]) -> YuanrongSettings:
    return YuanrongSettings(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """How one backend is set up.

    Attributes:
        settings: all of its settings.
        required: keys that must stand somewhere.
        file: the file that its users have.
        finish: makes the settings object out of parsed values and the file's content.
    """

    settings: tuple[Setting, ...]
    required: tuple[str, ...]
    file: SettingsFile
    finish: Callable[[dict[str, Any], Mapping[str, object]], StoreSettings]

    @property
    def plain_keys(self) -> frozenset[str]:
        """The keys in ``kv_connector_extra_config`` that belong to this backend."""
        return frozenset(setting.key for setting in self.settings)


BACKENDS: dict[str, Backend] = {
    "mooncake": Backend(
        settings=_MOONCAKE,
        required=("master_server_address",),
        file=SettingsFile(env="MOONCAKE_CONFIG_PATH", syntax="json"),
        finish=_finish_mooncake,
    ),
    "memcache": Backend(
        settings=_MEMCACHE,
        required=("meta_service_url", "config_store_url"),
        file=SettingsFile(env="MMC_LOCAL_CONFIG_PATH", syntax="conf"),
        finish=_finish_memcache,
    ),
    "yuanrong": Backend(
        settings=_YUANRONG,
        required=("worker_addr",),
        file=SettingsFile(env="YR_CONFIG_PATH", syntax="json"),
        finish=_finish_yuanrong,
    ),
}


def parse_store_settings(
    backend: str, extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> StoreSettings:
    """Read and check the settings of one backend.

    Args:
        backend: a name in ``BACKENDS``.
        extra: the plain keys that belong to the backend.
        environ: the environment.

    Raises:
        ConfigError: an unknown backend or key, a file that cannot be read, a value that cannot be
            used, or a setting that is missing.
    """
    if backend not in BACKENDS:
        near = difflib.get_close_matches(str(backend), BACKENDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of: {', '.join(BACKENDS)}"
        raise ConfigError(f"{EXTRA}.backend is {backend!r}; {hint}")
    chosen = BACKENDS[backend]
    where = f"store backend {backend!r}"
    try:
        path, in_file = read_file(chosen.file, environ)
        given = collect(chosen.settings, extra, environ, path, in_file)
        for setting in chosen.settings:
            if setting.key in chosen.required and not given.get(setting.key):
                raise missing(setting, chosen.file, path)
        return chosen.finish(given, in_file)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
