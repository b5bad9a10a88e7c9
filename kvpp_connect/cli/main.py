"""The `kvpp` command. Everything heavy is imported inside the commands."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvpp_connect import __version__
from kvpp_connect.cli import audit, bench, capacity, config, doctor, plan
from kvpp_connect.errors import KvppError

app = typer.Typer(
    help="KV pipeline parallelism for vLLM, together with KV transfer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class Scenario(StrEnum):
    """What `kvpp demo` can show."""

    PD = "pd"
    POOL = "pool"
    MULTI = "multi"


@app.command()
def demo(
    scenario: Annotated[
        Scenario,
        typer.Argument(
            help="pd: prefill/decode disaggregation with KVPP on P. pool: several servers, with "
            "and without KVPP, on one KV pool. multi: both together, and a node is killed."
        ),
    ] = Scenario.PD,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object.")
    ] = False,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the generated model.")] = 6,
    kv_cache_bytes: Annotated[
        int, typer.Option(min=1, help="KV cache per rank, in bytes.")
    ] = 200_000_000,
    timeout: Annotated[
        float, typer.Option(min=1, help="Limit for everything, in seconds.")
    ] = 600.0,
    base_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65526,
            help="First of seven ports (pd, pool), or ten (multi). Default: free ports.",
        ),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Where logs go, and stay. Default: temporary.")
    ] = None,
    keep_logs: Annotated[bool, typer.Option(help="Keep the logs of a good run, too.")] = False,
) -> None:
    """Run real vLLM servers with KVPP and compare their tokens with plain vLLM."""
    from kvpp_connect.demo.multi import run_multi_demo
    from kvpp_connect.demo.pd import run_demo
    from kvpp_connect.demo.pool import run_pool_demo
    from kvpp_connect.demo.scenario import DemoOptions

    options = DemoOptions(
        layers=layers,
        kv_cache_bytes=kv_cache_bytes,
        timeout_s=timeout,
        base_port=base_port,
        log_dir=log_dir,
        keep_logs=keep_logs,
        as_json=as_json,
    )
    run = {
        Scenario.PD: run_demo,
        Scenario.POOL: run_pool_demo,
        Scenario.MULTI: run_multi_demo,
    }[scenario]
    raise typer.Exit(run(options))


app.command()(audit.audit)
app.command()(plan.plan)
app.command()(capacity.capacity)
app.command()(config.config)
app.command()(doctor.doctor)
app.add_typer(bench.app, name="bench")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Console entry point: our own errors become one line on stderr and exit code 1."""
    try:
        app()
    except KvppError as error:
        message = " ".join(str(error).split())
        sys.stderr.write(f"kvpp: {message}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
