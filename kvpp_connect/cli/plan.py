"""`kvpp plan`: what a given memory holds, plain, with DCP and with KVPP."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    from rich.console import Console

    from kvpp_connect.planning.broadcasts import Step
    from kvpp_connect.planning.plan import Plan

_TITLES = {
    "plain": "plain",
    "dcp": "DCP {dcp}",
    "full": "KVPP full",
    "compact": "KVPP compact",
}


def plan(
    path: Annotated[Path, typer.Argument(help="Checkpoint directory, or a config.json.")],
    *,
    tp: Annotated[int, typer.Option(help="Tensor parallel size.")],
    kv_memory: Annotated[str, typer.Option(help="KV memory per rank, such as 40GiB.")],
    pp: Pp = 1,
    pcp: Pcp = 1,
    dcp: Annotated[
        int | None, typer.Option(help="DCP to show. Default: the largest that vLLM accepts.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="As vLLM's. Default: the model's own.")
    ] = None,
    max_num_seqs: MaxNumSeqs = 256,
    running_tokens: RunningTokens = None,
    block_size: BlockSize = None,
    device: Device = "cuda",
    dtype: Dtype = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    attention_backend: Annotated[
        str, typer.Option(help="As vLLM's; decides how sparse MLA packs fp8.")
    ] = "",
    c8: Annotated[
        str, typer.Option(help="8-bit caches on an NPU: none, main, indexer or both.")
    ] = "none",
    mtp: Annotated[int, typer.Option(help="MTP layers whose caches are kept.")] = 0,
    batch: Annotated[int | None, typer.Option(help="Requests in a step.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of each of them.")] = None,
    link: Annotated[str, typer.Option(help="Bandwidth of a broadcast, such as 50GB/s.")] = "",
    layer_time: Annotated[str, typer.Option(help="Time of one layer, such as 300us.")] = "",
    plot: Annotated[bool, typer.Option("--plot", help="Draw tokens and ratios.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a KV memory holds: plain, with DCP, and with KVPP.

    Reads config.json only; needs no GPU, no server and no vLLM.

    \b
    Example: 40 GiB per rank, sequences of up to 32,768 tokens
      $ kvpp plan DeepSeek-R1 --tp 8 --kv-memory 40GiB --max-model-len 32768
    Example: do 50 GB/s hide the broadcasts of 16 requests?
      $ kvpp plan DeepSeek-R1 --tp 8 --kv-memory 40GiB --batch 16 \\
          --context 8192 --link 50GB/s --layer-time 5ms
    """
    from kvpp_connect.planning.audit import read_model
    from kvpp_connect.planning.caches import CacheOptions
    from kvpp_connect.planning.geometry import ParallelSizes
    from kvpp_connect.planning.plan import PlanRequest, make_plan
    from kvpp_connect.planning.units import parse_bytes

    step = _step(batch, context)
    link_bytes_per_s, layer_s = _link(link, layer_time, step)
    made = make_plan(
        read_model(path),
        PlanRequest(
            sizes=ParallelSizes(tensor=tp, pipeline=pp, prefill_context=pcp),
            memory_bytes=parse_bytes(kv_memory, "--kv-memory"),
            options=CacheOptions(
                device=device,
                block_tokens=block_size,
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
                attention_backend=attention_backend,
                c8=c8,
                drafts=mtp,
            ),
            decode_context=dcp,
            max_model_tokens=max_model_len,
            max_requests=max_num_seqs,
            running_tokens=running_tokens,
            step=step,
            link_bytes_per_s=link_bytes_per_s,
            layer_s=layer_s,
        ),
    )
    if as_json:
        print_json("plan", _document(made))
    else:
        _print(made, plot=plot)


def _step(batch: int | None, context: int | None) -> "Step | None":
    from kvpp_connect.planning.broadcasts import Step

    if batch is None and context is None:
        return None
    if batch is None or context is None:
        raise ConfigError("--batch and --context belong together; give both or neither")
    return Step(requests=batch, context_tokens=context)


