"""vLLM's start-up lines about KV capacity, out of a log. The one place that knows their wording.

    0.32            CPU KV cache size: 14,464 tokens, Maximum concurrency for 2,048 tokens per
                    request: 7.06x
    0.8 to 0.31     the same in two lines, in some releases once per rank
    before V1       "# GPU blocks: 27896, # CPU blocks: 2048" and the second line

Pure text in, values out. A log may hold several engines (data parallelism), several ranks of each,
and several starts: engines add up, the smallest rank counts, and the last start.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace

_NUMBER = r"\d(?:[\d.,_'\u00a0\u202f ]*\d)?"
# With the escape character, or without it where a log went through a terminal's clipboard.
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\[\d[0-9;]*m")
# What vLLM's processes put before a line: "(EngineCore_DP0 pid=7)", "(VllmWorker rank=0 pid=7)".
_PROCESS = re.compile(r"\((?P<name>[A-Za-z]\w*)[^()]*?\bpid=(?P<pid>\d+)[^()]*\)")
_SIZE = re.compile(rf"(?:[\w+]+ ){{0,4}}KV cache size: (?P<tokens>{_NUMBER}) tokens.*")
_CONCURRENCY = re.compile(
    rf"Maximum concurrency for (?P<length>{_NUMBER}) tokens per request: (?P<times>\d[\d.,]*)x"
)
_BLOCKS = re.compile(r"# \w+ blocks: (?P<blocks>\d+), # CPU blocks: \d+")
_START = re.compile(r"Initializing an? (?:V\d+ )?LLM engine \(v|vLLM API server version")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapacity:
    """What one engine says.

    Attributes:
        engine: its name in the log, empty where lines carry none.
        text: the line that states the size, from the device name on; empty in old logs.
        tokens: KV cache size; ``None`` where only the concurrency is stated.
        request_tokens: length for which the concurrency is stated; ``None`` where it is not.
        concurrency: requests of that length that fit at once.
        blocks: stated by releases before V1 instead of tokens.
    """

    engine: str = ""
    text: str = ""
    tokens: int | None = None
    request_tokens: int | None = None
    concurrency: float | None = None
    blocks: int | None = None

    @property
    def best_tokens(self) -> int | None:
        """Tokens as stated, or from the concurrency, which is rounded to two digits."""
        if self.tokens is not None:
            return self.tokens
        if self.concurrency is None or self.request_tokens is None:
            return None
        return round(self.concurrency * self.request_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCapacity:
    """What all engines of a log say together.

    Attributes:
        engines: one entry for each engine, in order of appearance.
    """

    engines: tuple[EngineCapacity, ...]

    @property
    def tokens(self) -> int | None:
        """Tokens of all engines; ``None`` where one does not say."""
        stated = [engine.best_tokens for engine in self.engines]
        return None if None in stated else sum(tokens or 0 for tokens in stated)

    @property
    def is_rounded(self) -> bool:
        """Whether tokens come from a rounded concurrency."""
        return any(engine.tokens is None for engine in self.engines)

    @property
    def request_tokens(self) -> int | None:
        """Length of the concurrency; ``None`` where the engines differ or do not say."""
        lengths = {engine.request_tokens for engine in self.engines}
        return lengths.pop() if len(lengths) == 1 else None

    @property
    def concurrency(self) -> float | None:
        """Requests of ``request_tokens`` on all engines together."""
        stated = [engine.concurrency for engine in self.engines]
        if None in stated or self.request_tokens is None:
            return None
        return sum(value or 0.0 for value in stated)


def strip_colours(text: str) -> str:
    """A log without terminal colours."""
    return _ANSI.sub("", text)


def read_capacity(text: str) -> LogCapacity | None:
    """Read a whole log; ``None`` where it does not state a capacity.

    Example:
        >>> found = read_capacity("INFO GPU KV cache size: 1,024 tokens")
        >>> found.tokens
        1024
    """
    # An engine's statements by start: another process, or another start-up line.
    found: dict[str, dict[tuple[str, int], list[EngineCapacity]]] = {}
    starts: Counter[str] = Counter()
    for line in strip_colours(text).splitlines():
        process = _PROCESS.search(line)
        engine = _engine_name(process["name"]) if process else ""
        starts[engine] += bool(_START.search(line))
        key = (process["pid"] if process and engine else "", starts[engine])
        _add(found.setdefault(engine, {}).setdefault(key, []), line, engine)
    engines = [_last_start(by_start) for by_start in found.values()]
    stated = tuple(engine for engine in engines if engine is not None)
    if any(engine.engine for engine in stated):
        # Lines without a name beside named ones are of another release, so of another start.
        stated = tuple(engine for engine in stated if engine.engine)
    return LogCapacity(engines=stated) if stated else None


def _engine_name(process: str) -> str:
    """The engine behind a process's name; ranks of one engine have no name of their own."""
    return process if process.startswith("EngineCore") else ""


def _add(statements: list[EngineCapacity], line: str, engine: str) -> None:
    size, blocks = _SIZE.search(line), _BLOCKS.search(line)
    if size:
        tokens = int(re.sub(r"\D", "", size["tokens"]))
        statements.append(EngineCapacity(engine=engine, text=size[0].strip(), tokens=tokens))
    elif blocks:
        statements.append(EngineCapacity(engine=engine, blocks=int(blocks["blocks"])))
    concurrency = _CONCURRENCY.search(line)
    if concurrency:
        if not statements or statements[-1].concurrency is not None:
            statements.append(EngineCapacity(engine=engine))
        statements[-1] = replace(
            statements[-1],
            request_tokens=int(re.sub(r"\D", "", concurrency["length"])),
            concurrency=_decimal(concurrency["times"]),
        )


def _decimal(text: str) -> float:
    """ "7.06", "1,024.50" or, with a decimal comma, "7,06"."""
    text = text.rstrip(".,")
    whole, mark, digits = text.rpartition("." if "." in text else ",")
    if not mark:
        return float(text)
    return float(f"{re.sub(r'[.,]', '', whole)}.{digits}")


def _last_start(by_start: dict[tuple[str, int], list[EngineCapacity]]) -> EngineCapacity | None:
    """The smallest rank of the last start that states something."""
    starts = [statements for statements in by_start.values() if statements]
    if not starts:
        return None
    return min(starts[-1], key=_size_for_comparison)


def _size_for_comparison(engine: EngineCapacity) -> tuple[float, float]:
    tokens = engine.best_tokens
    return (
        float("inf") if tokens is None else float(tokens),
        float("inf") if engine.blocks is None else float(engine.blocks),
    )
