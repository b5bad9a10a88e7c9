"""Reading the log files of servers: the tail, the root cause, the KV cache size.

Pure text in, values out. Nothing here decides whether a server is healthy.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from kvpp_connect.planning.serverlog import read_capacity, strip_colours

# What vLLM's processes put before each line: "(Worker_TP0 pid=7) ERROR 11-30 03:37:17 [x.py:9] ".
_PROCESS = re.compile(r"^\((?P<process>\S+) pid=\d+\) ?")
_LEVEL = re.compile(r"^(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[^\]]*\] ?")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception)\b:? ?\S")
_ARGPARSE = re.compile(r"^\S+: error: ")
# Lines that only say that another process has failed.
_WRAPPERS = (
    "initialization failed due to an exception",
    "Engine core initialization failed",
    "See root cause above",
    "EngineDeadError",
    "cancelled",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheSize:
    """vLLM's own statement of its KV capacity."""

    text: str
    tokens: int


def read_log(path: Path) -> str:
    """The whole log without colours; empty where there is no file."""
    try:
        return strip_colours(path.read_text(errors="replace"))
    except FileNotFoundError:
        return ""


def tail(text: str, *, lines: int = 30, line_chars: int = 300) -> str:
    """The last lines of a log, long ones cut."""
    kept = [line[:line_chars] for line in text.rstrip().splitlines()[-lines:]]
    return "\n".join(kept)


def kv_cache_size(text: str) -> KvCacheSize | None:
    """What the server of a log says about its KV cache when it last started.

    "INFO [utils.py:9] CPU KV cache size: 14,464 tokens, Maximum ..." gives 14464 tokens.
    """
    found = read_capacity(text)
    if found is None or found.engines[0].tokens is None:
        return None
    return KvCacheSize(text=found.engines[0].text, tokens=found.engines[0].tokens)


def root_cause(text: str) -> str | None:
    """The line that most probably says why a server failed.

    vLLM prints the traceback of the failing process first and those of the processes that only
    noticed it later, so the last exception line that is not such a notice is taken.
    """
    messages = [_split_prefix(line) for line in text.splitlines()]
    exceptions = [
        number
        for number, (_, message) in enumerate(messages)
        if _EXCEPTION.match(message) or _ARGPARSE.match(message)
    ]
    causes = [n for n in exceptions if not any(w in messages[n][1] for w in _WRAPPERS)]
    if causes or exceptions:
        return _with_details(messages, (causes or exceptions)[-1])
    errors = [message for level, message in messages if level == "ERROR" and message.strip()]
    return errors[-1] if errors else None


def _split_prefix(line: str) -> tuple[str, str]:
    """Level (or "") and message of one line."""
    line = _PROCESS.sub("", line)
    match = _LEVEL.match(line)
    return (match["level"], line[match.end() :]) if match else ("", line)


def _with_details(messages: list[tuple[str, str]], number: int) -> str:
    """An exception line, joined with the next line where pydantic puts the reason there."""
    message = messages[number][1].strip()
    if "validation error" in message and number + 1 < len(messages):
        message += " " + messages[number + 1][1].strip()
    return message