def _link(link: str, layer_time: str, step: "Step | None") -> tuple[float | None, float | None]:
    from kvpp_connect.planning.units import parse_rate, parse_seconds

    if bool(link) != bool(layer_time):
        raise ConfigError("--link and --layer-time belong together; give both or neither")
    if not link:
        return None, None
    if step is None:
        raise ConfigError("--link needs --batch and --context: the bytes depend on the step")
    return parse_rate(link, "--link"), parse_seconds(layer_time, "--layer-time")


def _print(made: "Plan", *, plot: bool) -> None:
    from kvpp_connect.planning.units import format_bytes

    console = make_console()
    sizes, caches, settings = made.request.sizes, made.caches, made.settings
    pipeline = f", {sizes.pipeline} stages" if sizes.pipeline > 1 else ""
    console.print(
        f"[bold]{made.model.checkpoint.name}[/bold]: {len(caches.layers)} layers"
        f"{f' and {len(caches.drafts)} MTP' if caches.drafts else ''}{pipeline}, TP {sizes.tensor}"
        f"{f' x PCP {sizes.prefill_context}' if sizes.prefill_context > 1 else ''}, "
        f"{format_bytes(settings.memory_bytes)} per rank, blocks of {caches.block_tokens} tokens, "
        f"stored as {caches.stored_as}"
    )
    _print_layers(console, made)
    _print_capacities(console, made)
    _print_ownership(console, made)
    _print_broadcasts(console, made)
    if plot:
        _print_plot(console, made)
    for note in made.notes:
        console.print(f"note: {note}", markup=False)


def _print_layers(console: "Console", made: "Plan") -> None:
    table = make_table("cache", "layers", "bytes per token", "bytes per block")
    for piece in _pieces(made):
        values = (piece["layers"], piece["token_bytes"], piece["block_bytes"])
        table.add_row(piece["name"], *(f"{value:,}" for value in values))
    table.add_row("all, one rank without KVPP", "", f"{made.caches.token_bytes:,}", "")
    console.print(table)


def _print_capacities(console: "Console", made: "Plan") -> None:
    from kvpp_connect.planning.units import format_bytes

    length = made.settings.max_model_tokens
    table = make_table(
        "layout",
        "bytes per block",
        "blocks",
        "tokens",
        f"requests of {length:,}",
        "vs. plain",
        "formula",
    )
    for capacity in made.capacities:
        ratio = made.ratio(capacity)
        dcp = capacity.block_tokens // made.caches.block_tokens
        table.add_row(
            _TITLES[capacity.variant].format(dcp=dcp),
            format_bytes(capacity.block_bytes),
            f"{capacity.blocks:,}",
            f"{capacity.tokens:,}",
            f"{capacity.concurrency:,.2f}",
            "-" if ratio is None else f"x{ratio:.2f}",
            "" if capacity.formula is None else f"x{capacity.formula:.2f}",
        )
    console.print(table)
    for capacity in made.capacities:
        if capacity.problem:
            title = _TITLES[capacity.variant].format(dcp="")
            console.print(f"[red]{title.strip()} does not start[/red]: {capacity.problem}")


def _print_ownership(console: "Console", made: "Plan") -> None:
    from kvpp_connect.planning.forecast import owned_layers

    for stage, layout in enumerate(made.layouts):
        where = f"stage {stage}: " if len(made.layouts) > 1 else ""
        owned = " ".join(str(count) for count in owned_layers(layout))
        console.print(f"{where}layers owned per rank: {owned}")
        layers, drafts = len(layout.stage.targets), len(made.caches.drafts)
        if drafts and layout.stage.drafts:
            formula, values = "(L + D) / (ceil(L/K) + D + 2f)", f"L = {layers}, D = {drafts}"
        else:
            formula, values = "L / (ceil(L/K) + 2f)", f"L = {layers}"
        console.print(
            f"{where}formula {formula}: {values}, K = {layout.group_size}, f a scratch slot's "
            f"share of the blocks; never above K"
        )
    for capacity in made.capacities:
        if capacity.variant == "compact" and capacity.blocks:
            tokens = capacity.scratch_blocks * capacity.block_tokens
            share = capacity.scratch_blocks / capacity.blocks
            console.print(f"compact: {tokens:,} running tokens at once, f = {share:.3f}")


