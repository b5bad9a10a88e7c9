"""`kvpp bench`: measurements on this machine."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpp_connect.cli import bench_pd, bench_pool
from kvpp_connect.cli.output import AsJson, make_console, make_table, print_json
from kvpp_connect.errors import ConfigError

if TYPE_CHECKING:
    from kvpp_connect.bench.broadcast import BroadcastReport
    from kvpp_connect.bench.capacity import CapacityReport
    from kvpp_connect.bench.overlap import OverlapReport
    from kvpp_connect.bench.rounds import Spread
    from kvpp_connect.bench.serving import ServingReport

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
app.command()(bench_pd.pd)
app.command()(bench_pool.pool)


@app.command()
def broadcast(
    *,
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Local processes.")] = 2,
    sizes: Annotated[
        str, typer.Option(help="Payloads, such as 64KiB,1MiB. Default: 4 KiB to 64 MiB.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="How often all of it is measured.")] = 7,
    device: Annotated[str, typer.Option(help="Of the payloads: cpu, cuda or npu.")] = "cpu",
    plot: Annotated[
        Path | None, typer.Option(help="Draw it into this file (.png, .svg, .pdf).")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Limit for everything, in seconds.")] = 300,
    as_json: AsJson = False,
) -> None:
    """Compare the transports between local processes with a plain copy.

    Needs torch, no server, and a GPU or NPU with --device only. Exit code 1
    if a step moves other bytes than planned.

    \b
    Example: two ranks, payloads of 4 KiB to 64 MiB
      $ kvpp bench broadcast
    Example: four ranks, two sizes, a picture
      $ kvpp bench broadcast --ranks 4 --sizes 64KiB,16MiB --plot out.png
    Example: eight ranks on eight GPUs over NCCL; on fewer GPUs over gloo
      $ kvpp bench broadcast --device cuda --ranks 8
    """
    from kvpp_connect.bench.broadcast import DEFAULT_SIZES, measure_broadcast
    from kvpp_connect.bench.plots import check_plots, plot_broadcast
    from kvpp_connect.platforms.base import PLATFORMS

    payloads = _sizes(sizes) if sizes else DEFAULT_SIZES
    if plot is not None:
        check_plots(plot)
    if device not in PLATFORMS:
        raise ConfigError(f"--device is {device!r}; expected one of: {', '.join(PLATFORMS)}")
    report = measure_broadcast(ranks, payloads, rounds, timeout, device)
    if plot is not None:
        plot_broadcast(report, plot)
    if as_json:
        print_json("bench broadcast", _document(report))
    else:
        _print(report)
    raise typer.Exit(1 if report.failures else 0)


@app.command()
def overlap(
    *,
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Local processes.")] = 2,
    layers: Annotated[int, typer.Option(min=1, help="Target layers.")] = 8,
    blocks: Annotated[int, typer.Option(min=576, help="Blocks of each layer's cache.")] = 1024,
    width: Annotated[
        int, typer.Option(min=1, help="Compute of a layer: two products with a square matrix.")
    ] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="How often all of it is measured.")] = 7,
    timeout: Annotated[float, typer.Option(min=1, help="Limit for everything, in seconds.")] = 300,
    as_json: AsJson = False,
) -> None:
    """Say how much of the broadcasts hides behind compute.

    Needs torch, no GPU and no server: the engine runs decode and prefill
    steps with synthetic compute, with KVPP off and on.

    \b
    Example: two ranks, both modes, both transports
      $ kvpp bench overlap
    Example: four times the compute
      $ kvpp bench overlap --width 2048
    """
    from kvpp_connect.bench.overlap import OverlapOptions, measure_overlap

    options = OverlapOptions(ranks=ranks, layers=layers, blocks=blocks, width=width, rounds=rounds)
    report = measure_overlap(options, timeout)
    if as_json:
        print_json("bench overlap", asdict(report))
    else:
        _print_overlap(report)


def _print_overlap(report: "OverlapReport") -> None:
    console = make_console()
    console.print(
        f"{report.options.ranks} ranks on {report.cores} cores, load {report.load:.1f} before; "
        f"medians of {report.options.rounds} rounds, in ms for a step of {report.options.layers} "
        "layers"
    )
    table = make_table(
        *("step", "mode", "transport", "MB per layer", "off", "on", "transfer alone", "hidden"),
        left=3,
    )
    for row in report.rows:
        times = (f"{spread.median_s * 1e3:.1f}" for spread in (row.off, row.on, row.transfer))
        table.add_row(
            row.step,
            row.mode,
            row.transport.replace("_", " "),
            f"{row.layer_bytes / 1e6:.1f}",
            *times,
            f"{row.hidden_share:.0%}",
        )
    console.print(table)


@app.command()
def capacity(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Models to plan for: checkpoint directories, or config.json files."),
    ] = None,
    *,
    ranks: Annotated[str, typer.Option(help="Group sizes, such as 2,4,8.")] = "2,4,8",
    shares: Annotated[
        str, typer.Option(help="Scratch shares f of compact mode, such as 0.05,0.1,0.25.")
    ] = "0.05,0.1,0.25",
    measure: Annotated[
        bool, typer.Option("--measure", help="Start servers of a small model as well.")
    ] = False,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the small model.")] = 6,
    kv_cache_bytes: Annotated[
        int, typer.Option(min=1, help="KV cache of the small model's ranks, in bytes.")
    ] = 60_000_000,
    plot: Annotated[
        Path | None, typer.Option(help="Draw it into this file (.png, .svg, .pdf).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what KVPP holds over the size of its group.

    Models are planned from config.json alone. With --measure, servers of a
    small model start in each layout; exit code 1 if one holds other than
    planned, to the block.

    \b
    Example: two models over groups of 4 and 8 ranks
      $ kvpp bench capacity DeepSeek-R1 DeepSeek-V3.2 --ranks 4,8
    Example: plain, full and compact servers on two ranks
      $ kvpp bench capacity --measure --ranks 2
    """
    from rich.console import Console

    from kvpp_connect.bench.capacity import CapacityReport, measure_capacities, plan_ratios
    from kvpp_connect.bench.plots import check_plots, plot_capacity

    sizes = tuple(map(int, parse_numbers(ranks, "--ranks", least=2, most=256, whole=True)))
    asked = parse_numbers(shares, "--shares", least=0, most=1)
    if not paths and not measure:
        raise ConfigError("nothing to do: name models to plan for, or add --measure")
    if plot is not None:
        check_plots(plot)
    report = CapacityReport(
        shares=asked,
        planned=plan_ratios(paths or (), sizes, asked),
        measured=(
            measure_capacities(sizes, kv_cache_bytes, layers, Console(stderr=True))
            if measure
            else ()
        ),
    )
    if plot is not None:
        plot_capacity(report, plot)
    if as_json:
        print_json("bench capacity", {**asdict(report), "failures": list(report.failures)})
    else:
        _print_capacity(report)
    raise typer.Exit(1 if report.failures else 0)


