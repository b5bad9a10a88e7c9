"""Single settings of stores, as files, environment and plain keys spell them.

Each parser takes the value and ``where`` it stands, and raises a ConfigError that names both.
"""

import re
from collections.abc import Callable

from kvpp_connect.connectors.ascend_store.backends.address import parse_address
from kvpp_connect.errors import ConfigError

_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*")
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


def text(value: object, where: str) -> str:
    """A string, without the space around it."""
    if not isinstance(value, str):
        raise ConfigError(f"{where} is {value!r}; expected a string")
    return value.strip()


def address(value: object, where: str) -> str:
    """ "host:port"; kept as text."""
    return str(parse_address(text(value, where), where))


def url(value: object, where: str) -> str:
    """ "tcp://host:port"; kept as text."""
    given = text(value, where)
    if not given.startswith("tcp://"):
        raise ConfigError(f"{where} is {given!r}; expected tcp://host:port")
    parse_address(given.removeprefix("tcp://"), where)
    return given


def size(value: object, where: str) -> int:
    """A number of bytes, or one with a unit: "1GB", "512mb", "2.5 GiB".

    As in the stores' own files, all units are powers of 1024: "1GB" is "1GiB".
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    power = _unit_power(match["unit"]) if match else None
    if match is None or power is None:
        raise ConfigError(f"{where} is {value!r}; expected bytes, or a size such as 512MB or 4GB")
    return int(float(match["number"]) * 1024**power)


def _unit_power(unit: str) -> int | None:
    prefix = unit.lower().removesuffix("b").removesuffix("i")
    return ("", "k", "m", "g", "t").index(prefix) if prefix in ("", "k", "m", "g", "t") else None


def switch(value: object, where: str) -> bool:
    """A bool, or a word for one."""
    word = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
    if word not in (*_TRUE, *_FALSE):
        raise ConfigError(f"{where} is {value!r}; expected true or false")
    return word in _TRUE


def integer(least: int) -> Callable[[object, str], int]:
    """A parser of whole numbers from ``least`` on, also written as strings."""

    def parse(value: object, where: str) -> int:
        if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{where} is {value!r}; expected a whole number from {least} on")
        return value

    return parse


def choice(*words: str) -> Callable[[object, str], str]:
    """A parser of one of some words, in any case."""

    def parse(value: object, where: str) -> str:
        word = text(value, where).lower()
        if word not in words:
            expected = ", ".join(filter(None, words))
            raise ConfigError(f"{where} is {value!r}; expected one of: {expected}")
        return word

    return parse
