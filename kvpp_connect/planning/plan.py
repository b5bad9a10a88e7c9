"""One checkpoint, one machine, all layouts side by side: what `kvpp plan` computes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvpp_connect.errors import ConfigError, LayoutError
from kvpp_connect.layout import GroupLayout, StageLayers
from kvpp_connect.planning.audit import Model
from kvpp_connect.planning.broadcasts import Hiding, Step, StepTraffic, hide, step_traffic
from kvpp_connect.planning.caches import CacheOptions, ModelCaches, read_caches
from kvpp_connect.planning.forecast import (
    Capacity,
    ServerSettings,
    kvpp_capacity,
    plain_capacity,
)
from kvpp_connect.planning.geometry import (
    ParallelSizes,
    accepted_decode_contexts,
    check_sizes,
    refusal,
)
from kvpp_connect.platforms.base import PLATFORMS

KVPP_MODES = ("full", "compact")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the command line asks.

    Attributes:
        decode_context: DCP to show; ``None`` for the largest that vLLM accepts.
        max_model_tokens: ``None`` for the model's own.
        step: the forward whose broadcasts are of interest.
        link_bytes_per_s, layer_s: both or neither; bandwidth of a broadcast, time of a layer.
    """

    sizes: ParallelSizes
    memory_bytes: int
    options: CacheOptions = field(default_factory=CacheOptions)
    decode_context: int | None = None
    max_model_tokens: int | None = None
    max_requests: int = 256
    running_tokens: int | None = None
    step: Step | None = None
    link_bytes_per_s: float | None = None
    layer_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcasts:
    """One mode's traffic per step; ``hiding`` where a link and a layer's time were given."""

    traffic: StepTraffic
    hiding: Hiding | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer.

    Attributes:
        capacities: plain first, then what is possible of DCP, full and compact KVPP.
        layouts: KVPP's plan of each stage in full mode; empty without KVPP.
        broadcasts: one entry for each KVPP mode where a step was given.
        notes: what was assumed, and why a layout is missing.
    """

    model: Model
    request: PlanRequest
    settings: ServerSettings
    caches: ModelCaches
    stages: tuple[StageLayers, ...]
    capacities: tuple[Capacity, ...]
    layouts: tuple[GroupLayout, ...]
    broadcasts: tuple[Broadcasts, ...]
    notes: tuple[str, ...]

    def ratio(self, capacity: Capacity) -> float | None:
        """Tokens over plain; ``None`` where plain holds none."""
        plain = self.capacities[0].tokens
        return capacity.tokens / plain if plain else None


def make_plan(
    model: Model, request: PlanRequest, environment: Mapping[str, str] | None = None
) -> Plan:
    """Compute every layout that the model allows.

    Raises:
        ConfigError: sizes or settings with which no server starts, or a cache not known here.
    """
    environment = os.environ if environment is None else environment
    check_sizes(request.sizes)
    _check_request(request)
    sizes = replace(request.sizes, decode_context=1)
    refused = refusal(sizes, model.attention)
    if refused is not None:
        raise ConfigError(f"the server would refuse this ({refused.by}): {refused.reason}")
    caches = read_caches(model.checkpoint, model.attention, request.options, sizes.tensor)
    stages = caches.stages(sizes.pipeline, environment.get("VLLM_PP_LAYER_PARTITION"))
    platform = PLATFORMS.get(request.options.device)
    settings = ServerSettings(
        memory_bytes=request.memory_bytes,
        max_model_tokens=request.max_model_tokens or model.max_model_tokens,
        max_requests=request.max_requests,
        running_tokens=request.running_tokens,
        group_size=sizes.group,
        alignment_bytes=platform.alignment_bytes if platform else 1,
        block_numbers=platform.block_numbers if platform else "component",
    )
    capacities = [plain_capacity(stages, caches.block_tokens, settings)]
    notes = [*caches.notes]
    with_dcp = _with_decode_context(model, request, stages, caches, settings)
    capacities += with_dcp[0]
    notes += with_dcp[1]
    reason = _no_kvpp(model, request)
    notes += [reason] if reason else []
    plans: dict[str, tuple[GroupLayout, ...]] = {}
    for mode in () if reason else KVPP_MODES:
        try:
            capacity, plans[mode] = kvpp_capacity(mode, stages, caches.block_tokens, settings)
        except LayoutError as error:
            notes.append(f"no KVPP {mode}: {error}")
        else:
            capacities.append(capacity)
    if not reason and platform is None:
        notes.append(
            f"KVPP does not run on {request.options.device} in this version; its figures leave "
            "out alignment"
        )
    broadcasts = _broadcasts(request, capacities, plans, caches.block_tokens)
    notes += _crowded(request, capacities, caches.block_tokens)
    return Plan(
        model=model,
        request=request,
        settings=settings,
        caches=caches,
        stages=stages,
        capacities=tuple(capacities),
        layouts=plans.get("full", ()),
        broadcasts=broadcasts,
        notes=tuple(notes),
    )


def _check_request(request: PlanRequest) -> None:
    for flag, value in (
        ("--max-model-len", request.max_model_tokens),
        ("--max-num-seqs", request.max_requests),
        ("--running-tokens", request.running_tokens),
        ("--batch", request.step.requests if request.step else None),
        ("--context", request.step.context_tokens if request.step else None),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} is {value}; expected at least 1")


def _with_decode_context(
    model: Model,
    request: PlanRequest,
    stages: tuple[StageLayers, ...],
    caches: ModelCaches,
    settings: ServerSettings,
) -> tuple[list[Capacity], list[str]]:
    sizes, asked = request.sizes, request.decode_context
    if asked is None:
        asked = accepted_decode_contexts(sizes, model.attention)[-1]
        if asked == 1:
            refused = refusal(replace(sizes, decode_context=2), model.attention)
            return [], [f"no DCP: {refused.reason}"] if refused else []
    refused = refusal(replace(sizes, decode_context=asked), model.attention)
    if refused is not None:
        return [], [f"DCP {asked} would be refused ({refused.by}): {refused.reason}"]
    if asked == 1:
        return [], []
    return [plain_capacity(stages, caches.block_tokens, settings, asked)], []


def _no_kvpp(model: Model, request: PlanRequest) -> str:
    """Why KVPP is no choice here; empty where it is one."""
    if not model.attention.is_mla:
        return f"no KVPP: it is for models with MLA ({model.attention.why})"
    if request.sizes.group == 1:
        return "no KVPP: a group of one rank has nobody to share layers with"
    return ""


def _crowded(request: PlanRequest, capacities: list[Capacity], block_tokens: int) -> list[str]:
    """Whether the step is larger than a layout holds at once."""
    active = request.step.active_blocks(block_tokens) if request.step else 0
    notes: list[str] = []
    for capacity in capacities:
        room = capacity.scratch_blocks  # in full mode it is all blocks
        if capacity.variant in KVPP_MODES and active > room:
            notes.append(
                f"{capacity.variant}: the step needs {active} blocks and {room} run at once; the "
                "rest waits"
            )
    return notes


def _broadcasts(
    request: PlanRequest,
    capacities: list[Capacity],
    plans: dict[str, tuple[GroupLayout, ...]],
    block_tokens: int,
) -> tuple[Broadcasts, ...]:
    step = request.step
    if step is None:
        return ()
    found: list[Broadcasts] = []
    blocks = {capacity.variant: capacity.blocks for capacity in capacities}
    for mode in KVPP_MODES:
        if mode not in plans:
            continue
        traffic = step_traffic(
            mode,
            plans[mode],
            all_blocks=blocks[mode],
            active_blocks=step.active_blocks(block_tokens),
        )
        hiding = None
        if request.link_bytes_per_s is not None and request.layer_s is not None:
            hiding = hide(
                plans[mode],
                traffic,
                link_bytes_per_s=request.link_bytes_per_s,
                layer_s=request.layer_s,
            )
        found.append(Broadcasts(traffic=traffic, hiding=hiding))
    return tuple(found)
