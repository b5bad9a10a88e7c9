"""``kv_connector_extra_config`` to one frozen object."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from kvpp_connect.config import parse_positive_seconds, reject_unknown_keys
from kvpp_connect.connectors.mooncake_engine import PROTOCOLS
from kvpp_connect.connectors.mooncake_v2.routes import PullMode
from kvpp_connect.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeV2Config:
    """Settings of MooncakeConnectorV2.

    Attributes:
        host: address at which peers reach this node; empty: vLLM's own choice (VLLM_HOST_IP).
        control_port: port of a producer's control channel; 0: any free one. With data parallel
            replicas, replica ``i`` uses ``control_port + i``.
        protocol: transfer protocol of mooncake; empty: what the platform uses.
        pull_mode: "shared": a decode node's ranks read each layer once from the prefill node, and
            the rest from each other; "direct": each rank reads all that it needs from there.
        lease_s: seconds for which a producer keeps a finished request's blocks for its reader.
        control_timeout_s: seconds to wait for one answer on the control channel.
        failed_read_hold_s: seconds before blocks of a failed read are used again, since mooncake
            may write them after it reported the failure.
    """

    host: str = ""
    control_port: int = 0
    protocol: str = ""
    pull_mode: PullMode = "shared"
    lease_s: float = 300.0
    control_timeout_s: float = 10.0
    failed_read_hold_s: float = 30.0


_WHERE = "kv_connector_extra_config"


def parse_extra_config(extra: Mapping[str, Any]) -> MooncakeV2Config:
    """Read and check the settings.

    Raises:
        ConfigError: an unknown key, or a value of the wrong type or range.
    """
    names = {field.name for field in fields(MooncakeV2Config)}
    reject_unknown_keys(extra, names, f"{_WHERE} of MooncakeConnectorV2")
    values: dict[str, Any] = dict(extra)
    for name in ("host", "protocol"):
        if not isinstance(values.get(name, ""), str):
            raise ConfigError(f"{_WHERE}.{name} is {values[name]!r}; expected a string")
    if values.get("protocol") and values["protocol"] not in PROTOCOLS:
        raise ConfigError(
            f"{_WHERE}.protocol is {values['protocol']!r}; expected one of {', '.join(PROTOCOLS)}"
        )
    modes = get_args(PullMode)
    if values.get("pull_mode", modes[0]) not in modes:
        raise ConfigError(
            f"{_WHERE}.pull_mode is {values['pull_mode']!r}; expected one of {', '.join(modes)}"
        )
    port = values.get("control_port", 0)
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ConfigError(f"{_WHERE}.control_port is {port!r}; expected 0 to 65535")
    for name in ("lease_s", "control_timeout_s", "failed_read_hold_s"):
        if name in values:
            values[name] = parse_positive_seconds(values[name], f"{_WHERE}.{name}")
    return MooncakeV2Config(**values)
