"""`kvpp capacity`: what two server logs say about KV capacity, and whether it is worth it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvpp_connect.cli.output import (
    AsJson,
    BlockSize,
    Device,
    Dtype,
    KvCacheDtype,
    MaxNumSeqs,
    Pcp,
    Pp,
    RunningTokens,
    make_console,
    make_table,
    print_json,
)
from kvpp_connect.errors import ConfigError

if TYPE_CHECKING:
    from kvpp_connect.planning.compare import Expectation, LogComparison


def capacity(
    before: Annotated[Path, typer.Argument(help="Log of the server as it was.")],
    after: Annotated[Path, typer.Argument(help="Log of the server as it is to be.")],
    *,
    config: Annotated[
        Path | None, typer.Option(help="Checkpoint; adds the ratio that is expected.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor parallel size of both servers.")] = 1,
    pp: Pp = 1,
    pcp: Pcp = 1,
    layout: Annotated[
        Literal["full", "compact", "dcp"], typer.Option(help="What the second server runs.")
    ] = "compact",
    dcp: Annotated[int | None, typer.Option(help="With --layout dcp: its size.")] = None,
    running_tokens: RunningTokens = None,
    max_num_seqs: MaxNumSeqs = 256,
    block_size: BlockSize = None,
    device: Device = "cuda",
    dtype: Dtype = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare what two servers logged about their KV capacity at start-up.

    Reads vLLM's own lines: any device, any release, several engines or ranks.
    With --config it says which ratio the layout should have given.

    \b
    Example: before and after KVPP was turned on
      $ kvpp capacity plain.log kvpp.log
    Example: with the ratio that the plan expects
      $ kvpp capacity plain.log kvpp.log --config /models/DeepSeek-R1 --tp 8
    """
    from kvpp_connect.planning.audit import read_model
    from kvpp_connect.planning.caches import CacheOptions
    from kvpp_connect.planning.compare import Expected, compare_logs, expect
    from kvpp_connect.planning.geometry import ParallelSizes

    compared = compare_logs(_read(before), _read(after), (str(before), str(after)))
    expectation = None
    if config is not None:
        expectation = expect(
            compared,
            Expected(
                model=read_model(config),
                sizes=ParallelSizes(tensor=tp, pipeline=pp, prefill_context=pcp),
                layout=layout,
                decode_context=dcp,
                options=CacheOptions(
                    device=device,
                    block_tokens=block_size,
                    dtype=dtype,
                    kv_cache_dtype=kv_cache_dtype,
                ),
                running_tokens=running_tokens,
                max_requests=max_num_seqs,
            ),
        )
    if as_json:
        print_json("capacity", _document(compared, expectation))
    else:
        _print(compared, expectation)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error


def _print(compared: "LogComparison", expectation: "Expectation | None") -> None:
    console = make_console()
    table = make_table("log", "engines", "tokens", "requests at once", "of tokens each")
    for name, found in zip(compared.names, (compared.before, compared.after), strict=True):
        tokens, concurrency = found.tokens, found.concurrency
        about = "about " if found.is_rounded else ""
        table.add_row(
            name,
            str(len(found.engines)),
            "-" if tokens is None else f"{about}{tokens:,}",
            "-" if concurrency is None else f"{concurrency:,.2f}",
            "-" if found.request_tokens is None else f"{found.request_tokens:,}",
        )
    console.print(table)
    console.print(f"[bold]{compared.verdict}[/bold]")
    if expectation is not None:
        console.print(
            f"expected x{expectation.ratio:.3f} ({expectation.layout}, from about "
            f"{expectation.memory_bytes:,} bytes per rank)"
        )
    for note in (*compared.notes, *(expectation.notes if expectation else ())):
        console.print(f"note: {note}", markup=False)


def _document(compared: "LogComparison", expectation: "Expectation | None") -> dict[str, Any]:
    from dataclasses import asdict

    logs = zip(compared.names, (compared.before, compared.after), strict=True)
    return {
        "logs": [
            {
                "path": name,
                "tokens": found.tokens,
                "rounded": found.is_rounded,
                "request_tokens": found.request_tokens,
                "concurrency": found.concurrency,
                "engines": [asdict(engine) for engine in found.engines],
            }
            for name, found in logs
        ],
        "ratio": compared.ratio,
        "concurrency_ratio": compared.concurrency_ratio,
        "verdict": compared.verdict,
        "expected": asdict(expectation) if expectation else None,
        "notes": list(compared.notes),
    }
