"""`--kv-transfer-config` as the commands look at it: without vLLM, by the servers' own parsers."""

from collections.abc import Callable, Mapping
from typing import Any

from kvpp_connect.errors import ConfigError


def connectors_of(transfer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The connector's configuration, or those inside a MultiConnector.

    Raises:
        ConfigError: a MultiConnector's children cannot be read, or do not go together.
    """
    from kvpp_connect.seam import multi

    if not transfer:
        return []
    if not multi.is_multi(transfer.get("kv_connector"), transfer.get("kv_connector_module_path")):
        return [transfer]
    found = multi.children(transfer.get("kv_connector_extra_config"))
    multi.check_children(found)
    return [*found]


def extra_of(connector: Mapping[str, Any]) -> Mapping[str, Any]:
    """A connector's own keys."""
    extra = connector.get("kv_connector_extra_config")
    return extra if isinstance(extra, Mapping) else {}


def check_connectors(transfer: Mapping[str, Any]) -> None:
    """Check the extra config of each connector by its own parser.

    Raises:
        ConfigError: an unknown key or a wrong value, or no connector is named.
    """
    from kvpp_connect.connectors.ascend_store import config as pool
    from kvpp_connect.connectors.mooncake_v2 import config as mooncake_v2

    parsers: dict[str, Callable[[Mapping[str, Any], str], object]] = {
        "AscendStoreConnector": pool.parse_extra_config,
        "MooncakeConnectorV2": mooncake_v2.parse_extra_config,
    }
    for connector in connectors_of(transfer):
        name = connector.get("kv_connector")
        if not isinstance(name, str):
            raise ConfigError(f"kv_connector is {name!r}; expected one of: {', '.join(parsers)}")
        extra = connector.get("kv_connector_extra_config", {})
        if not isinstance(extra, Mapping):
            raise ConfigError(f"kv_connector_extra_config of {name} is no object")
        if name in parsers:
            parsers[name](extra, str(connector.get("kv_role") or "kv_both"))
