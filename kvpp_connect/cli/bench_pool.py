"""`kvpp bench pool`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvpp_connect.cli.output import AsJson, make_console, make_table, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from kvpp_connect.bench.pool import PoolReport
    from kvpp_connect.bench.rounds import Spread

_PROMPTS = 3  # of each server with --serving


def pool(
    *,
    layers: Annotated[int, typer.Option(min=1, help="Layers that the measured rank owns.")] = 8,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of 64 tokens that it moves.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="How often all of it is measured.")] = 15,
    model_layers: Annotated[
        int, typer.Option(min=1, help="Layers of the model whose bytes are counted.")
    ] = 61,
    drafts: Annotated[int, typer.Option(min=0, help="Its draft layers.")] = 1,
    owners: Annotated[str, typer.Option(help="Sizes of the KVPP groups.")] = "2,8",
    lookup_blocks: Annotated[int, typer.Option(min=1, help="Blocks of a look-up.")] = 1000,
    lookup_owners: Annotated[int, typer.Option(min=1, help="Owners of each of them.")] = 8,
    serving: Annotated[
        bool, typer.Option("--serving", help="Start vLLM servers, too: a warm prefix.")
    ] = False,
    prompt_tokens: Annotated[
        int, typer.Option(min=32, help="Tokens of each prompt with --serving.")
    ] = 8192,
    timeout: Annotated[
        float, typer.Option(min=1, help="Limit for each part without servers, in seconds.")
    ] = 300,
    as_json: AsJson = False,
) -> None:
    """Compare the KV pool's connector with what Mooncake alone can do.

    A real mooncake_master and a node with memory on loopback. Goodput of
    puts and loads beside Mooncake's own calls, bytes stored for each KV
    byte, look-ups of a long prompt, and with --serving the time to the
    first token of a prompt that is in the pool. Exit code 1 if bytes are
    stored more than once, or answers are not plain vLLM's.

    \b
    Example: without vLLM, about a minute
      $ kvpp bench pool
    Example: all of it, about six minutes, for programs
      $ kvpp bench pool --serving --json
    """
    from rich.console import Console

    from kvpp_connect.bench.pool import PoolOptions, measure_pool
    from kvpp_connect.bench.pool_bytes import BytesSetting
    from kvpp_connect.bench.pool_lookup import LookupSetting
    from kvpp_connect.bench.pool_serving import ServingSetting
    from kvpp_connect.bench.pool_speed import SpeedSetting
    from kvpp_connect.cli.bench import parse_numbers

    sizes = tuple(map(int, parse_numbers(owners, "--owners", least=1, most=16, whole=True)))
    options = PoolOptions(
        speed=SpeedSetting(layers=layers, blocks=blocks, rounds=rounds),
        bytes_stored=BytesSetting(layers=model_layers, drafts=drafts, blocks=8),
        lookup=LookupSetting(blocks=lookup_blocks, owners=lookup_owners, rounds=rounds),
        serving=ServingSetting(prompts=_PROMPTS if serving else 0, prompt_tokens=prompt_tokens),
        owners=sizes,
        limit_s=timeout,
    )
    report = measure_pool(options, Console(stderr=True))
    if as_json:
        goals = [asdict(goal) for goal in report.goals]
        document = {**asdict(report), "goals": goals, "failures": list(report.failures)}
        print_json("bench pool", document)
    else:
        _print(report)
    raise typer.Exit(1 if report.failures else 0)


def _print(report: "PoolReport") -> None:
    console = make_console()
    console.print(
        f"{report.cores} cores, load {report.load:.1f} before; medians of {report.rounds} rounds, "
        f"and in brackets the least and the most; {report.kv_bytes:,} bytes of KV in objects of "
        f"{report.object_bytes:,}"
    )
    table = make_table("one rank", "KV, GB/s", "connector, ms", "Mooncake alone, ms", "x alone")
    for speed in report.speeds:
        rate = f"{speed.kv_bytes_per_s / 1e9:.2f}"
        table.add_row(speed.way, rate, _ms(speed.path), _ms(speed.raw), f"{speed.raw_ratio:.2f}")
    console.print(table)
    table = make_table(
        "owners", "objects", "stored bytes", "per KV byte", "headers", "drafts by each rank"
    )
    for row in report.bytes_stored:
        table.add_row(
            str(row.owners),
            f"{row.objects:,}",
            f"{row.stored_bytes:,}",
            f"{row.bytes_per_kv_byte:.5f}",
            f"{row.header_share:.5f}",
            f"{row.copied_drafts:.3f}",
        )
    console.print(table)
    table = make_table(
        "look-up finds", "objects", "keys asked", "look-up, ms", "Mooncake alone, ms"
    )
    for cost in report.lookups:
        keys = (f"{cost.keys:,}", f"{cost.asked_keys:,}")
        table.add_row(cost.found, *keys, _ms(cost.lookup), _ms(cost.raw))
    console.print(table)
    if report.warm_prefixes:
        _print_servers(report, console)
    table = make_table("goal", "measured", "wanted", "")
    for goal in report.goals:
        met = "met" if goal.met else "missed"
        table.add_row(goal.what, f"{goal.measured:.4g}", goal.wanted, met)
    console.print(table)
    for failure in report.failures:
        console.print(f"[bold red]{failure}[/bold red]")


def _print_servers(report: "PoolReport", console: "Console") -> None:
    table = make_table("server", "from the pool", "first token, ms", "x plain", "identical answers")
    for row in report.warm_prefixes:
        table.add_row(
            row.title,
            f"{row.hit_tokens:,} of {row.prompt_tokens:,}",
            _ms(row.seconds),
            f"{row.plain_ratio:.2f}",
            f"{row.identical} of {row.answers}",
        )
    console.print(table)


def _ms(spread: "Spread") -> str:
    ms = [seconds * 1e3 for seconds in (spread.median_s, spread.least_s, spread.most_s)]
    return f"{ms[0]:,.1f} ({ms[1]:,.1f} to {ms[2]:,.1f})"
