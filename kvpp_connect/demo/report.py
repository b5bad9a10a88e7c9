"""What the demo measured, judged and shown. Pure values; nothing here talks to a server."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from kvpp_connect.demo.verdict import Report, answers_text, compare_answers
from kvpp_connect.layout import capacity_ratio

# Blocks are whole, so a measured ratio misses the formula a little; a wrong layout misses by 1/L.
RATIO_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PullCounters:
    """How much a decode server pulled during the requests."""

    pulled_bytes: int  # that came over the wire
    pulled_tokens: int  # prompt tokens whose KV the decode server did not have
    bytes_per_token: int  # logical KV bytes of one token, all layers, one copy

    @property
    def logical_bytes(self) -> int:
        """KV bytes that the decode server lacked."""
        return self.pulled_tokens * self.bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMeasurement:
    """Everything observed about one row of the table."""

    name: str
    title: str
    tokens: tuple[tuple[int, ...], ...]  # per request
    prompt_tokens: int  # of all requests together
    kv_cache_line: str  # vLLM's own words
    kv_cache_tokens: int
    kvpp_ranks: int | None  # None without KVPP
    scratch_share: float = 1.0  # blocks of a scratch slot over all blocks
    layers: int
    startup_s: float
    requests_s: float
    pull: PullCounters | None  # None where nothing is transferred


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReport:
    """One row of the table, judged against the plain row."""

    name: str
    title: str
    requests: int
    identical: int
    prompt_tokens: int
    kv_cache_line: str
    kv_cache_tokens: int
    kv_cache_ratio: float  # to the plain row
    kv_cache_ratio_formula: float
    pulled_bytes: int | None
    logical_bytes: int | None
    startup_s: float
    requests_s: float
    failures: tuple[str, ...]


DemoReport = Report[RowReport]


def judge(row: RowMeasurement, plain: RowMeasurement) -> RowReport:
    """Compare a row with plain vLLM, which may be the row itself."""
    identical, failures = compare_answers(row.tokens, plain.tokens)
    formula = 1.0
    if row.kvpp_ranks is not None:
        formula = capacity_ratio(row.layers, row.kvpp_ranks, row.scratch_share)
    ratio = row.kv_cache_tokens / plain.kv_cache_tokens
    if abs(ratio / formula - 1) > RATIO_TOLERANCE:
        failures.append(f"KV cache is {ratio:.3f} x plain vLLM, the formula says {formula:.3f} x")
    if row.pull is not None:
        failures += _pull_failures(row.pull, row.prompt_tokens)
    return RowReport(
        name=row.name,
        title=row.title,
        requests=len(row.tokens),
        identical=identical,
        prompt_tokens=row.prompt_tokens,
        kv_cache_line=row.kv_cache_line,
        kv_cache_tokens=row.kv_cache_tokens,
        kv_cache_ratio=round(ratio, 4),
        kv_cache_ratio_formula=round(formula, 4),
        pulled_bytes=row.pull.pulled_bytes if row.pull else None,
        logical_bytes=row.pull.logical_bytes if row.pull else None,
        startup_s=round(row.startup_s, 2),
        requests_s=round(row.requests_s, 3),
        failures=tuple(failures),
    )


def _pull_failures(pull: PullCounters, prompt_tokens: int) -> list[str]:
    """Checks that the decode server really pulled, and no more tokens than there are."""
    if pull.pulled_bytes <= 0 or pull.pulled_tokens <= 0:
        return ["the decode server pulled nothing: it has recomputed every prompt"]
    if pull.pulled_bytes < pull.logical_bytes:
        return [f"pulled {pull.pulled_bytes} bytes, less than the {pull.logical_bytes} it lacked"]
    if pull.pulled_tokens > prompt_tokens:
        return [f"pulled the KV of {pull.pulled_tokens} tokens; prompts have {prompt_tokens}"]
    return []


def to_table(report: DemoReport) -> Table:
    """The report as a rich table."""
    table = Table(title="KVPP on real vLLM servers", title_justify="left")
    for heading in ("setup", "tokens", "KV cache size (vLLM)", "x plain (formula)"):
        table.add_column(heading)
    table.add_column("pulled / logical KV", justify="right")
    table.add_column("requests", justify="right")
    for row in report.rows:
        ratio = f"{row.kv_cache_ratio:.2f} ({row.kv_cache_ratio_formula:.2f})"
        table.add_row(
            row.title,
            answers_text(row.identical, row.requests),
            f"{row.kv_cache_tokens:,} tokens",
            ratio,
            _pull_text(row),
            f"{row.requests_s:.1f} s",
        )
    return table


def kv_cache_lines(rows: Sequence[RowReport]) -> str:
    """vLLM's own lines, one per row."""
    width = max((len(row.name) for row in rows), default=0)
    return "\n".join(f"{row.name:{width}}  {row.kv_cache_line}" for row in rows)


def _pull_text(row: RowReport) -> str:
    if row.pulled_bytes is None or row.logical_bytes is None:
        return "-"
    ratio = f" = {row.pulled_bytes / row.logical_bytes:.2f}" if row.logical_bytes else ""
    return f"{row.pulled_bytes / 1e6:.1f} / {row.logical_bytes / 1e6:.1f} MB{ratio}"
