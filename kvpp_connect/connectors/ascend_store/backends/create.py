"""Settings to a connected store."""

from kvpp_connect.connectors.ascend_store.backends.base import PoolStore
from kvpp_connect.connectors.ascend_store.backends.memcache import MemcacheStore
from kvpp_connect.connectors.ascend_store.backends.mooncake import MooncakeStore
from kvpp_connect.connectors.ascend_store.backends.settings import (
    MemcacheSettings,
    MooncakeSettings,
    StoreSettings,
)
from kvpp_connect.connectors.ascend_store.backends.yuanrong import YuanrongStore
from kvpp_connect.connectors.mooncake_engine import MooncakeEngine, find_engine


def create_store(
    settings: StoreSettings,
    *,
    host: str,
    segment: bool,
    protocol: str = "tcp",
    engine: MooncakeEngine | None = None,
    device_index: int = 0,
) -> PoolStore:
    """Connect to the store that the settings name.

    Args:
        settings: of one backend.
        host: this node's address, as others reach it; for Mooncake.
        segment: whether this process lends memory to the pool; those that only look up do not. A
            yuanrong pool has memory of its own.
        protocol: Mooncake's transfer protocol on this platform, for settings that name none.
        engine: Mooncake engine of this process to share with its store.
        device_index: accelerator of this process; for memcache.

    Raises:
        ConfigError: the store's package is missing, its server cannot be reached, or refuses.
    """
    if isinstance(settings, MooncakeSettings):
        return MooncakeStore(settings, host=host, segment=segment, protocol=protocol, engine=engine)
    if isinstance(settings, MemcacheSettings):
        return MemcacheStore(settings, segment=segment, device_index=device_index)
    return YuanrongStore(settings)


def engine_to_share(settings: StoreSettings, host: str) -> MooncakeEngine | None:
    """The engine of this process that a store with these settings can use, if there is one.

    It was started without a metadata server, and has to use the same devices.
    """
    if not isinstance(settings, MooncakeSettings):
        return None
    if settings.metadata_server != "P2PHANDSHAKE":
        return None
    found = find_engine(settings.local_hostname or host, settings.protocol)
    return found if found and found.device_name == settings.device_name else None
