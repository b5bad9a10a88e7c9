"""Where settings of stores stand: plain keys, over environment names, over a file.

Reads the environment and the file, and nothing else.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from kvpp_connect.config import reject_unknown_keys
from kvpp_connect.errors import ConfigError

EXTRA = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting and its names.

    Attributes:
        key: plain key, and field of the settings object.
        parse: takes a value and where it stands; raises ConfigError.
        env: environment names, first one first.
        in_file: name in the file; empty: ``key``.
    """

    key: str
    parse: Callable[[object, str], Any]
    env: tuple[str, ...] = ()
    in_file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    """A file that the store's users have: named by the environment variable ``env``."""

    env: str
    syntax: Literal["json", "conf"]


def read_file(file: SettingsFile, environ: Mapping[str, str]) -> tuple[str, dict[str, object]]:
    """Path and content of the file, or an empty path where the environment names none.

    Raises:
        ConfigError: the file cannot be read or understood.
    """
    path = environ.get(file.env, "")
    if not path:
        return "", {}
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(
            f"cannot read {path!r} ({reason}), which {file.env} names; correct the path or unset it"
        ) from error
    if file.syntax == "conf":
        return path, _parse_conf(content, path)
    try:
        values = json.loads(content)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}, which {file.env} names, is no JSON: {error.msg} in line {error.lineno}"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}, which {file.env} names, holds no JSON object")
    return path, cast("dict[str, object]", values)


def _parse_conf(content: str, path: str) -> dict[str, object]:
    values: dict[str, object] = {}
    for number, line in enumerate(content.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        key, equals, value = stripped.partition("=")
        if not equals:
            raise ConfigError(f"{path}, line {number}: {stripped!r} is not of the form key = value")
        values[key.strip()] = value.strip()
    return values


def collect(
    settings: tuple[Setting, ...],
    extra: Mapping[str, Any],
    environ: Mapping[str, str],
    path: str,
    in_file: Mapping[str, object],
) -> dict[str, Any]:
    """Parsed values of those settings that stand anywhere, by key.

    Raises:
        ConfigError: an unknown plain key, or a value that cannot be used.
    """
    reject_unknown_keys(extra, {setting.key for setting in settings}, EXTRA)
    values: dict[str, Any] = {}
    for setting in settings:
        name = setting.in_file or setting.key
        env = next((name for name in setting.env if environ.get(name)), "")
        if setting.key in extra:
            values[setting.key] = setting.parse(extra[setting.key], f"{EXTRA}.{setting.key}")
        elif env:
            values[setting.key] = setting.parse(environ[env], f"environment variable {env}")
        elif in_file.get(name) is not None:
            values[setting.key] = setting.parse(in_file[name], f"{path}: {name}")
    return values


def missing(setting: Setting, file: SettingsFile, path: str) -> ConfigError:
    """The error for a setting that stands nowhere."""
    name = setting.in_file or setting.key
    inside = f"{name} in {path}" if path else f"{name} in a file that {file.env} names"
    ways = (f"{EXTRA}.{setting.key}", *(f"environment variable {env}" for env in setting.env))
    return ConfigError(f"no {setting.key} is set; set {', '.join(ways)} or {inside}")