def parse_numbers(
    text: str, name: str, *, least: float, most: float, whole: bool = False
) -> tuple[float, ...]:
    """Numbers of an option, such as 2,4,8.

    Raises:
        ConfigError: names the option and the range.
    """
    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError:
        found = ()
    right = all(least <= n <= most and (not whole or n.is_integer()) for n in found)
    if not found or not right:
        kind = "whole numbers" if whole else "numbers"
        raise ConfigError(
            f"{name} is {text!r}; expected {kind} from {least} to {most}, with commas"
        )
    return found


def _print_capacity(report: "CapacityReport") -> None:
    console = make_console()
    if report.planned:
        compact = (f"compact, f = {share:g}" for share in report.shares)
        table = make_table("model", "ranks", "limit", "full", *compact)
        for row in report.planned:
            ratios = (f"x{ratio:.2f}" for ratio in (row.limit, row.full, *row.compact))
            table.add_row(row.model, str(row.ranks), *ratios)
        console.print(table)
    if report.measured:
        table = make_table("server", "ranks", "tokens", "planned", "x plain")
        for row in report.measured:
            tokens = (f"{row.served_tokens:,}", f"{row.planned_tokens:,}")
            table.add_row(row.variant, str(row.ranks), *tokens, f"{row.plain_ratio:.2f}")
        console.print(table)
    for failure in report.failures:
        console.print(f"[bold red]{failure}[/bold red]")


