"""Two servers' logs side by side: the measured ratio of capacity, and the one to expect."""

from dataclasses import dataclass, field
from typing import Literal

from kvpp_connect.errors import ConfigError
from kvpp_connect.planning.audit import Model
from kvpp_connect.planning.caches import CacheOptions, read_caches
from kvpp_connect.planning.geometry import ParallelSizes
from kvpp_connect.planning.plan import PlanRequest, make_plan
from kvpp_connect.planning.serverlog import LogCapacity, read_capacity

_NO_BETTER = 1.005  # a ratio up to here is rounding


@dataclass(frozen=True, kw_only=True)
class LogComparison:
    """What two logs say.

    Attributes:
        ratio: tokens after over tokens before; ``None`` where a log does not tell.
        concurrency_ratio: the same of requests at once; ``None`` where lengths differ, too.
    """

    names: tuple[str, str]
    before: LogCapacity
    after: LogCapacity
    ratio: float | None
    concurrency_ratio: float | None
    notes: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """One line: is it worth it?"""
        ratio = self.ratio if self.ratio is not None else self.concurrency_ratio
        if ratio is None:
            return "the logs do not state enough to compare"
        if ratio < _NO_BETTER:
            return f"x{ratio:.3f}: no better; keep the simpler layout"
        return f"x{ratio:.3f} of the capacity before"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the second server should be running; the first one is taken for plain."""

    model: Model
    sizes: ParallelSizes
    layout: Literal["full", "compact", "dcp"]
    decode_context: int | None = None
    options: CacheOptions = field(default_factory=CacheOptions)
    running_tokens: int | None = None
    max_requests: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The ratio by the plan, for the memory that the first log implies."""

    layout: str
    ratio: float
    memory_bytes: int
    notes: tuple[str, ...] = ()


def compare_logs(before: str, after: str, names: tuple[str, str]) -> LogComparison:
    """Read both logs.

    Raises:
        ConfigError: a log states no capacity.
    """
    found: list[LogCapacity] = []
    for name, text in zip(names, (before, after), strict=True):
        capacity = read_capacity(text)
        if capacity is None:
            raise ConfigError(
                f'{name}: no line says "KV cache size" or "Maximum concurrency"; is it the log of '
                "a vLLM server that started, at level INFO?"
            )
        found.append(capacity)
    first, second = found
    same_length = first.request_tokens == second.request_tokens
    notes: list[str] = []
    if not same_length:
        notes.append(
            f"the servers have different --max-model-len ({first.request_tokens} and "
            f"{second.request_tokens}); requests at once do not compare"
        )
    if len(first.engines) != len(second.engines):
        notes.append(f"{len(first.engines)} engines before, {len(second.engines)} after")
    if first.is_rounded or second.is_rounded:
        notes.append("tokens are derived from a concurrency of two digits")
    return LogComparison(
        names=names,
        before=first,
        after=second,
        ratio=_ratio(first.tokens, second.tokens),
        concurrency_ratio=(_ratio(first.concurrency, second.concurrency) if same_length else None),
        notes=tuple(notes),
    )


def expect(compared: LogComparison, expected: Expected) -> Expectation:
    """The ratio of the plan at the memory that the plain server must have had.

    Raises:
        ConfigError: the plan is not possible, or the first log does not tell enough.
    """
    engine = compared.before.engines[0]
    tokens = engine.best_tokens
    if tokens is None:
        raise ConfigError(f"{compared.names[0]}: states no tokens, so no memory can be derived")
    caches = read_caches(
        expected.model.checkpoint,
        expected.model.attention,
        expected.options,
        expected.sizes.tensor,
    )
    stages = caches.stages(expected.sizes.pipeline, None)
    block_bytes = max(stage.plain_page_bytes for stage in stages)
    memory_bytes = max(1, round(tokens / caches.block_tokens)) * block_bytes
    plan = make_plan(
        expected.model,
        PlanRequest(
            sizes=expected.sizes,
            memory_bytes=memory_bytes,
            options=expected.options,
            decode_context=expected.decode_context,
            max_model_tokens=engine.request_tokens,
            max_requests=expected.max_requests,
            running_tokens=expected.running_tokens,
        ),
    )
    for capacity in plan.capacities:
        ratio = plan.ratio(capacity)
        if capacity.variant == expected.layout and ratio is not None:
            return Expectation(
                layout=expected.layout, ratio=ratio, memory_bytes=memory_bytes, notes=plan.notes
            )
    raise ConfigError(
        f"{expected.layout} is not possible here: {'; '.join(plan.notes) or 'see kvpp plan'}"
    )


def _ratio(before: float | None, after: float | None) -> float | None:
    if before is None or after is None or before <= 0:
        return None
    return after / before
