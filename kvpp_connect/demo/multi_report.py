"""What `kvpp demo multi` measured, judged and shown. Pure: nothing here talks to a server."""

from collections.abc import Mapping
from dataclasses import dataclass

from rich.table import Table

from kvpp_connect.demo.verdict import Report, answers_text, compare_answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The same requests once more, and what the servers' counters gained meanwhile.

    Attributes:
        tokens: of each answer.
        pool_hit_tokens: prompt tokens that came from the pool, by prefill node.
        expected_hit_tokens: of all prefill nodes together, as counted by hand.
        pulled_tokens: prompt tokens whose KV the decode node pulled.
        held_blocks: nodes on which requests, leases or puts still held blocks at the end.
    """

    name: str
    title: str
    tokens: tuple[tuple[int, ...], ...]
    prompt_tokens: int
    requests_s: float
    pool_hit_tokens: Mapping[str, int]
    expected_hit_tokens: int = 0
    pulled_tokens: int = 0
    held_blocks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """One row of the table, judged against the plain row."""

    name: str
    title: str
    requests: int
    identical: int
    prompt_tokens: int
    pool_hit_tokens: Mapping[str, int]
    expected_hit_tokens: int
    pulled_tokens: int
    requests_s: float
    failures: tuple[str, ...]


MultiReport = Report[PhaseReport]


def judge(phase: Phase, plain: Phase) -> PhaseReport:
    """Compare a phase with plain vLLM (it may be that one itself), and with what was expected."""
    identical, failures = compare_answers(phase.tokens, plain.tokens)
    hit = sum(phase.pool_hit_tokens.values())
    if hit != phase.expected_hit_tokens:
        failures.append(f"{hit} tokens came from the pool, {phase.expected_hit_tokens} should have")
    idle = [name for name, tokens in phase.pool_hit_tokens.items() if hit and not tokens]
    if idle:
        failures.append(f"nothing came from the pool on {', '.join(idle)}")
    if phase.pool_hit_tokens and phase.pulled_tokens != phase.prompt_tokens:
        failures.append(
            f"the decode node pulled {phase.pulled_tokens} of {phase.prompt_tokens} prompt tokens"
        )
    if phase.held_blocks:
        failures.append(f"blocks are still held on {', '.join(phase.held_blocks)}")
    return PhaseReport(
        name=phase.name,
        title=phase.title,
        requests=len(phase.tokens),
        identical=identical,
        prompt_tokens=phase.prompt_tokens,
        pool_hit_tokens=dict(phase.pool_hit_tokens),
        expected_hit_tokens=phase.expected_hit_tokens,
        pulled_tokens=phase.pulled_tokens,
        requests_s=round(phase.requests_s, 3),
        failures=tuple(failures),
    )


def to_table(report: MultiReport) -> Table:
    """The report as a rich table."""
    table = Table(title="P/D and a KV pool together", title_justify="left")
    table.add_column("the same requests")
    table.add_column("tokens")
    for heading in ("from the pool (by hand)", "on P1", "on P2", "pulled by D", "requests"):
        table.add_column(heading, justify="right")
    for row in report.rows:
        hits = row.pool_hit_tokens
        total = f"{sum(hits.values()):,} ({row.expected_hit_tokens:,})"
        table.add_row(
            row.title,
            answers_text(row.identical, row.requests),
            total if hits else "-",
            *(f"{hits[name]:,}" if name in hits else "-" for name in ("p1", "p2")),
            f"{row.pulled_tokens:,} of {row.prompt_tokens:,}" if hits else "-",
            f"{row.requests_s:.1f} s",
        )
    return table
