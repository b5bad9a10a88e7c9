"""KV connectors for vLLM that know who owns which layer.

Names resolve on first use, so that the pure modules below can be imported without vLLM.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpp_connect.connectors.ascend_store.connector import AscendStoreConnector
    from kvpp_connect.connectors.mooncake_v2.connector import MooncakeConnectorV2

__all__ = ["AscendStoreConnector", "MooncakeConnectorV2"]

_MODULES = {
    "AscendStoreConnector": "kvpp_connect.connectors.ascend_store.connector",
    "MooncakeConnectorV2": "kvpp_connect.connectors.mooncake_v2.connector",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the type of a module attribute
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
