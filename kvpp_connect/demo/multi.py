"""`kvpp demo multi`: two prefill nodes with KVPP that share a pool, and one decode node.

vLLM's own MultiConnector holds both connectors on each node; vllm-router stands in front. Exit
codes, progress and errors as `kvpp demo pd`.
"""

import contextlib
from collections.abc import Generator
from pathlib import Path

from rich.console import Console

from kvpp_connect.demo.model import ModelSpec
from kvpp_connect.demo.multi_report import Phase, judge, to_table
from kvpp_connect.demo.multi_runner import MultiRunner
from kvpp_connect.demo.multi_servers import GROUP_PORTS_NEEDED, MultiServers, plan_servers
from kvpp_connect.demo.pool_servers import POOL_PORTS_NEEDED, PoolServers
from kvpp_connect.demo.ports import check_ports_free
from kvpp_connect.demo.runner import Deadline
from kvpp_connect.demo.scenario import (
    DemoOptions,
    choose_ports,
    model_folder,
    report_rows,
    run_scenario,
)
from kvpp_connect.demo.workload import make_waves


def run_multi_demo(options: DemoOptions) -> int:
    """Run the demo; returns the exit code."""

    def run(log_dir: Path, progress: Console) -> bool:
        return report_rows(_measure(options, log_dir, progress), judge, to_table, options, progress)

    return run_scenario(options, run)


def make_prompts() -> tuple[str, ...]:
    """An odd number of prompts without common blocks, of 5 to 1,500 tokens."""
    return (*make_waves()[0].prompts, *make_waves(seed=1)[0].prompts[:3])


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
        with contextlib.closing(runner.phases()) as phases:
            for phase in phases:
                progress.print(f"  {phase.title}: {phase.requests_s:.1f} s", markup=False)
                yield phase


def _check_ports(servers: MultiServers, pool: PoolServers) -> None:
    everyone = (servers.plain, *servers.engines, servers.router)
    launches = [*(server.launch() for server in everyone), pool.master(), pool.node()]
    check_ports_free((x.name, port) for x in launches for port in (x.port, *x.other_ports))
