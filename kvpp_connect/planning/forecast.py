"""How many blocks and tokens a given memory holds: plain, with DCP, and with KVPP in both modes.

Plain numbers follow vLLM's planner; KVPP's come from the very functions of ``layout`` with which
the workers plan, so they agree with a running server to the block.
"""

from dataclasses import dataclass
from typing import Literal

from kvpp_connect.errors import ConfigError, LayoutError
from kvpp_connect.layout import (
    BlockNumbers,
    FullScratch,
    GroupLayout,
    ScratchSize,
    StageLayers,
    capacity_by_bytes,
    group_blocks,
    plan_group,
    running_scratch,
)

Variant = Literal["plain", "dcp", "full", "compact"]
_MOST_GROUP_RANKS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What decides about capacity besides the caches.

    Attributes:
        memory_bytes: KV memory per rank.
        max_model_tokens: ``--max-model-len``.
        max_requests: ``--max-num-seqs``; bounds compact's scratch.
        running_tokens: ``additional_config.kvpp.running_tokens``.
        group_size: ranks of a KVPP group, TP x PCP.
        alignment_bytes: of every cache component's base, by the platform.
        block_numbers: what has block numbers of its own in compact's scratch, by the platform.
    """

    memory_bytes: int
    max_model_tokens: int
    max_requests: int = 256
    running_tokens: int | None = None
    group_size: int = 1
    alignment_bytes: int = 1
    block_numbers: BlockNumbers = "component"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one way to lay out the cache holds.

    Attributes:
        variant: the layout.
        blocks: vLLM's number of blocks.
        block_tokens: tokens that one block id stands for, DCP included.
        tokens, concurrency: what vLLM logs at start-up.
        block_bytes: bytes that one more block takes on the fullest rank; scratch that does not
            grow with the blocks is not in it.
        scratch_blocks: blocks of one scratch slot; 0 without KVPP.
        formula: capacity over plain by the formula; ``None`` without KVPP.
        problem: why a server would not start so; empty where it does.
    """

    variant: Variant
    blocks: int
    block_tokens: int
    tokens: int
    concurrency: float
    block_bytes: int
    scratch_blocks: int = 0
    formula: float | None = None
    problem: str = ""


def plain_capacity(
    stages: tuple[StageLayers, ...],
    block_tokens: int,
    settings: ServerSettings,
    decode_context: int = 1,
) -> Capacity:
    """vLLM's own layout, every rank holding every layer of its stage; with DCP, a share of the
    tokens of each."""
    block_bytes = max(stage.plain_page_bytes for stage in stages)
    return _capacity(
        "plain" if decode_context == 1 else "dcp",
        settings.memory_bytes // block_bytes,
        block_tokens,
        settings,
        block_bytes=block_bytes,
        decode_context=decode_context,
    )


def kvpp_capacity(
    variant: Literal["full", "compact"],
    stages: tuple[StageLayers, ...],
    block_tokens: int,
    settings: ServerSettings,
) -> tuple[Capacity, tuple[GroupLayout, ...]]:
    """KVPP's layout, and the plan of each stage.

    Raises:
        ConfigError: ``running_tokens`` do not hold a request of maximum length.
        LayoutError: this mode cannot place such layers.
    """
    if settings.group_size > _MOST_GROUP_RANKS:
        raise ConfigError(
            f"a KVPP group of {settings.group_size} ranks; at most {_MOST_GROUP_RANKS} here"
        )
    scratch = _scratch(variant, block_tokens, settings)
    layouts = tuple(
        plan_group(
            stage,
            settings.group_size,
            settings.alignment_bytes,
            scratch,
            settings.block_numbers,
        )
        for stage in stages
    )
    try:
        blocks = min(group_blocks(layout, settings.memory_bytes) for layout in layouts)
        problem = ""
    except LayoutError as error:
        blocks, problem = 0, str(error)
    scratch_blocks = scratch.blocks(blocks)
    share = scratch_blocks / blocks if blocks else 1.0
    capacity = _capacity(
        variant,
        blocks,
        block_tokens,
        settings,
        block_bytes=max(int(layout.shared_block_bytes(variant == "full")) for layout in layouts),
        scratch_blocks=scratch_blocks,
        formula=capacity_by_bytes(layouts, share),
        problem=problem,
    )
    return capacity, layouts


def owned_layers(layout: GroupLayout) -> tuple[int, ...]:
    """Target layers that each rank owns."""
    return tuple(layout.owners.count(rank) for rank in range(layout.group_size))


def _scratch(variant: str, block_tokens: int, settings: ServerSettings) -> ScratchSize:
    if variant == "full":
        return FullScratch()
    return running_scratch(
        block_tokens=block_tokens,
        max_model_tokens=settings.max_model_tokens,
        max_requests=settings.max_requests,
        running_tokens=settings.running_tokens,
    )


def _capacity(
    variant: Variant,
    blocks: int,
    block_tokens: int,
    settings: ServerSettings,
    *,
    block_bytes: int,
    decode_context: int = 1,
    scratch_blocks: int = 0,
    formula: float | None = None,
    problem: str = "",
) -> Capacity:
    """Blocks to what vLLM logs, and its check that the longest request fits."""
    longest = settings.max_model_tokens
    shard = -(-longest // decode_context)
    per_request = -(-shard // block_tokens)
    concurrency = blocks / per_request
    # vLLM keeps one block to itself.
    if not problem and blocks < per_request + 1:
        problem = (
            f"one request of {longest} tokens needs {per_request} blocks and vLLM one more, "
            f"{blocks} fit; more KV memory, or a smaller --max-model-len"
        )
    return Capacity(
        variant=variant,
        blocks=blocks,
        block_tokens=block_tokens * decode_context,
        tokens=int(concurrency * longest),
        concurrency=concurrency,
        block_bytes=block_bytes,
        scratch_blocks=scratch_blocks,
        formula=formula,
        problem=problem,
    )
