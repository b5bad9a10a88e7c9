"""What KVPP holds: planned for given models, and measured on real servers against the plan."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from kvpp_connect.demo.fleet import Fleet
from kvpp_connect.demo.logs import kv_cache_size, read_log
from kvpp_connect.demo.model import ModelSpec, write_checkpoint
from kvpp_connect.demo.ports import free_ports
from kvpp_connect.demo.progress import show_progress
from kvpp_connect.demo.servers import VllmServer
from kvpp_connect.errors import ConfigError
from kvpp_connect.layout import capacity_by_bytes, plan_group
from kvpp_connect.planning.audit import read_model
from kvpp_connect.planning.caches import CacheOptions, read_caches
from kvpp_connect.planning.geometry import ParallelSizes
from kvpp_connect.planning.plan import PlanRequest, make_plan

_START_LIMIT_S = 400.0
_MAX_MODEL_TOKENS, _MAX_REQUESTS = 1024, 4
_VARIANTS: tuple[Literal["plain", "full", "compact"], ...] = ("plain", "full", "compact")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRatio:
    """Capacity over plain by the formula, with the layers' real sizes.

    Attributes:
        limit: what no layout over so many ranks can pass: all layers over the fullest rank's.
        full: with whole-layer scratch.
        compact: for each scratch share f that was asked for.
    """

    model: str
    ranks: int
    limit: float
    full: float
    compact: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCapacity:
    """One server's own start-up line beside ``kvpp plan``.

    Attributes:
        limit: as of ``PlannedRatio``.
        plain_ratio, planned_ratio: tokens over those of plain vLLM, measured and planned.
    """

    ranks: int
    variant: str
    served_tokens: int
    planned_tokens: int
    plain_ratio: float
    planned_ratio: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityReport:
    """The whole result; ``shares`` are the scratch shares of ``PlannedRatio.compact``."""

    shares: tuple[float, ...]
    planned: tuple[PlannedRatio, ...]
    measured: tuple[MeasuredCapacity, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """Servers that do not hold what was planned, to the block."""
        return tuple(
            f"{row.variant} on {row.ranks} ranks: {row.served_tokens} tokens, planned are "
            f"{row.planned_tokens}"
            for row in self.measured
            if row.served_tokens != row.planned_tokens
        )


def plan_ratios(
    paths: Sequence[Path], group_sizes: Sequence[int], shares: Sequence[float]
) -> tuple[PlannedRatio, ...]:
    """Ratios of models over KVPP groups of several sizes, by planning alone.

    Args:
        paths: checkpoint directories or ``config.json`` files, of models with MLA.
        shares: blocks of a scratch slot over all blocks, each between 0 and 1.

    Raises:
        ConfigError: a model without MLA, or a checkpoint that cannot be read.
    """
    rows: list[PlannedRatio] = []
    for path in paths:
        model = read_model(path)
        if not model.attention.is_mla:
            raise ConfigError(f"{path}: no MLA, so there is nothing for KVPP to share")
        caches = read_caches(model.checkpoint, model.attention, CacheOptions(), 1)
        stages = caches.stages(1, None)
        for ranks in group_sizes:
            layouts = tuple(plan_group(stage, ranks) for stage in stages)
            rows.append(
                PlannedRatio(
                    model=model.checkpoint.name,
                    ranks=ranks,
                    limit=round(capacity_by_bytes(layouts, 0.0), 3),
                    full=round(capacity_by_bytes(layouts, 1.0), 3),
                    compact=tuple(round(capacity_by_bytes(layouts, f), 3) for f in shares),
                )
            )
    return tuple(rows)


def measure_capacities(
    group_sizes: Sequence[int], kv_cache_bytes: int, layers: int, console: Console
) -> tuple[MeasuredCapacity, ...]:
    """Start one server of each layout for each group size, and read its start-up line.

    Args:
        kv_cache_bytes: per rank.
        layers: of the generated model.
        console: for progress.

    Raises:
        KvppError: a server did not start.
    """
    rows: list[MeasuredCapacity] = []
    with tempfile.TemporaryDirectory(prefix="kvpp-bench-") as folder:
        heads = max(4, *group_sizes)
        model = write_checkpoint(Path(folder) / "model", ModelSpec(layers=layers, heads=heads))
        for ranks in group_sizes:
            planned = _planned(model, ranks, kv_cache_bytes)
            served = {
                variant: _served(model, ranks, variant, kv_cache_bytes, console)
                for variant in _VARIANTS
            }
            rows += [
                MeasuredCapacity(
                    ranks=ranks,
                    variant=variant,
                    served_tokens=served[variant],
                    planned_tokens=planned[variant],
                    plain_ratio=round(served[variant] / served["plain"], 4),
                    planned_ratio=round(planned[variant] / planned["plain"], 4),
                    limit=round(layers / -(-layers // ranks), 3),
                )
                for variant in _VARIANTS
            ]
    return tuple(rows)


def _planned(model: Path, ranks: int, kv_cache_bytes: int) -> dict[str, int]:
    made = make_plan(
        read_model(model),
        PlanRequest(
            sizes=ParallelSizes(tensor=ranks),
            memory_bytes=kv_cache_bytes,
            options=CacheOptions(device="cpu", dtype="float32"),
            max_model_tokens=_MAX_MODEL_TOKENS,
            max_requests=_MAX_REQUESTS,
        ),
    )
    return {capacity.variant: capacity.tokens for capacity in made.capacities}


def _served(model: Path, ranks: int, variant: str, kv_cache_bytes: int, console: Console) -> int:
    kvpp = {"enable_kvpp": True, "kvpp": {"mode": variant}}
    server = VllmServer(
        name=f"{variant}-{ranks}",
        model=model,
        port=free_ports(1)[0],
        tensor_parallel_size=ranks,
        kv_cache_bytes=kv_cache_bytes,
        max_model_tokens=_MAX_MODEL_TOKENS,
        max_requests=_MAX_REQUESTS,
        additional_config=None if variant == "plain" else kvpp,
    )
    with Fleet(model.parent / "logs") as fleet, show_progress(console) as progress:
        (running,) = fleet.start([server.launch()], timeout_s=_START_LIMIT_S, progress=progress)
        size = kv_cache_size(read_log(running.process.log_path))
        if size is None:
            raise running.process.error("logged no KV cache size")
    return size.tokens
