"""Which parallel sizes vLLM accepts, by its rules and in its order.

vLLM judges the sizes alone first (``ParallelConfig``), then the sizes against the model. Decode
context parallelism (DCP) takes no devices of its own: it re-uses ranks and shards the cache along
the tokens. Prefill context parallelism (PCP) adds devices and does not shard the cache.
"""

from dataclasses import dataclass, replace
from typing import Literal

from kvpp_connect.errors import ConfigError
from kvpp_connect.planning.attention import Attention

Judge = Literal["ParallelConfig", "model"]
_MOST_RANKS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """Parallel sizes as they are given on the command line, good or bad."""

    tensor: int
    pipeline: int = 1
    prefill_context: int = 1
    decode_context: int = 1

    @property
    def group(self) -> int:
        """Ranks of a KVPP group."""
        return self.tensor * self.prefill_context


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A server that would not start: which part of vLLM says so, and why."""

    by: Judge
    reason: str


def check_sizes(sizes: ParallelSizes) -> None:
    """Refuse sizes with which no arithmetic is possible.

    Raises:
        ConfigError: a size other than DCP's is less than 1, or larger than any machine.
    """
    for flag, value in (
        ("--tp", sizes.tensor),
        ("--pp", sizes.pipeline),
        ("--pcp", sizes.prefill_context),
    ):
        if not 1 <= value <= _MOST_RANKS:
            raise ConfigError(f"{flag} is {value}; expected 1 to {_MOST_RANKS}")


def refusal(sizes: ParallelSizes, attention: Attention) -> Refusal | None:
    """What the server would say; ``None`` where it starts."""
    return _refused_alone(sizes) or _refused_by_model(sizes, attention)


def accepted_decode_contexts(sizes: ParallelSizes, attention: Attention) -> tuple[int, ...]:
    """The values of DCP that vLLM accepts for the other sizes, rising; empty where none is.

    1 means that DCP is off, so the last one tells whether DCP is possible.
    """
    tp, pcp = sizes.tensor, sizes.prefill_context
    candidates = range(1, tp + 1) if pcp == 1 else sorted({1, pcp, tp * pcp})
    return tuple(
        size
        for size in candidates
        if refusal(replace(sizes, decode_context=size), attention) is None
    )


def copies(sizes: ParallelSizes, attention: Attention) -> int:
    """How often the ranks of one TP x PCP group store each token, with the given DCP."""
    total = attention.factor(sizes.tensor) * sizes.prefill_context
    return max(1, total // max(1, sizes.decode_context))


def _refused_alone(sizes: ParallelSizes) -> Refusal | None:
    tp, pcp, dcp = sizes.tensor, sizes.prefill_context, sizes.decode_context
    reason = None
    if dcp < 1:
        reason = f"DCP is {dcp}; 1 turns it off, and less is not a size"
    elif pcp == 1 and tp % dcp:
        reason = f"DCP {dcp} does not divide TP {tp}"
    elif pcp > 1 and dcp not in (1, pcp, tp * pcp):
        allowed = ", ".join(str(size) for size in sorted({1, pcp, tp * pcp}))
        reason = f"with PCP {pcp}, DCP must be one of {allowed} (off, PCP, TP x PCP), not {dcp}"
    return Refusal(by="ParallelConfig", reason=reason) if reason else None


def _refused_by_model(sizes: ParallelSizes, attention: Attention) -> Refusal | None:
    tp, dcp = sizes.tensor, sizes.decode_context
    heads, kv_heads = attention.attention_heads, attention.kv_heads
    reason = None
    if heads % tp:
        reason = f"TP {tp} does not divide the {heads} attention heads"
    elif dcp > 1 and not attention.is_mla:
        if tp <= kv_heads:
            reason = f"DCP needs TP above the {kv_heads} KV heads, and TP is {tp}"
        elif dcp > tp // kv_heads:
            reason = (
                f"DCP {dcp} is above {tp // kv_heads}, the most for TP {tp} and {kv_heads} KV heads"
            )
        elif heads // kv_heads % dcp:
            reason = f"DCP {dcp} does not divide the {heads // kv_heads} query heads per KV head"
    return Refusal(by="model", reason=reason) if reason else None
