"""What the planning commands share: JSON documents, tables, lines."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SCHEMA = 1
"""Version of the JSON documents, described in docs/json.md. 1: first one."""

_WIDTH_WITHOUT_TERMINAL = 140

# Options that several commands share.
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
BlockSize = Annotated[
    int | None, typer.Option(help="As vLLM's. Default: what vLLM chooses on the device.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda or npu.")]
Dtype = Annotated[str, typer.Option(help="As vLLM's --dtype.")]
KvCacheDtype = Annotated[str, typer.Option(help="As vLLM's --kv-cache-dtype.")]
MaxNumSeqs = Annotated[int, typer.Option(help="As vLLM's; bounds the scratch of compact mode.")]
Pcp = Annotated[int, typer.Option(help="Prefill context parallel size.")]
Pp = Annotated[int, typer.Option(help="Pipeline parallel size.")]
RunningTokens = Annotated[int | None, typer.Option(help="kvpp.running_tokens of compact mode.")]


def print_json(command: str, document: dict[str, Any]) -> None:
    """Print one JSON object that says which command made it, and by which schema."""
    typer.echo(json.dumps({"schema": SCHEMA, "command": command, **document}, indent=2))


def print_problem(message: str) -> None:
    """One line on stderr, as every error of ours."""
    typer.echo(f"kvpp: {' '.join(message.split())}", err=True)


def make_console() -> "Console":
    """A console as wide as the terminal, or as its tables where there is none."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
    return Console(highlight=False, width=width)


def make_table(*columns: str, left: int = 1) -> "Table":
    """A table with its first ``left`` columns aligned to the left, the others to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right")
    return table
