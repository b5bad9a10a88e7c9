"""KV connectors for vLLM that know who owns which layer.

Names resolve on first use, so that the pure modules below can be imported without vLLM.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpp_connect.connectors.mooncake_v2.connector import MooncakeConnectorV2

__all__ = ["MooncakeConnectorV2"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the type of a module attribute
    if name == "MooncakeConnectorV2":
        from kvpp_connect.connectors.mooncake_v2.connector import MooncakeConnectorV2

        return MooncakeConnectorV2
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
