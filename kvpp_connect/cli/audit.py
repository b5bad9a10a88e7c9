"""`kvpp audit`: how often a layout stores each token, and what to launch instead."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvpp_connect.cli.output import (
    AsJson,
    Device,
    Dtype,
    KvCacheDtype,
    Pcp,
    make_console,
    make_table,
    print_json,
    print_problem,
)
from kvpp_connect.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from kvpp_connect.planning.audit import AuditRow, Model
    from kvpp_connect.planning.geometry import ParallelSizes
    from kvpp_connect.seam.checks import Comparison


def audit(
    paths: Annotated[
        list[Path], typer.Argument(help="Checkpoint directories, or config.json files.")
    ],
    *,
    tp: Annotated[list[int], typer.Option("--tp", help="Tensor parallel size; may be repeated.")],
    pcp: Pcp = 1,
    dcp: Annotated[int, typer.Option(help="Decode context parallel size to judge.")] = 1,
    kv_memory: Annotated[
        str, typer.Option(help="KV memory per rank, such as 40GiB; adds the total that is wasted.")
    ] = "",
    ranks_per_node: Annotated[
        int, typer.Option(help="Ranks of a node; DCP inside one costs less.")
    ] = 8,
    device: Device = "cuda",
    dtype: Dtype = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    model_impl: Annotated[
        Literal["vllm", "transformers"], typer.Option(help="As vLLM's --model-impl.")
    ] = "vllm",
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with the installed vLLM, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say how often a layout stores each token, and what to launch instead.

    Reads config.json only; needs no GPU, no server and no vLLM. Exit code 1
    where a file cannot be judged or a server would refuse the sizes.

    \b
    Example: eight copies of the cache, and two ways out
      $ kvpp audit /models/DeepSeek-R1 --tp 8
    Example: why a server would refuse DCP 4
      $ kvpp audit /models/Qwen3-32B --tp 16 --dcp 4
    """
    from kvpp_connect.planning.audit import audit as judge
    from kvpp_connect.planning.audit import read_model
    from kvpp_connect.planning.caches import CacheOptions
    from kvpp_connect.planning.geometry import ParallelSizes
    from kvpp_connect.planning.units import parse_bytes

    memory = parse_bytes(kv_memory, "--kv-memory") if kv_memory else None
    options = CacheOptions(device=device, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    rows: list[AuditRow] = []
    comparisons: list[Comparison | None] = []
    problems: list[dict[str, str]] = []
    for path in paths:
        try:
            model = read_model(path, model_impl=model_impl)
            for size in tp:
                sizes = ParallelSizes(tensor=size, prefill_context=pcp, decode_context=dcp)
                rows.append(judge(model, sizes, options, ranks_per_node))
                comparisons.append(_compare(model, sizes, model_impl) if verify else None)
        except ConfigError as error:
            problems.append({"path": str(path), "problem": " ".join(str(error).split())})
            print_problem(str(error))
    if as_json:
        documents = [_document(r, memory, c) for r, c in zip(rows, comparisons, strict=True)]
        print_json("audit", {"rows": documents, "problems": problems})
    elif rows:
        _print(rows, memory, comparisons)
    differs = any(c is not None and c.differences for c in comparisons)
    if problems or differs or any(row.refusal for row in rows):
        raise typer.Exit(1)


def _compare(model: "Model", sizes: "ParallelSizes", model_impl: str) -> "Comparison":
    try:
        from kvpp_connect.seam import checks
    except ImportError as error:
        raise ConfigError(f"--verify needs vLLM, which does not load here ({error})") from error
    return checks.compare_with_vllm(model, sizes, model_impl)


def _print(
    rows: "list[AuditRow]", memory: int | None, comparisons: "list[Comparison | None]"
) -> None:
    from kvpp_connect.planning.units import format_bytes

    console = make_console()
    pcp = any(row.sizes.prefill_context > 1 for row in rows)
    table = make_table(
        "model",
        "attention",
        "KV heads",
        "TP",
        *(["PCP"] if pcp else []),
        "factor",
        "copies",
        "largest DCP",
        "one token",
        "wasted per token",
        *(["wasted in total"] if memory else []),
        left=2,
    )
    for row in rows:
        wasted = row.wasted_token_bytes
        total = _wasted_total(row, memory)
        table.add_row(
            row.model.checkpoint.name,
            row.model.attention.kind,
            str(row.model.attention.kv_heads),
            str(row.sizes.tensor),
            *([str(row.sizes.prefill_context)] if pcp else []),
            str(row.factor),
            str(row.copies),
            str(row.accepted_decode_contexts[-1]) if row.accepted_decode_contexts else "-",
            "-" if row.distinct_token_bytes is None else format_bytes(row.distinct_token_bytes),
            "-" if wasted is None else format_bytes(wasted),
            *(["-" if total is None else format_bytes(total)] if memory else []),
        )
    console.print(table)
    for row, comparison in zip(rows, comparisons, strict=True):
        _print_row(console, row, comparison)


def _print_row(console: "Console", row: "AuditRow", comparison: "Comparison | None") -> None:
    share = f"{row.wasted_share:.1%}"
    name, tensor = row.model.checkpoint.name, row.sizes.tensor
    console.print(
        f"[bold]{name}[/bold], TP {tensor}: each token stored "
        + ("once" if row.copies == 1 else f"{row.copies} times, {share} of KV memory is copies")
        + f" ({row.model.attention.why})"
    )
    if row.refusal:
        dcp = row.sizes.decode_context
        asked = f"with DCP {dcp} " if dcp != 1 else ""
        console.print(
            f"  [red]refused[/red]  {asked}the server does not start ({row.refusal.by}): "
            f"{row.refusal.reason}"
        )
    for advice in row.advice:
        left = "" if advice.copies_left == 1 else f", {advice.copies_left} copies left"
        label = {"nothing": "change nothing", "kvpp": "KVPP", "dcp": "DCP"}[advice.cure]
        console.print(f"  {label}: {advice.flags}   ({advice.why}{left})", markup=False)
    if row.unknown_caches:
        console.print(f"  bytes unknown: {row.unknown_caches}", markup=False)
    for note in row.caches.notes if row.caches else ():
        console.print(f"  note: {note}", markup=False)
    if comparison is not None:
        console.print(f"  vLLM {comparison.vllm}: {comparison.summary}", markup=False)


def _wasted_total(row: "AuditRow", memory: int | None) -> int | None:
    """Bytes of copies on all ranks of the group, all of their KV memory in use."""
    if memory is None:
        return None
    return int(row.sizes.group * memory * row.wasted_share)


def _document(
    row: "AuditRow", memory: int | None, comparison: "Comparison | None"
) -> dict[str, Any]:
    from dataclasses import asdict

    attention, checkpoint = row.model.attention, row.model.checkpoint
    wasted = row.wasted_token_bytes
    return {
        "path": str(checkpoint.path),
        "model": checkpoint.name,
        "model_type": checkpoint.model_type,
        "mla": attention.is_mla,
        "why": attention.why,
        "kv_heads": attention.kv_heads,
        "kv_heads_from": attention.kv_heads_from,
        "attention_heads": attention.attention_heads,
        "tp": row.sizes.tensor,
        "pcp": row.sizes.prefill_context,
        "dcp": row.sizes.decode_context,
        "factor": row.factor,
        "copies": row.copies,
        "accepted_dcp": list(row.accepted_decode_contexts),
        "refusal": asdict(row.refusal) if row.refusal else None,
        "token_bytes": row.distinct_token_bytes,
        "wasted_token_bytes": wasted,
        "wasted_share": round(row.wasted_share, 6),
        "max_model_tokens": row.model.max_model_tokens,
        "wasted_request_bytes": None if wasted is None else wasted * row.model.max_model_tokens,
        "wasted_total_bytes": _wasted_total(row, memory),
        "advice": [asdict(advice) for advice in row.advice],
        "notes": [*(row.caches.notes if row.caches else ()), *filter(None, [row.unknown_caches])],
        "verified": comparison.document() if comparison else None,
    }
