"""What the reports of all demos have in common. Pure values; nothing here talks to a server."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Protocol, TypeVar

from rich.text import Text


class JudgedRow(Protocol):
    """A row of a table, judged."""

    @property
    def name(self) -> str:
        """The row in messages."""
        ...

    @property
    def failures(self) -> tuple[str, ...]:
        """What does not hold."""
        ...


Row = TypeVar("Row", bound=JudgedRow)


@dataclass(frozen=True, kw_only=True)
class Report(Generic[Row]):
    """The whole result; `error` is set where the demo could not finish."""

    rows: tuple[Row, ...]
    total_s: float
    error: str | None = None

    @property
    def failures(self) -> tuple[str, ...]:
        """Every check that does not hold, with the row's name."""
        return tuple(f"{row.name}: {failure}" for row in self.rows for failure in row.failures)

    @property
    def ok(self) -> bool:
        """Whether all rows were measured and every check holds."""
        return self.error is None and bool(self.rows) and not self.failures


def to_json(report: Report[Any]) -> str:
    """The report as one JSON object on one line."""
    value: dict[str, Any] = {"ok": report.ok, **asdict(report), "failures": report.failures}
    return json.dumps(value)


Answers = Sequence[tuple[int, ...]]


def compare_answers(tokens: Answers, plain: Answers) -> tuple[int, list[str]]:
    """How many answers are those of plain vLLM, and what is wrong if not all are."""
    identical = sum(mine == theirs for mine, theirs in zip(tokens, plain, strict=True))
    wrong = len(plain) - identical
    return identical, [f"{wrong} of {len(plain)} answers differ from plain vLLM"] if wrong else []


def answers_text(identical: int, requests: int) -> Text:
    """The same for a table's cell."""
    same = identical == requests
    text = f"{'identical' if same else 'DIFFERENT'} ({identical} of {requests})"
    return Text(text, style="green" if same else "bold red")