@app.command()
def serving(
    *,
    ranks: Annotated[int, typer.Option(min=2, max=16, help="Tensor parallel size.")] = 2,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the generated model.")] = 6,
    kv_cache_bytes: Annotated[
        int, typer.Option(min=1, help="KV cache per rank, in bytes.")
    ] = 400_000_000,
    running_tokens: Annotated[
        str, typer.Option(help="Sizes for compact mode, such as default,3200,6400.")
    ] = "default",
    rounds: Annotated[int, typer.Option(min=1, help="How often the requests are sent.")] = 2,
    timeout: Annotated[float, typer.Option(min=1, help="Limit for one answer, in seconds.")] = 600,
    as_json: AsJson = False,
) -> None:
    """Compare plain vLLM, full and compact mode on real servers.

    Needs vLLM. Twenty requests of 114 to 763 tokens, sixteen at once. Exit
    code 1 if tokens are not plain vLLM's.

    \b
    Example: two ranks, the default size of compact's scratch
      $ kvpp bench serving
    Example: how serving behaves as requests meet the limit of scratch
      $ kvpp bench serving --running-tokens default,1600,3200,6400
    """
    from rich.console import Console

    from kvpp_connect.bench.serving import ServingOptions, measure_serving

    options = ServingOptions(
        ranks=ranks,
        layers=layers,
        kv_cache_bytes=kv_cache_bytes,
        running_tokens=_running_tokens(running_tokens),
        rounds=rounds,
        request_limit_s=timeout,
    )
    report = measure_serving(options, Console(stderr=True))
    if as_json:
        print_json("bench serving", {**asdict(report), "failures": list(report.failures)})
    else:
        _print_serving(report)
    raise typer.Exit(1 if report.failures else 0)


def _running_tokens(text: str) -> tuple[int | None, ...]:
    sizes: list[int | None] = []
    for word in text.split(","):
        if word.strip() != "default" and not word.strip().isdecimal():
            raise ConfigError(
                f"--running-tokens is {text!r}; expected numbers of tokens or default, with commas"
            )
        sizes.append(None if word.strip() == "default" else int(word))
    return tuple(sizes)


def _print_serving(report: "ServingReport") -> None:
    console = make_console()
    table = make_table(
        "server", "cached tokens", "seconds", "x plain", "preemptions", "identical answers"
    )
    for row in report.rows:
        table.add_row(
            row.name,
            f"{row.cached_tokens:,}",
            ", ".join(f"{seconds:.1f}" for seconds in row.seconds),
            f"{row.plain_ratio:.2f}",
            str(row.preemptions),
            f"{row.identical} of {row.answers}",
        )
    console.print(table)
    for failure in report.failures:
        console.print(f"[bold red]{failure}[/bold red]")


def _sizes(text: str) -> tuple[int, ...]:
    from kvpp_connect.planning.units import parse_bytes

    found = tuple(parse_bytes(size, "--sizes") for size in text.split(","))
    if max(found) > 1 << 30:
        raise ConfigError(f"--sizes is {text!r}; expected at most 1GiB")
    return found


def _print(report: "BroadcastReport") -> None:
    from kvpp_connect.planning.units import format_bytes

    console = make_console()
    console.print(
        f"{report.ranks} ranks on {_where(report)}, load {report.load:.1f} before; medians of "
        f"{report.rounds} rounds, and in brackets the least and the most"
    )
    table = make_table("payload", "way", "stream", "x copy", "stream, us", "latency, us", left=2)
    for size in report.sizes:
        rate = _rate(size.copy_bytes_per_s)
        table.add_row(format_bytes(size.size_bytes), "plain copy", rate, "", _us(size.copy), "")
        for speed in size.transports:
            name, rate = speed.transport.replace("_", " "), _rate(speed.bytes_per_s)
            ratio = f"{speed.copy_ratio:.2f}"
            table.add_row("", name, rate, ratio, _us(speed.stream), _us(speed.latency))
    console.print(table)
    steps = make_table("step", "requests", "active blocks", "broadcasts", "moved", "planned")
    for step in report.steps:
        steps.add_row(
            step.mode,
            str(step.requests),
            str(step.active_blocks),
            str(step.broadcasts),
            f"{step.moved_bytes:,}",
            f"{step.planned_bytes:,}",
        )
    console.print(steps)
    for failure in report.failures:
        console.print(f"[bold red]{failure}[/bold red]")


def _where(report: "BroadcastReport") -> str:
    if report.device == "cpu":
        return f"{report.cores} cores"
    return report.device + (" (shared, so over gloo)" if report.sharing else "")


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def _us(spread: "Spread") -> str:
    us = [seconds * 1e6 for seconds in (spread.median_s, spread.least_s, spread.most_s)]
    return f"{us[0]:,.0f} ({us[1]:,.0f} to {us[2]:,.0f})"


def _document(report: "BroadcastReport") -> dict[str, Any]:
    return {**asdict(report), "failures": list(report.failures)}
