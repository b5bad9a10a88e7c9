"""vLLM's ``additional_config`` to one frozen object, parsed once and never modified."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args

from kvpp_connect.errors import ConfigError

ENABLE_KEY = "enable_kvpp"
OPTIONS_KEY = "kvpp"

Mode = Literal["auto", "full", "compact"]
Transport = Literal["auto", "collective", "shared_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvppConfig:
    """Settings of KVPP on one engine.

    Attributes:
        enabled: whether KVPP is on (``additional_config["enable_kvpp"]``).
        mode: ``full`` broadcasts a layer's complete bundle into whole-layer scratch; ``compact``
            only the blocks of running requests, into scratch that holds no more than those;
            ``auto`` is compact wherever the deployment allows it, else full.
        running_tokens: tokens that running requests may hold at once in ``compact`` mode; empty: a
            quarter of the cache, at least one request of maximum length.
        transport: how broadcasts travel: ``collective`` through ``torch.distributed``,
            ``shared_memory`` between ranks on one machine without an accelerator; ``auto`` takes
            shared memory where that works, else the collective.
        broadcast_timeout_s: seconds after which a broadcast that makes no progress is an error.
    """

    enabled: bool = False
    mode: Mode = "auto"
    running_tokens: int | None = None
    transport: Transport = "auto"
    broadcast_timeout_s: float = 120.0


def parse_bool(value: object, name: str) -> bool:
    """Accept a bool, or the strings "true" and "false" in any case; refuse the rest by name."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ConfigError(
        f'{name} is {value!r} ({type(value).__name__}); expected true or false (or "true"/"false")'
    )


def reject_unknown_keys(given: Mapping[str, Any], known: set[str], where: str) -> None:
    """Refuse keys that nobody reads, naming the nearest right one.

    Raises:
        ConfigError: a key of ``given`` is not in ``known``.
    """
    for key in given:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
        raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def parse_positive_seconds(value: object, name: str) -> float:
    """Accept a finite number of seconds greater than 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigError(f"{name} is {value!r}; expected a number of seconds greater than 0")
    return float(value)


def parse_additional_config(additional_config: object) -> KvppConfig:
    """Read KVPP's keys out of vLLM's ``additional_config``; other keys belong to others.

    Raises:
        ConfigError: a value of ours has the wrong type, or a key under ``kvpp`` is unknown.
    """
    if not isinstance(additional_config, Mapping):
        return KvppConfig()
    given = cast("Mapping[str, Any]", additional_config)
    enabled = parse_bool(given.get(ENABLE_KEY, False), f"additional_config.{ENABLE_KEY}")
    options = given.get(OPTIONS_KEY, {})
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"additional_config.{OPTIONS_KEY} is {options!r}; expected an object of settings"
        )
    return _parse_options(cast("Mapping[str, Any]", options), enabled)


def _parse_options(options: Mapping[str, Any], enabled: bool) -> KvppConfig:
    where = f"additional_config.{OPTIONS_KEY}"
    known = {field.name for field in fields(KvppConfig)} - {"enabled"}
    reject_unknown_keys(options, known, where)
    defaults = KvppConfig()
    mode = _parse_choice(options.get("mode", defaults.mode), get_args(Mode), f"{where}.mode")
    running_tokens = options.get("running_tokens")
    if running_tokens is not None and (
        isinstance(running_tokens, bool)
        or not isinstance(running_tokens, int)
        or running_tokens < 1
    ):
        raise ConfigError(
            f"{where}.running_tokens is {running_tokens!r}; expected a number of tokens"
        )
    if running_tokens is not None and mode == "full":
        raise ConfigError(f'{where}.running_tokens has no meaning with "mode": "full"')
    transport = options.get("transport", defaults.transport)
    timeout = options.get("broadcast_timeout_s", defaults.broadcast_timeout_s)
    return KvppConfig(
        enabled=enabled,
        mode=mode,
        running_tokens=running_tokens,
        transport=_parse_choice(transport, get_args(Transport), f"{where}.transport"),
        broadcast_timeout_s=parse_positive_seconds(timeout, f"{where}.broadcast_timeout_s"),
    )


def _parse_choice(value: Any, choices: tuple[Any, ...], name: str) -> Any:  # noqa: ANN401 - a Literal
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; expected one of: {', '.join(choices)}")
    return value
