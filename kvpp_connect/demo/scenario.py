"""What all scenarios of `kvpp demo` have in common: options, model, ports, logs, the result."""

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from kvpp_connect.demo.interrupt import Interrupted
from kvpp_connect.demo.model import ModelSpec, write_checkpoint
from kvpp_connect.demo.ports import free_ports
from kvpp_connect.demo.process import ServerError
from kvpp_connect.demo.verdict import Report, Row, to_json
from kvpp_connect.errors import KvppError

CACHE_DIR = Path(".cache/kvpp")
Measured = TypeVar("Measured")
_PLAIN_WIDTH = 140  # columns where the output is not a terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the user may choose."""

    layers: int = 6
    kv_cache_bytes: int = 200_000_000  # per rank
    timeout_s: float = 600.0  # for the whole demo
    base_port: int | None = None  # None: free ports
    log_dir: Path | None = None  # None: a temporary directory
    keep_logs: bool = False
    as_json: bool = False


def run_scenario(options: DemoOptions, run: Callable[[Path, Console], bool]) -> int:
    """Run a scenario and answer the exit code; raises nothing that a user may cause.

    Args:
        run: gets the directory for logs and the console for progress; says whether all checks hold.
    """
    progress = Console(stderr=True)
    own_log_dir = options.log_dir is None
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="kvpp-demo-"))
    code = 1
    try:
        code = 0 if run(log_dir, progress) else 1
    except KeyboardInterrupt as error:
        code = error.exit_code if isinstance(error, Interrupted) else 130
        progress.print(f"stopped by {error or 'Ctrl-C'}; no server is left", style="yellow")
    finally:
        if own_log_dir and not options.keep_logs and code != 1:
            shutil.rmtree(log_dir, ignore_errors=True)
        else:
            progress.print(f"logs: {log_dir}", soft_wrap=True)
    return code


def choose_ports(base_port: int | None, count: int) -> tuple[int, ...]:
    """Ports from ``base_port`` on, or free ones."""
    if base_port is None:
        return free_ports(count)
    return tuple(range(base_port, base_port + count))


@contextlib.contextmanager
def model_folder(spec: ModelSpec) -> Iterator[Path]:
    """The checkpoint in the cache below the current directory, or in a temporary directory."""
    path = CACHE_DIR.absolute() / f"model-{spec.digest[:12]}"
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            writable = False
        else:
            writable = os.access(path.parent, os.W_OK)
        if not writable:
            folder = tempfile.TemporaryDirectory(prefix="kvpp-model-")
            path = Path(stack.enter_context(folder)) / "model"
        yield write_checkpoint(path, spec)


def report_rows(
    rows: Generator[Measured],
    judge: Callable[[Measured, Measured], Row],
    to_table: Callable[[Report[Row]], Table],
    options: DemoOptions,
    progress: Console,
    details: Callable[[Sequence[Row]], str] | None = None,
) -> bool:
    """Judge each row against the first one and print the result; answer whether all checks hold.

    Args:
        rows: measures one row after the other; an error leaves those before it. Closed on every
            way out, since servers may run in it.
        details: what to print below the table.
    """
    measured: list[Measured] = []
    begin = time.monotonic()
    error: KvppError | None = None
    try:
        with contextlib.closing(rows):
            for row in rows:
                measured.append(row)  # noqa: PERF402 - an error keeps the rows before it
    except KvppError as caught:
        error = caught
    report = Report(
        rows=tuple(judge(row, measured[0]) for row in measured),
        total_s=round(time.monotonic() - begin, 1),
        error=str(error) if error else None,
    )
    if options.as_json:
        sys.stdout.write(to_json(report) + "\n")
        sys.stdout.flush()
    elif report.rows:
        console = _result_console()
        console.print(to_table(report))
        if details is not None:
            console.print(details(report.rows), markup=False, highlight=False)
        if report.ok:
            console.print(f"all rows identical, all checks hold ({report.total_s:.0f} s)")
    _print_problems(report.failures, error, progress)
    return report.ok


def _result_console() -> Console:
    """Where the result goes: stdout, as wide as the tables where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


def _print_problems(failures: Sequence[str], error: KvppError | None, console: Console) -> None:
    """Say what is wrong: checks that do not hold, and what kept the scenario from its end."""
    for failure in failures:
        console.print(f"check failed: {failure}", style="bold red", markup=False, soft_wrap=True)
    if error is None:
        return
    if isinstance(error, ServerError) and error.log_tail:
        console.print(f"--- last lines of {error.log_path}", markup=False, soft_wrap=True)
        console.print(error.log_tail, markup=False, highlight=False, soft_wrap=True)
        console.print("---")
    console.print(f"failed: {error}", style="bold red", markup=False, soft_wrap=True)
