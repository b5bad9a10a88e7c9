"""How much of the broadcasts is hidden behind the compute of a step.

The real engine, layouts, payloads and transports between local ranks, without a model: in place of
each layer's work stand two products with a square matrix, one before the layer asks for its cache
and one after. A step is timed three ways, in turn, again and again: compute alone (KVPP off),
compute and broadcasts (KVPP on), broadcasts alone. What KVPP adds to a step is exposed; the rest of
what the broadcasts take alone is hidden.

Ranks on CPUs copy with the cores that compute, so only waiting can be hidden here. On devices with
streams and links of their own the engine starts the same broadcasts beside the compute.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from kvpp_connect.bench.local_ranks import run_ranks
from kvpp_connect.bench.rounds import Spread, TransportName, make_transports, spread, timed
from kvpp_connect.bench.traffic import BLOCK_BYTES, Mode, StepEngine, make_engine

_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """A batch of equal requests without common blocks.

    ``tokens`` is what the step computes of each request, ``history`` what is cached before.
    """

    name: str
    requests: int
    tokens: int
    history: int

    @property
    def blocks(self) -> int:
        """Blocks of each request."""
        return -(-(self.history + self.tokens) // _BLOCK_TOKENS)


DEFAULT_STEPS = (
    StepShape(name="decode", requests=16, tokens=1, history=511),
    StepShape(name="prefill", requests=1, tokens=256, history=768),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapOptions:
    """What is run.

    Attributes:
        blocks: of each layer's cache; in full mode all of them travel.
        width: rows and columns of the matrix, in float32.
        rounds: how often every step is timed each way.
    """

    ranks: int = 2
    layers: int = 8
    blocks: int = 1024
    width: int = 1024
    rounds: int = 7
    steps: tuple[StepShape, ...] = field(default=DEFAULT_STEPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRow:
    """One step in one mode over one transport.

    Attributes:
        layer_flops: floating-point operations of a layer's compute.
        layer_bytes: of one broadcast.
        off, on, transfer: seconds of a step: compute alone, compute and broadcasts, broadcasts
            alone.
        exposed_s: what KVPP adds to a step, median of all rounds.
        hidden_share: the rest, as a share of the time of the broadcasts alone, median of all
            rounds; noise may carry it past 0 and 1.
    """

    step: str
    mode: Mode
    transport: TransportName
    layer_flops: int
    layer_bytes: int
    off: Spread
    on: Spread
    transfer: Spread
    exposed_s: float
    hidden_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapReport:
    """The whole result; ``load`` is the machine's before the benchmark began."""

    options: OverlapOptions
    cores: int
    load: float
    rows: tuple[OverlapRow, ...]


def measure_overlap(options: OverlapOptions, limit_s: float) -> OverlapReport:
    """Start local processes and measure.

    Args:
        limit_s: seconds after which it is given up.

    Raises:
        KvppError: a process failed or the time is up.
    """
    load = os.getloadavg()[0]
    rows = run_ranks(_measure_on_rank, options.ranks, limit_s, options)
    cores = len(os.sched_getaffinity(0))
    return OverlapReport(options=options, cores=cores, load=load, rows=rows)


def _measure_on_rank(options: OverlapOptions) -> tuple[OverlapRow, ...]:
    transports = make_transports()
    rows: list[OverlapRow] = []
    for shape in options.steps:
        work = _make_work(shape.requests * shape.tokens, options.width)
        order = torch.randperm(options.blocks, generator=torch.Generator().manual_seed(0))
        table = order[: shape.requests * shape.blocks].view(shape.requests, shape.blocks)
        for mode in ("full", "compact"):
            made: dict[TransportName, StepEngine] = {
                name: make_engine(mode, table, options.blocks, options.layers, transport)
                for name, transport in transports.items()
            }
            rows += _measure_step(options, shape, mode, made, work)
    return tuple(rows)


def _make_work(tokens: int, width: int) -> Callable[[], None]:
    """Half of a layer's compute for so many tokens."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    weights = torch.randn(width, width, generator=generator)
    inputs, outputs = torch.randn(tokens, width, generator=generator), torch.empty(tokens, width)

    def work() -> None:
        torch.mm(inputs, weights, out=outputs)

    return work


def _measure_step(
    options: OverlapOptions,
    shape: StepShape,
    mode: Mode,
    made: dict[TransportName, StepEngine],
    work: Callable[[], None],
) -> list[OverlapRow]:
    def compute() -> None:
        for _ in range(2 * options.layers):
            work()

    off: list[float] = []
    on: dict[TransportName, list[float]] = {name: [] for name in made}
    alone: dict[TransportName, list[float]] = {name: [] for name in made}
    for _ in range(options.rounds + 1):  # the first one warms up
        off.append(timed(compute))
        for name, step in made.items():
            on[name].append(timed(lambda step=step: step.run(work)))
            alone[name].append(timed(step.run))
    sent = options.blocks if mode == "full" else shape.requests * shape.blocks
    flops = 2 * 2 * shape.requests * shape.tokens * options.width**2
    return [
        OverlapRow(
            step=shape.name,
            mode=mode,
            transport=name,
            layer_flops=flops,
            layer_bytes=sent * BLOCK_BYTES,
            **compare_rounds(off[1:], on[name][1:], alone[name][1:]),
        )
        for name in made
    ]


def compare_rounds(off: list[float], on: list[float], alone: list[float]) -> dict[str, Any]:
    """The times of a row, round by round, so that load that comes and goes weighs little."""
    exposed = [with_kvpp - without for without, with_kvpp in zip(off, on, strict=True)]
    hidden = [1 - added / moved for added, moved in zip(exposed, alone, strict=True)]
    return {
        "off": spread(off),
        "on": spread(on),
        "transfer": spread(alone),
        "exposed_s": median(exposed),
        "hidden_share": median(hidden),
    }
