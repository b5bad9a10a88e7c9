"""What duplication costs a checkpoint at given parallel sizes, and what to launch instead."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from kvpp_connect.errors import ConfigError
from kvpp_connect.planning.attention import (
    Attention,
    ModelImpl,
    mla_disabled,
    read_attention,
)
from kvpp_connect.planning.caches import CacheOptions, ModelCaches, check_options, read_caches
from kvpp_connect.planning.checkpoint import Checkpoint, read_checkpoint
from kvpp_connect.planning.geometry import (
    ParallelSizes,
    Refusal,
    accepted_decode_contexts,
    check_sizes,
    copies,
    refusal,
)

Cure = Literal["nothing", "kvpp", "dcp"]
_KVPP_FLAG = """--additional-config '{"enable_kvpp": true}'"""
# Longest sequence where a config names none of the keys; vLLM's default.
_DEFAULT_MODEL_TOKENS = 2048
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Rope types whose factor is in max_position_embeddings already.
_ROPE_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing to launch: its flags, and how often each token is stored then."""

    cure: Cure
    flags: str
    copies_left: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Model:
    """A checkpoint with the facts that the commands share."""

    checkpoint: Checkpoint
    attention: Attention
    max_model_tokens: int


@dataclass(frozen=True, kw_only=True)
class AuditRow:
    """One checkpoint at one set of parallel sizes.

    Attributes:
        factor: copies of each KV head over the tensor parallel group.
        copies: copies of each token over the TP x PCP group, with the DCP that was asked for
            unless it is refused.
        accepted_decode_contexts: values of DCP that vLLM accepts.
        refusal: why the asked geometry would not start; ``None`` where it does.
        caches: ``None`` where the model's cache is not known here; then ``unknown_caches`` says
            why.
        distinct_token_bytes: one copy of a token over all layers and ranks; ``None`` as above.
    """

    model: Model
    sizes: ParallelSizes
    factor: int
    copies: int
    accepted_decode_contexts: tuple[int, ...]
    refusal: Refusal | None
    caches: ModelCaches | None
    unknown_caches: str
    distinct_token_bytes: int | None
    advice: tuple[Advice, ...]

    @property
    def wasted_token_bytes(self) -> int | None:
        """Bytes that the group stores of each token beyond one copy."""
        distinct = self.distinct_token_bytes
        return None if distinct is None else (self.copies - 1) * distinct

    @property
    def wasted_share(self) -> float:
        """Share of the group's KV memory that holds copies."""
        return 1 - 1 / self.copies


def read_model(
    path: Path, *, model_impl: ModelImpl = "vllm", environment: Mapping[str, str] | None = None
) -> Model:
    """Read a checkpoint and decide its attention.

    Raises:
        ConfigError: see ``read_checkpoint`` and ``read_attention``.
    """
    disabled = mla_disabled(os.environ if environment is None else environment)
    checkpoint = read_checkpoint(path)
    return Model(
        checkpoint=checkpoint,
        attention=read_attention(checkpoint, disabled=disabled, model_impl=model_impl),
        max_model_tokens=max_model_tokens(checkpoint),
    )


def max_model_tokens(checkpoint: Checkpoint) -> int:
    """Longest sequence of the model, as vLLM derives it without --max-model-len."""
    lengths = [checkpoint.number(key) for key in _LENGTH_KEYS]
    tokens = min((length for length in lengths if length is not None), default=None)
    if tokens is None:
        return _DEFAULT_MODEL_TOKENS
    tokens = checkpoint.number("model_max_length") or tokens
    return int(tokens * _rope_factor(checkpoint))


def _rope_factor(checkpoint: Checkpoint) -> float:
    """Factor by which rope scaling lengthens the model."""
    rope = checkpoint.text.get("rope_scaling") or checkpoint.text.get("rope_parameters")
    if not isinstance(rope, dict):
        return 1.0
    settings = cast("dict[str, object]", rope)
    kind = settings.get("rope_type") or settings.get("type")
    factor = settings.get("factor")
    if kind in _ROPE_SCALED or isinstance(factor, bool) or not isinstance(factor, int | float):
        return 1.0
    return float(factor) if 1 <= factor <= 1e6 else 1.0


def audit(
    model: Model, sizes: ParallelSizes, options: CacheOptions, ranks_per_node: int = 8
) -> AuditRow:
    """Judge one checkpoint at one set of sizes.

    Raises:
        ConfigError: sizes with which no arithmetic is possible, or an option that is none.
    """
    check_sizes(sizes)
    check_options(options)
    if ranks_per_node < 1:
        raise ConfigError(f"--ranks-per-node is {ranks_per_node}; expected at least 1")
    attention = model.attention
    accepted = accepted_decode_contexts(sizes, attention)
    refused = refusal(sizes, attention)
    caches, unknown, token_bytes = None, "", None
    try:
        caches = read_caches(model.checkpoint, attention, options, sizes.tensor)
    except ConfigError as error:
        unknown = str(error)
    if caches is not None:
        # Each rank holds max(1, H / TP) of the H heads.
        ranks = min(sizes.tensor, attention.kv_heads)
        token_bytes = caches.token_bytes * ranks
    return AuditRow(
        model=model,
        sizes=sizes,
        factor=attention.factor(sizes.tensor),
        copies=copies(replace(sizes, decode_context=1) if refused else sizes, attention),
        accepted_decode_contexts=accepted,
        refusal=refused,
        caches=caches,
        unknown_caches=unknown,
        distinct_token_bytes=token_bytes,
        advice=_advice(model, sizes, accepted, caches is not None, ranks_per_node),
    )


def _advice(
    model: Model,
    sizes: ParallelSizes,
    accepted: tuple[int, ...],
    cache_known: bool,
    ranks_per_node: int,
) -> tuple[Advice, ...]:
    if not accepted:
        return ()  # the server would not start with these sizes at all
    total = copies(replace(sizes, decode_context=1), model.attention)
    if total == 1:
        why = "every rank holds KV heads of its own"
        return (Advice(cure="nothing", flags=_flags(sizes, 1), copies_left=1, why=why),)
    found: list[Advice] = []
    if model.attention.is_mla and cache_known:
        flags = f"{_flags(sizes, 1)} {_KVPP_FLAG}"
        why = "each layer on one rank, broadcast before it runs"
        found.append(Advice(cure="kvpp", flags=flags, copies_left=1, why=why))
    largest = accepted[-1]
    local = max(size for size in accepted if size <= ranks_per_node)
    if largest > 1:
        why = f"tokens sharded over {largest} ranks"
        found.append(
            Advice(
                cure="dcp",
                flags=_flags(sizes, largest),
                copies_left=max(1, total // largest),
                why=why,
            )
        )
    if 1 < local < largest:
        why = f"DCP's traffic stays inside a node of {ranks_per_node} ranks"
        left = max(1, total // local)
        found.append(Advice(cure="dcp", flags=_flags(sizes, local), copies_left=left, why=why))
    if not found:
        why = f"no DCP is accepted, and {total} copies stay"
        found.append(Advice(cure="nothing", flags=_flags(sizes, 1), copies_left=total, why=why))
    return tuple(found)


def _flags(sizes: ParallelSizes, decode_context: int) -> str:
    """Short flags of `vllm serve`; sizes of 1 are left out."""
    flags = [f"-tp {sizes.tensor}"]
    for flag, size in (
        ("-pp", sizes.pipeline),
        ("-pcp", sizes.prefill_context),
        ("-dcp", decode_context),
    ):
        if size > 1:
            flags.append(f"{flag} {size}")
    return " ".join(flags)
