"""What `kvpp demo pool` measured, judged and shown. Pure values; nothing here talks to a server."""

from dataclasses import dataclass

from rich.table import Table

from kvpp_connect.connectors.ascend_store.objects import HEADER_BYTES
from kvpp_connect.demo.verdict import Report, answers_text, compare_answers


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolContents:
    """The pool after a row: what its master says, and what should be there.

    Attributes:
        objects: number of them.
        stored_bytes: of all objects, headers included.
        expected_objects: a block of each cut times its shards.
        logical_bytes: KV of these blocks, one copy for each cut.
    """

    objects: int
    stored_bytes: int
    expected_objects: int
    logical_bytes: int

    @property
    def expected_bytes(self) -> int:
        """Each logical byte once, and the headers."""
        return self.logical_bytes + self.expected_objects * HEADER_BYTES

    @property
    def bytes_per_kv_byte(self) -> float:
        """1.0: nothing is stored twice."""
        return self.stored_bytes / self.logical_bytes if self.logical_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRowMeasurement:
    """Everything observed about one row.

    Attributes:
        tokens: of each answer.
        prompt_tokens: of all requests together.
        hit_tokens: that came from the pool, by the server's own counter.
        expected_hit_tokens: as counted by hand.
        computed_tokens: of prompts, by vLLM's own counter.
        first_token_s: mean time to the first token, by vLLM's own clock.
        pool: None for a server without pool.
    """

    name: str
    title: str
    tokens: tuple[tuple[int, ...], ...]
    prompt_tokens: int
    hit_tokens: int
    expected_hit_tokens: int
    computed_tokens: int
    first_token_s: float
    startup_s: float
    requests_s: float
    pool: PoolContents | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRowReport:
    """One row of the table, judged against the plain row."""

    name: str
    title: str
    requests: int
    identical: int
    prompt_tokens: int
    hit_tokens: int
    expected_hit_tokens: int
    computed_tokens: int
    first_token_s: float
    objects: int | None
    stored_bytes: int | None
    logical_bytes: int | None
    bytes_per_kv_byte: float | None
    startup_s: float
    requests_s: float
    failures: tuple[str, ...]


PoolReport = Report[PoolRowReport]


def judge(row: PoolRowMeasurement, plain: PoolRowMeasurement) -> PoolRowReport:
    """Compare a row with plain vLLM, which may be the row itself, and with what was expected."""
    identical, failures = compare_answers(row.tokens, plain.tokens)
    if row.hit_tokens != row.expected_hit_tokens:
        failures.append(
            f"{row.hit_tokens} tokens came from the pool, {row.expected_hit_tokens} should have"
        )
    if row.computed_tokens != row.prompt_tokens - row.hit_tokens:
        failures.append(
            f"{row.computed_tokens} prompt tokens were computed, with {row.hit_tokens} of "
            f"{row.prompt_tokens} from the pool"
        )
    if row.pool is not None:
        failures += _pool_failures(row.pool)
    return PoolRowReport(
        name=row.name,
        title=row.title,
        requests=len(row.tokens),
        identical=identical,
        prompt_tokens=row.prompt_tokens,
        hit_tokens=row.hit_tokens,
        expected_hit_tokens=row.expected_hit_tokens,
        computed_tokens=row.computed_tokens,
        first_token_s=round(row.first_token_s, 4),
        objects=row.pool.objects if row.pool else None,
        stored_bytes=row.pool.stored_bytes if row.pool else None,
        logical_bytes=row.pool.logical_bytes if row.pool else None,
        bytes_per_kv_byte=round(row.pool.bytes_per_kv_byte, 5) if row.pool else None,
        startup_s=round(row.startup_s, 2),
        requests_s=round(row.requests_s, 3),
        failures=tuple(failures),
    )


def _pool_failures(pool: PoolContents) -> list[str]:
    if pool.objects != pool.expected_objects:
        return [f"the pool has {pool.objects} objects, {pool.expected_objects} should be there"]
    if pool.stored_bytes != pool.expected_bytes:
        return [f"the pool has {pool.stored_bytes} bytes, {pool.expected_bytes} should be there"]
    return []


def to_table(report: PoolReport) -> Table:
    """The report as a rich table."""
    table = Table(title="One KV pool, several vLLM servers", title_justify="left")
    table.add_column("server", no_wrap=True)
    table.add_column("tokens", no_wrap=True)
    for heading in (
        "pool hit (by hand)",
        "prefill computed",
        "first token",
        "objects",
        "MB in pool",
        "per KV byte",
    ):
        table.add_column(heading, justify="right")
    for row in report.rows:
        hit = f"{row.hit_tokens:,} ({row.expected_hit_tokens:,})"
        table.add_row(
            row.title,
            answers_text(row.identical, row.requests),
            "-" if row.objects is None else hit,
            f"{row.computed_tokens:,} of {row.prompt_tokens:,}",
            f"{row.first_token_s * 1e3:,.0f} ms",
            "-" if row.objects is None else f"{row.objects:,}",
            "-" if row.stored_bytes is None else f"{row.stored_bytes / 1e6:.1f}",
            "-" if row.bytes_per_kv_byte is None else f"{row.bytes_per_kv_byte:.4f}",
        )
    return table
