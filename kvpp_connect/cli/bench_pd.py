"""`kvpp bench pd`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvpp_connect.cli.output import AsJson, make_console, make_table, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from kvpp_connect.bench.pd import PdReport
    from kvpp_connect.bench.rounds import Spread


def pd(
    *,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of the pulled prompt.")] = 2048,
    layers: Annotated[int, typer.Option(min=2, help="Layers of 2,304 bytes per token.")] = 28,
    ranks: Annotated[str, typer.Option(help="Sizes of the decode group.")] = "1,2,4",
    rounds: Annotated[int, typer.Option(min=1, help="How often all of it is measured.")] = 15,
    requests: Annotated[
        int, typer.Option(min=0, help="To each deployment of real servers; 0: none is started.")
    ] = 12,
    timeout: Annotated[
        float, typer.Option(min=1, help="Limit for one decode group's pulls, in seconds.")
    ] = 120,
    as_json: AsJson = False,
) -> None:
    """Compare P/D transfers with what Mooncake, and plain vLLM, can do.

    Pulls between processes beside raw reads of the same pieces, bytes that
    leave the prefill node, the cost of planning 128K tokens, and the time to
    the first token of real servers. Exit code 1 if bytes leave the prefill
    node more than once, or answers are not plain vLLM's.

    \b
    Example: all of it, about five minutes
      $ kvpp bench pd
    Example: pulls and planning only
      $ kvpp bench pd --requests 0 --json
    """
    from rich.console import Console

    from kvpp_connect.bench.pd import PdOptions, measure_pd
    from kvpp_connect.bench.pd_pull import PullSetting
    from kvpp_connect.cli.bench import parse_numbers

    setting = PullSetting(
        tokens=tokens - tokens % 16, layers=layers, rounds=rounds, limit_s=timeout
    )
    sizes = tuple(map(int, parse_numbers(ranks, "--ranks", least=1, most=16, whole=True)))
    options = PdOptions(setting=setting, ranks=sizes, rounds=rounds, requests=requests)
    report = measure_pd(options, Console(stderr=True))
    if as_json:
        goals = [asdict(goal) for goal in report.goals]
        document = {**asdict(report), "goals": goals, "failures": list(report.failures)}
        print_json("bench pd", document)
    else:
        _print(report)
    raise typer.Exit(1 if report.failures else 0)


def _print(report: "PdReport") -> None:
    console = make_console()
    console.print(
        f"{report.cores} cores, load {report.load:.1f} before; medians of {report.rounds} rounds, "
        f"and in brackets the least and the most; a prompt with {report.kv_bytes:,} bytes of KV"
    )
    _print_pulls(report, console)
    table = make_table("planning 128K tokens x 78 x 3", "block", "descriptors", "ms")
    for plan in report.plans:
        times = _ms(plan.plan)
        table.add_row(plan.blocks, str(plan.block_tokens), f"{plan.descriptors:,}", times)
    console.print(table)
    if report.first_tokens:
        _print_first_tokens(report, console)
    table = make_table("goal", "measured", "wanted", "", left=1)
    for goal in report.goals:
        met = "met" if goal.met else "missed"
        table.add_row(goal.what, f"{goal.measured:.4g}", goal.wanted, met)
    console.print(table)
    for failure in report.failures:
        console.print(f"[bold red]{failure}[/bold red]")


def _print_pulls(report: "PdReport", console: "Console") -> None:
    table = make_table(
        *("decode group", "blocks", "pieces", "KV, GB/s", "pull, ms", "raw read, ms", "x raw"),
        *("bytes from P", "from D's ranks"),
        left=2,
    )
    for pull in report.pulls:
        table.add_row(
            f"TP={pull.ranks} {pull.mode}",
            pull.blocks,
            f"{pull.pieces:,}",
            f"{pull.kv_bytes_per_s / 1e9:.2f}",
            _ms(pull.pull),
            _ms(pull.raw) if pull.raw else "",
            f"{pull.raw_ratio:.2f}" if pull.raw_ratio else "",
            f"x{pull.producer_bytes_per_kv_byte:.3f}",
            f"x{pull.peer_bytes_per_kv_byte:.3f}",
        )
    console.print(table)


def _print_first_tokens(report: "PdReport", console: "Console") -> None:
    table = make_table("servers", "first token, ms", "x plain", "identical answers")
    for row in report.first_tokens:
        if row.problem:
            table.add_row(row.title, "not measured", "", "")
            continue
        times = _ms(row.seconds) if row.seconds else ""
        identical = f"{row.identical} of {row.answers}"
        table.add_row(row.title, times, f"{row.plain_ratio:.2f}", identical)
    console.print(table)
    for row in report.first_tokens:
        if row.problem:
            console.print(f"{row.title} does not start: {row.problem}", markup=False)


def _ms(spread: "Spread") -> str:
    ms = [seconds * 1e3 for seconds in (spread.median_s, spread.least_s, spread.most_s)]
    return f"{ms[0]:,.1f} ({ms[1]:,.1f} to {ms[2]:,.1f})"