def _print_broadcasts(console: "Console", made: "Plan") -> None:
    from kvpp_connect.planning.units import format_bytes, format_seconds

    step = made.request.step
    if step is None or not made.broadcasts:
        return
    with_link = made.broadcasts[0].hiding is not None
    table = make_table(
        f"a step of {step.requests} x {step.context_tokens:,} tokens",
        "blocks per layer",
        "per layer",
        "per step",
        *(["broadcast", "hidden", "waits per step", "link that hides"] if with_link else []),
    )
    for entry in made.broadcasts:
        traffic, hiding = entry.traffic, entry.hiding
        table.add_row(
            _TITLES[traffic.mode],
            f"{traffic.blocks:,}",
            format_bytes(traffic.layer_bytes),
            format_bytes(traffic.step_bytes),
            *(
                [
                    format_seconds(hiding.broadcast_s),
                    "all but the first" if hiding.hidden else "no",
                    format_seconds(hiding.exposed_s),
                    f"{hiding.needed_bytes_per_s / 1e9:,.2f} GB/s",
                ]
                if hiding
                else []
            ),
        )
    console.print(table)


def _print_plot(console: "Console", made: "Plan") -> None:
    """Tokens as bars; below, the formula over the size of the group."""
    from kvpp_connect.layout import capacity_ratio

    most = max(capacity.tokens for capacity in made.capacities) or 1
    for capacity in made.capacities:
        title = _TITLES[capacity.variant].format(
            dcp=capacity.block_tokens // made.caches.block_tokens
        )
        console.print(f"{title:>12} {_bar(capacity.tokens / most)} {capacity.tokens:,}")
    if not made.layouts:
        return
    layers = max(len(layout.stage.targets) for layout in made.layouts)
    ranks = [k for k in (2, 4, 8, 16, 32, 64) if k <= max(16, made.settings.group_size)]
    console.print(f"\nfull mode by ranks in the group, {layers} equal layers")
    for k in ranks:
        ratio = capacity_ratio(layers, k)
        console.print(f"{k:>12} {_bar(ratio / ranks[-1])} x{ratio:.2f} of {k}")


def _bar(share: float, width: int = 50) -> str:
    return "#" * round(share * width) + "." * (width - round(share * width))


def _pieces(made: "Plan") -> list[dict[str, Any]]:
    """Every kind of component, with the number of layers that have it."""
    found: dict[tuple[str, int, bool], int] = {}
    for layers, draft in ((made.caches.layers, False), (made.caches.drafts, True)):
        for piece in (piece for layer in layers for piece in layer):
            key = (piece.name, piece.token_bytes, draft)
            found[key] = found.get(key, 0) + 1
    return [
        {
            "name": f"{name} (MTP)" if draft else name,
            "draft": draft,
            "layers": count,
            "token_bytes": token_bytes,
            "block_bytes": token_bytes * made.caches.block_tokens,
        }
        for (name, token_bytes, draft), count in found.items()
    ]


def _document(made: "Plan") -> dict[str, Any]:
    from dataclasses import asdict

    from kvpp_connect.planning.forecast import owned_layers

    sizes = made.request.sizes
    return {
        "path": str(made.model.checkpoint.path),
        "model": made.model.checkpoint.name,
        "model_type": made.model.checkpoint.model_type,
        "mla": made.model.attention.is_mla,
        "layers": len(made.caches.layers),
        "mtp_layers": len(made.caches.drafts),
        "tp": sizes.tensor,
        "pp": sizes.pipeline,
        "pcp": sizes.prefill_context,
        "device": made.request.options.device,
        "stored_as": made.caches.stored_as,
        "block_tokens": made.caches.block_tokens,
        "token_bytes": made.caches.token_bytes,
        "settings": asdict(made.settings),
        "components": _pieces(made),
        "owned_layers": [list(owned_layers(layout)) for layout in made.layouts],
        "limit": made.settings.group_size if made.layouts else None,
        "capacities": [
            {**asdict(capacity), "ratio": made.ratio(capacity)} for capacity in made.capacities
        ],
        "broadcasts": [
            {**asdict(entry.traffic), **(asdict(entry.hiding) if entry.hiding else {})}
            for entry in made.broadcasts
        ],
        "notes": list(made.notes),
    }
