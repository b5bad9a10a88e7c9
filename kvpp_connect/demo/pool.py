"""`kvpp demo pool`: one KV pool that several vLLM servers fill and hit.

Mooncake's master and a node with memory run all the time, so the pool outlives each server. Exit
codes, progress and errors as `kvpp demo pd`.
"""

from collections.abc import Generator
from pathlib import Path

from rich.console import Console

from kvpp_connect.demo.fleet import Fleet
from kvpp_connect.demo.model import ModelSpec
from kvpp_connect.demo.pool_report import PoolRowMeasurement, judge, to_table
from kvpp_connect.demo.pool_rows import ENGINE_PORTS_NEEDED, PoolRowPlanner, plan_pool_rows
from kvpp_connect.demo.pool_runner import PoolRunner
from kvpp_connect.demo.pool_servers import POOL_PORTS_NEEDED, PoolServers
from kvpp_connect.demo.ports import check_ports_free
from kvpp_connect.demo.progress import show_progress
from kvpp_connect.demo.runner import Deadline
from kvpp_connect.demo.scenario import (
    DemoOptions,
    choose_ports,
    model_folder,
    report_rows,
    run_scenario,
)
from kvpp_connect.demo.workload import make_waves
from kvpp_connect.errors import KvppError

_POOL_START_S = 60.0


def run_pool_demo(options: DemoOptions, planner: PoolRowPlanner = plan_pool_rows) -> int:
    """Run the demo; returns the exit code."""

    def run(log_dir: Path, progress: Console) -> bool:
        rows = _measure_rows(options, planner, log_dir, progress)
        return report_rows(rows, judge, to_table, options, progress)

    return run_scenario(options, run)


def _measure_rows(
    options: DemoOptions, planner: PoolRowPlanner, log_dir: Path, progress: Console
) -> Generator[PoolRowMeasurement]:
    """One row after the other, so that an error leaves those before it."""
    spec = ModelSpec(layers=options.layers)
    deadline = Deadline(options.timeout_s)
    ports = choose_ports(options.base_port, POOL_PORTS_NEEDED + ENGINE_PORTS_NEEDED)
    pool = PoolServers(ports=ports[:POOL_PORTS_NEEDED])
    with model_folder(spec) as model:
        stages = planner(
            model, ports[POOL_PORTS_NEEDED:], pool, kv_cache_bytes=options.kv_cache_bytes
        )
        for stage in stages:
            launches = [pool.master(), pool.node(), *(plan.server.launch() for plan in stage)]
            check_ports_free((x.name, port) for x in launches for port in (x.port, *x.other_ports))
        with Fleet(log_dir) as fleet:
            for launch in (pool.master(), pool.node()):
                with show_progress(progress) as show:
                    limit_s = min(_POOL_START_S, deadline.remaining_s())
                    fleet.start([launch], timeout_s=limit_s, progress=show)
            runner = PoolRunner(
                spec=spec,
                waves=make_waves(),
                pool=pool,
                log_dir=log_dir,
                deadline=deadline,
                console=progress,
            )
            try:
                for stage in stages:
                    for row in runner.measure(stage):
                        fleet.check()
                        progress.print(_summary(row), markup=False, soft_wrap=True)
                        yield row
            except KvppError:
                fleet.check()  # a pool that died explains it
                raise


def _summary(row: PoolRowMeasurement) -> str:
    return (
        f"  {row.name}: {len(row.tokens)} answers in {row.requests_s:.1f} s; {row.hit_tokens:,} "
        f"of {row.prompt_tokens:,} prompt tokens from the pool"
    )
