"""``kv_connector_extra_config`` to one frozen object."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from kvpp_connect.config import parse_positive_seconds, reject_unknown_keys
from kvpp_connect.connectors.mooncake_engine import PROTOCOLS
from kvpp_connect.connectors.mooncake_v2.routes import PullMode
from kvpp_connect.connectors.mooncake_v2.secret import load_keys
from kvpp_connect.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeV2Config:
    """Settings of MooncakeConnectorV2.

    Attributes:
        host: address at which peers reach this node; empty: vLLM's own choice (VLLM_HOST_IP).
        bind_host: local address on which a producer's control channel listens; empty: ``host``.
        control_port: port of a producer's control channel; 0: any free one. With data parallel
            replicas, replica ``i`` uses ``control_port + i``.
        control_secret_file: file with the secret that prefill and decode nodes share; empty: the
            control channel takes questions from everybody who reaches it.
        max_questions_per_s: questions per second that a producer takes from one address.
        protocol: transfer protocol of mooncake; empty: what the platform uses.
        device_name: RDMA devices that mooncake may use, separated by commas; empty: all.
        pull_mode: "shared": a decode node's ranks read each layer once from the prefill node, and
            the rest from each other; "direct": each rank reads all that it needs from there.
        lease_s: seconds for which a producer keeps a finished request's blocks without hearing from
            its reader.
        max_lease_s: seconds for which it keeps them at most, however often the reader renews.
        control_timeout_s: seconds to wait for one answer on the control channel.
        failed_read_hold_s: seconds before blocks of a failed read are used again, since mooncake
            may write them after it reported the failure.
    """

    host: str = ""
    bind_host: str = ""
    control_port: int = 0
    control_secret_file: str = ""
    max_questions_per_s: float = 1000.0
    protocol: str = ""
    device_name: str = ""
    pull_mode: PullMode = "shared"
    lease_s: float = 60.0
    max_lease_s: float = 3600.0
    control_timeout_s: float = 10.0
    failed_read_hold_s: float = 30.0


_WHERE = "kv_connector_extra_config"
_STRINGS = ("host", "bind_host", "control_secret_file", "protocol", "device_name")
_SECONDS = ("lease_s", "max_lease_s", "control_timeout_s", "failed_read_hold_s")
# Where a key has a meaning; everywhere, if it is not listed.
_ROLES = {
    "bind_host": ("kv_producer", "kv_both"),
    "control_port": ("kv_producer", "kv_both"),
    "max_questions_per_s": ("kv_producer", "kv_both"),
    "lease_s": ("kv_producer", "kv_both"),
    "max_lease_s": ("kv_producer", "kv_both"),
    "pull_mode": ("kv_consumer", "kv_both"),
    "control_timeout_s": ("kv_consumer", "kv_both"),
    "failed_read_hold_s": ("kv_consumer", "kv_both"),
}


def parse_extra_config(extra: Mapping[str, Any], kv_role: str = "kv_both") -> MooncakeV2Config:
    """Read and check the settings of a node with the given ``kv_role``.

    Raises:
        ConfigError: an unknown key, one without meaning in this role, a value of the wrong type or
            range, or a secret that cannot be used.
    """
    names = {field.name for field in fields(MooncakeV2Config)}
    reject_unknown_keys(extra, names, f"{_WHERE} of MooncakeConnectorV2")
    _check_roles(extra, kv_role)
    values: dict[str, Any] = dict(extra)
    for name in _STRINGS:
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
    if "max_questions_per_s" in values:
        rate = values["max_questions_per_s"]
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 1 <= rate < 1e9:
            raise ConfigError(f"{_WHERE}.max_questions_per_s is {rate!r}; expected at least 1")
    for name in _SECONDS:
        if name in values:
            values[name] = parse_positive_seconds(values[name], f"{_WHERE}.{name}")
    config = MooncakeV2Config(**values)
    if config.max_lease_s < config.lease_s:
        raise ConfigError(
            f"{_WHERE}.max_lease_s is {config.max_lease_s:g}, less than lease_s "
            f"({config.lease_s:g}); raise it, or lower lease_s"
        )
    load_keys(config.control_secret_file)
    return config


def replica_port(config: MooncakeV2Config, replica: int) -> int:
    """Port of a data parallel replica's control channel; 0 for any free one.

    Raises:
        ConfigError: there is no such port.
    """
    if config.control_port == 0:
        return 0
    port = config.control_port + replica
    if port > 65535:
        raise ConfigError(
            f"{_WHERE}.control_port is {config.control_port}: replica {replica} of data "
            f"parallelism would use {port}; choose a lower one, or 0 for any free port"
        )
    return port


def _check_roles(extra: Mapping[str, Any], kv_role: str) -> None:
    strange = [key for key in extra if kv_role not in _ROLES.get(key, (kv_role,))]
    if strange:
        others = " or ".join(_ROLES[strange[0]])
        raise ConfigError(
            f"{_WHERE} of MooncakeConnectorV2: {', '.join(map(repr, strange))} has no meaning with "
            f'kv_role "{kv_role}"; remove it, or set it on the nodes with kv_role {others}'
        )
