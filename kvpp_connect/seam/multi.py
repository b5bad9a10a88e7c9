"""An engine's connectors: the one that is configured, or the children of vLLM's MultiConnector.

Reads settings only, given as vLLM's object or as the user's JSON; imports no vLLM.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpp_connect.errors import ConfigError

MULTI = "MultiConnector"
SUPPORTED_CONNECTORS = ("AscendStoreConnector", "MooncakeConnectorV2")
CONNECTOR_MODULE = "kvpp_connect.connectors"

_CHILDREN = "kv_connector_extra_config.connectors"
# What vLLM reads of the whole configuration alone, or sets itself.
_NOT_IN_A_CHILD = {
    "engine_id": "all children get that of the whole",
    "kv_load_failure_policy": "vLLM reads that of the whole only",
}


@dataclass(frozen=True, slots=True)
class Named:
    """A connector as a configuration names it; ``where`` says in which place."""

    name: str
    path: str
    where: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether it knows owners."""
        ours = self.path in ("", CONNECTOR_MODULE) or self.path.startswith(CONNECTOR_MODULE + ".")
        return self.name in SUPPORTED_CONNECTORS and ours


def is_multi(name: object, path: object) -> bool:
    """Whether this is vLLM's own MultiConnector."""
    return name == MULTI and not path


def children(extra: object) -> tuple[Mapping[str, Any], ...]:
    """The configurations inside a MultiConnector's ``kv_connector_extra_config``.

    Raises:
        ConfigError: they are not what vLLM can read.
    """
    given = extra.get("connectors") if isinstance(extra, Mapping) else None
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ConfigError(
            f"{_CHILDREN} of {MULTI} is {given!r}; expected a list with one object per connector"
        )
    for number, child in enumerate(given):
        if not isinstance(child, Mapping) or not isinstance(child.get("kv_connector"), str):
            raise ConfigError(
                f"{_CHILDREN}[{number}] is {child!r}; expected an object with kv_connector"
            )
    return tuple(given)


def named(transfer: Mapping[str, Any], where: str = "") -> Named:
    """One connector's name and place."""
    path = transfer.get("kv_connector_module_path")
    return Named(str(transfer.get("kv_connector")), str(path or ""), where)


def named_children(given: Sequence[Mapping[str, Any]]) -> tuple[Named, ...]:
    """Names and places of a MultiConnector's children."""
    return tuple(named(child, f"{_CHILDREN}[{n}]") for n, child in enumerate(given))


def check_children(given: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what vLLM's MultiConnector would ignore, or stumble over later, around ours.

    Raises:
        ConfigError: names the setting and what to change.
    """
    names = named_children(given)
    ours = [child.name for child in names if child.is_ours]
    if not ours:
        return
    for child, settings in zip(names, given, strict=True):
        for key, reason in _NOT_IN_A_CHILD.items():
            if key in settings:
                raise ConfigError(
                    f"{child.where}.{key} is {settings[key]!r}: {reason}. Set {key} beside "
                    f'"kv_connector": "{MULTI}" instead'
                )
        if child.is_ours and not settings.get("kv_role"):
            raise ConfigError(
                f"{child.where} has no kv_role; set kv_producer, kv_consumer or kv_both for "
                f"{child.name}"
            )
        if child.is_ours and ours.count(child.name) > 1:
            raise ConfigError(
                f"{_CHILDREN} names {child.name} {ours.count(child.name)} times: their hand-overs "
                "and counters could not be told apart. Keep one"
            )


def check_handshakes(names: Sequence[str]) -> None:
    """Refuse several connectors whose workers have something to tell the scheduler at start-up.

    Raises:
        ConfigError: vLLM's MultiConnector hands on what the first of them tells, to all.
    """
    if len(names) > 1:
        raise ConfigError(
            f"{_CHILDREN}: {' and '.join(names)} each describe their workers' caches when the "
            f"engine starts, and {MULTI} hands on the first description only. Keep one of them"
        )
