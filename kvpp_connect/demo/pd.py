"""`kvpp demo pd`: plain vLLM, KVPP, and P/D with KVPP on the prefill side, one after the other.

Progress and errors go to stderr, the result to stdout. Returns exit codes and raises nothing:
0 where every check holds, 1 where one does not or something failed, 128 + signal where a signal
ended it.
"""

from collections.abc import Generator
from pathlib import Path

from rich.console import Console

from kvpp_connect.demo.model import ModelSpec
from kvpp_connect.demo.ports import check_ports_free
from kvpp_connect.demo.report import RowMeasurement, judge, kv_cache_lines, to_table
from kvpp_connect.demo.rows import PORTS_NEEDED, RowPlan, RowPlanner, plan_rows
from kvpp_connect.demo.runner import Deadline, Runner
from kvpp_connect.demo.scenario import (
    DemoOptions,
    choose_ports,
    model_folder,
    report_rows,
    run_scenario,
)
from kvpp_connect.demo.workload import make_waves


def run_demo(options: DemoOptions, planner: RowPlanner = plan_rows) -> int:
    """Run the demo; returns the exit code."""

    def run(log_dir: Path, progress: Console) -> bool:
        rows = _measure_rows(options, planner, log_dir, progress)
        return report_rows(rows, judge, to_table, options, progress, kv_cache_lines)

    return run_scenario(options, run)


def _measure_rows(
    options: DemoOptions, planner: RowPlanner, log_dir: Path, progress: Console
) -> Generator[RowMeasurement]:
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
