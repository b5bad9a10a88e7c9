"""`kvpp demo pd`: plain vLLM, KVPP, and P/D with KVPP on the prefill side, one after the other.

Progress and errors go to stderr, the result to stdout. Returns exit codes and raises nothing:
0 where every check holds, 1 where one does not or something failed, 128 + signal where a signal
ended it.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from kvpp_connect.demo.model import ModelSpec
from kvpp_connect.demo.ports import check_ports_free
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
from kvpp_connect.demo.scenario import (
    DemoOptions,
    choose_ports,
    model_folder,
    print_problems,
    result_console,
    run_scenario,
)
from kvpp_connect.demo.workload import make_waves
from kvpp_connect.errors import KvppError


def run_demo(options: DemoOptions, planner: RowPlanner = plan_rows) -> int:
    """Run the demo; returns the exit code."""
    return run_scenario(
        options, lambda log_dir, progress: _run_and_print(options, planner, log_dir, progress)
    )


def _run_and_print(
    options: DemoOptions, planner: RowPlanner, log_dir: Path, progress: Console
) -> bool:
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
    print_problems(report.failures, error, progress)
    return report.ok


def _measure_rows(
    options: DemoOptions, planner: RowPlanner, log_dir: Path, progress: Console
) -> Iterator[RowMeasurement]:
    """One row after the other, so that an error leaves those before it."""
    spec = ModelSpec(layers=options.layers)
    deadline = Deadline(options.timeout_s)
    ports = choose_ports(options.base_port, PORTS_NEEDED)
    with model_folder(spec) as model:
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


def _print_report(report: DemoReport, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(to_json(report) + "\n")
        sys.stdout.flush()
        return
    if report.rows:
        console = result_console()
        console.print(to_table(report))
        console.print(kv_cache_lines(report.rows), markup=False, highlight=False)
        if report.ok:
            console.print(f"all rows identical, all checks hold ({report.total_s:.0f} s)")
