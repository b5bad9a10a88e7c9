"""`kvpp demo pd`: plain vLLM, KVPP, and P/D with KVPP on the prefill side, one after the other.

Progress and errors go to stderr, the result to stdout. Returns exit codes and raises nothing:
0 where every check holds, 1 where one does not or something failed, 128 + signal where a signal
ended it.
"""

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvpp_connect.demo.interrupt import Interrupted
from kvpp_connect.demo.model import ModelSpec, write_checkpoint
from kvpp_connect.demo.ports import check_ports_free, free_ports
from kvpp_connect.demo.process import ServerError
from kvpp_connect.demo.report import (
    DemoReport,
    RowMeasurement,
    judge,
    kv_cache_lines,
    to_json,
    to_table,
)
from kvpp_connect.demo.rows import PORTS_NEEDED, RowPlan, RowPlanner, plan_rows
from kvpp_connect.demo.runner import Deadline, Runner
from kvpp_connect.demo.workload import make_waves
from kvpp_connect.errors import KvppError

CACHE_DIR = Path(".cache/kvpp")
_PLAIN_WIDTH = 140  # columns where the output is not a terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the user may choose."""

    layers: int = 6
    kv_cache_bytes: int = 200_000_000  # per rank
    timeout_s: float = 360.0  # for the whole demo
    base_port: int | None = None  # None: free ports
    log_dir: Path | None = None  # None: a temporary directory
    keep_logs: bool = False
    as_json: bool = False


def run_demo(options: DemoOptions, planner: RowPlanner = plan_rows) -> int:
    """Run the demo; returns the exit code."""
    progress = Console(stderr=True)
    own_log_dir = options.log_dir is None
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="kvpp-demo-"))
    code = 1
    try:
        code = _run_and_print(options, planner, log_dir, progress)
    except KeyboardInterrupt as error:
        code = error.exit_code if isinstance(error, Interrupted) else 130
        progress.print(f"stopped by {error or 'Ctrl-C'}; no server is left", style="yellow")
    finally:
        if own_log_dir and not options.keep_logs and code != 1:
            shutil.rmtree(log_dir, ignore_errors=True)
        else:
            progress.print(f"logs: {log_dir}", soft_wrap=True)
    return code


def _run_and_print(
    options: DemoOptions, planner: RowPlanner, log_dir: Path, progress: Console
) -> int:
    measured: list[RowMeasurement] = []
    begin = time.monotonic()
    error: KvppError | None = None
    try:
        for row in _measure_rows(options, planner, log_dir, progress):
            measured.append(row)  # noqa: PERF402 - one by one: an error keeps the rows before it
    except KvppError as caught:
        error = caught
    report = DemoReport(
        rows=tuple(judge(row, measured[0]) for row in measured),
        total_s=round(time.monotonic() - begin, 1),
        error=str(error) if error else None,
    )
    _print_report(report, as_json=options.as_json)
    _print_problems(report, error, progress)
    return 0 if report.ok else 1


def _measure_rows(
    options: DemoOptions, planner: RowPlanner, log_dir: Path, progress: Console
) -> Iterator[RowMeasurement]:
    """One row after the other, so that an error leaves those before it."""
    spec = ModelSpec(layers=options.layers)
    deadline = Deadline(options.timeout_s)
    ports = _choose_ports(options.base_port)
    with _model(spec) as model:
        plans = planner(model, ports, kv_cache_bytes=options.kv_cache_bytes)
        check_ports_free(pair for plan in plans for pair in plan.ports())
        runner = Runner(
            spec=spec, waves=make_waves(), log_dir=log_dir, deadline=deadline, console=progress
        )
        for number, plan in enumerate(plans, start=1):
            progress.print(f"[{number}/{len(plans)}] {plan.title}", markup=False)
            row = runner.measure(plan)
            progress.print(_summary(plan, row), markup=False, soft_wrap=True)
            yield row


def _summary(plan: RowPlan, row: RowMeasurement) -> str:
    where = f" on {plan.capacity_of}" if plan.router else ""
    return f"  {len(row.tokens)} answers in {row.requests_s:.1f} s; {row.kv_cache_line}{where}"


def _choose_ports(base_port: int | None) -> tuple[int, ...]:
    if base_port is None:
        return free_ports(PORTS_NEEDED)
    return tuple(range(base_port, base_port + PORTS_NEEDED))


@contextlib.contextmanager
def _model(spec: ModelSpec) -> Iterator[Path]:
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


def _print_report(report: DemoReport, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(to_json(report) + "\n")
        sys.stdout.flush()
        return
    if report.rows:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_PLAIN_WIDTH)
        console.print(to_table(report))
        console.print(kv_cache_lines(report.rows), markup=False, highlight=False)
        if report.ok:
            console.print(f"all rows identical, all checks hold ({report.total_s:.0f} s)")


def _print_problems(report: DemoReport, error: KvppError | None, console: Console) -> None:
    for failure in report.failures:
        console.print(f"check failed: {failure}", style="bold red", markup=False, soft_wrap=True)
    if error is None:
        return
    if isinstance(error, ServerError) and error.log_tail:
        console.print(f"--- last lines of {error.log_path}", markup=False, soft_wrap=True)
        console.print(error.log_tail, markup=False, highlight=False, soft_wrap=True)
        console.print("---")
    console.print(f"failed: {error}", style="bold red", markup=False, soft_wrap=True)
