"""`kvpp demo multi`: two prefill nodes with KVPP that share a pool, and one decode node.

vLLM's own MultiConnector holds both connectors on each node; vllm-router stands in front. Exit
codes, progress and errors as `kvpp demo pd`.
"""

import contextlib
import sys
import time
from collections.abc import Generator
from pathlib import Path

from rich.console import Console

from kvpp_connect.demo.model import ModelSpec
from kvpp_connect.demo.multi_report import MultiReport, Phase, judge, to_json, to_table
from kvpp_connect.demo.multi_runner import MultiRunner
from kvpp_connect.demo.multi_servers import GROUP_PORTS_NEEDED, MultiServers, plan_servers
from kvpp_connect.demo.pool_servers import POOL_PORTS_NEEDED, PoolServers
from kvpp_connect.demo.ports import check_ports_free
from kvpp_connect.demo.runner import Deadline
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


def run_multi_demo(options: DemoOptions) -> int:
    """Run the demo; returns the exit code."""
    return run_scenario(
        options, lambda log_dir, progress: _run_and_print(options, log_dir, progress)
    )


def make_prompts() -> tuple[str, ...]:
    """An odd number of prompts without common blocks, of 5 to 1,500 tokens."""
    return (*make_waves()[0].prompts, *make_waves(seed=1)[0].prompts[:3])


def _run_and_print(options: DemoOptions, log_dir: Path, progress: Console) -> bool:
    measured: list[Phase] = []
    begin = time.monotonic()
    error: KvppError | None = None
    try:
        # Closed on every way out: the servers run in it.
        with contextlib.closing(_measure(options, log_dir, progress)) as phases:
            for phase in phases:
                measured.append(phase)
                progress.print(f"  {phase.title}: {phase.requests_s:.1f} s", markup=False)
    except KvppError as caught:
        error = caught
    report = MultiReport(
        rows=tuple(judge(phase, measured[0]) for phase in measured),
        total_s=round(time.monotonic() - begin, 1),
        error=str(error) if error else None,
    )
    _print_report(report, as_json=options.as_json)
    print_problems(report.failures, error, progress)
    return report.ok


def _measure(options: DemoOptions, log_dir: Path, progress: Console) -> Generator[Phase]:
    ports = choose_ports(options.base_port, POOL_PORTS_NEEDED + GROUP_PORTS_NEEDED)
    pool = PoolServers(ports=ports[:POOL_PORTS_NEEDED])
    with model_folder(ModelSpec(layers=options.layers)) as model:
        servers = plan_servers(
            model, ports[POOL_PORTS_NEEDED:], pool, kv_cache_bytes=options.kv_cache_bytes
        )
        _check_ports(servers, pool)
        runner = MultiRunner(
            servers=servers,
            pool=pool,
            prompts=make_prompts(),
            log_dir=log_dir,
            deadline=Deadline(options.timeout_s),
            console=progress,
        )
        yield from runner.phases()


def _check_ports(servers: MultiServers, pool: PoolServers) -> None:
    everyone = (servers.plain, *servers.engines, servers.router)
    launches = [*(server.launch() for server in everyone), pool.master(), pool.node()]
    check_ports_free((x.name, port) for x in launches for port in (x.port, *x.other_ports))


def _print_report(report: MultiReport, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(to_json(report) + "\n")
        sys.stdout.flush()
        return
    if report.rows:
        console = result_console()
        console.print(to_table(report))
        if report.ok:
            console.print(f"all rows identical, all checks hold ({report.total_s:.0f} s)")
