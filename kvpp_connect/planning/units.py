"""Quantities as people write them: "40GiB", "50GB/s", "300us"; and back."""

import math
import re

from kvpp_connect.errors import ConfigError

_BYTES = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
_RATES = {
    **{f"{unit}/s": float(size) for unit, size in _BYTES.items()},
    **{f"{prefix}bit/s": 1000**power / 8 for power, prefix in enumerate("KMGT", 1)},
}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"\s*(?P<number>\d[\d_]*(?:\.\d+)?|\.\d+)\s*(?P<unit>[A-Za-z/]*)\s*")


def parse_bytes(text: str, name: str) -> int:
    """ "40GiB", "1.5 GB" or a plain number of bytes.

    Raises:
        ConfigError: not a size, or less than one byte.
    """
    size = int(_parse(text, name, {"": 1.0, **_BYTES}, "40GiB, 40GB or a number of bytes"))
    if size < 1:
        raise ConfigError(f"{name} is {text!r}; expected at least one byte")
    return size


def parse_rate(text: str, name: str) -> float:
    """ "50GB/s", "46GiB/s" or "400Gbit/s", in bytes per second.

    Raises:
        ConfigError: not a rate, or zero.
    """
    return _positive(_parse(text, name, _RATES, "50GB/s, 46GiB/s or 400Gbit/s"), text, name)


def parse_seconds(text: str, name: str) -> float:
    """ "300us", "0.3ms" or "2s", in seconds.

    Raises:
        ConfigError: not a time, or zero.
    """
    return _positive(_parse(text, name, _SECONDS, "300us, 0.3ms or 2s"), text, name)


def format_bytes(size: float) -> str:
    """Bytes for a person: the largest binary unit that leaves at least 1, three digits or more."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(size) >= 1024**power:
            return f"{size / 1024**power:,.2f} {unit}"
    return f"{size:,.0f} B"


def format_seconds(seconds: float) -> str:
    """Seconds for a person."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:,.2f} {unit}"
    return f"{seconds / 1e-6:,.2f} us"


def _parse(text: str, name: str, units: dict[str, float], examples: str) -> float:
    match = _QUANTITY.fullmatch(text)
    by_case = {unit.lower(): factor for unit, factor in units.items()}
    factor = by_case.get(match["unit"].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{name} is {text!r}; expected something like {examples}")
    return float(match["number"].replace("_", "")) * factor


def _positive(value: float, text: str, name: str) -> float:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} is {text!r}; expected more than zero")
    return value
