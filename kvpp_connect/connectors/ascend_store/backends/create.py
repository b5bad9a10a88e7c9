"""Settings to a connected store."""

from kvpp_connect.connectors.ascend_store.backends.base import PoolStore
from kvpp_connect.connectors.ascend_store.backends.mooncake import MooncakeStore
from kvpp_connect.connectors.ascend_store.backends.settings import (
    MooncakeSettings,
    StoreSettings,
)
from kvpp_connect.connectors.mooncake_engine import MooncakeEngine, find_engine
from kvpp_connect.errors import ConfigError


def create_store(
    settings: StoreSettings,
    *,
    host: str,
    segment: bool,
    protocol: str = "tcp",
    engine: MooncakeEngine | None = None,
) -> PoolStore:
    """Connect to the store that the settings name.

    Args:
        settings: of one backend.
        host: this node's address, as others reach it.
        segment: whether this process lends memory to the pool; those that only look up do not.
        protocol: transfer protocol of the platform, for settings that name none.
        engine: Mooncake engine of this process to share with its store.

    Raises:
        ConfigError: the store's package is missing, its server cannot be reached, or refuses.
    """
    if isinstance(settings, MooncakeSettings):
        return MooncakeStore(settings, host=host, segment=segment, protocol=protocol, engine=engine)
    raise ConfigError(f"no store for {type(settings).__name__}")


def engine_to_share(settings: StoreSettings, host: str) -> MooncakeEngine | None:
    """The engine of this process that a store with these settings can use, if there is one.

    It was started without a metadata server and with all devices.
    """
    if not isinstance(settings, MooncakeSettings):
        return None
    if settings.metadata_server != "P2PHANDSHAKE" or settings.device_name:
        return None
    return find_engine(settings.local_hostname or host, settings.protocol)
