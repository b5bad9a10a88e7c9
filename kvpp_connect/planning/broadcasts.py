"""What one step broadcasts, and whether a link hides it behind the layers.

While layer ``i`` computes, the bundle of layer ``i + 1`` travels. A broadcast is hidden when it
takes no longer than a layer; the first one has nothing to hide behind.
"""

from dataclasses import dataclass
from typing import Literal

from kvpp_connect.layout import GroupLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward with history: ``requests`` of ``context_tokens`` each, no block shared."""

    requests: int
    context_tokens: int

    def active_blocks(self, block_tokens: int) -> int:
        """Blocks of the requests in the step."""
        return self.requests * -(-self.context_tokens // block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """Broadcasts of one step in the stage that has most to send.

    Attributes:
        blocks: blocks of each layer that travel.
        layer_bytes: of the largest bundle.
        step_bytes: of all layers.
    """

    mode: Literal["full", "compact"]
    blocks: int
    layer_bytes: int
    step_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hiding:
    """Broadcasts against a link and a layer's time.

    Attributes:
        broadcast_s: of the largest bundle.
        hidden: whether every broadcast but the first fits behind a layer.
        exposed_s: what a step waits for broadcasts, the first one included.
        needed_bytes_per_s: the slowest link that hides.
    """

    broadcast_s: float
    hidden: bool
    exposed_s: float
    needed_bytes_per_s: float


def step_traffic(
    mode: Literal["full", "compact"],
    layouts: tuple[GroupLayout, ...],
    *,
    all_blocks: int,
    active_blocks: int,
) -> StepTraffic:
    """Bytes of one step: whole layers in ``full`` mode, active blocks in ``compact``.

    Args:
        all_blocks: blocks that the server has.
        active_blocks: blocks of the requests in the step.
    """
    blocks = all_blocks if mode == "full" else min(active_blocks, all_blocks)
    bundles = [_bundle_bytes(layout) for layout in layouts]
    largest_stage = max(bundles, key=sum)
    return StepTraffic(
        mode=mode,
        blocks=blocks,
        layer_bytes=blocks * max(largest_stage, default=0),
        step_bytes=blocks * sum(largest_stage),
    )


def hide(
    layouts: tuple[GroupLayout, ...],
    traffic: StepTraffic,
    *,
    link_bytes_per_s: float,
    layer_s: float,
) -> Hiding:
    """Compare every broadcast of the busiest stage with the time of one layer.

    Args:
        link_bytes_per_s: bandwidth of a broadcast inside the group.
        layer_s: time of one layer of that step.

    Example:
        Four layers of 1 ms, broadcasts of 1.5 ms: 1.5 + 3 x 0.5 = 3 ms exposed.
    """
    stage = max((_bundle_bytes(layout) for layout in layouts), key=sum)
    seconds = [traffic.blocks * size / link_bytes_per_s for size in stage]
    late = [max(0.0, s - layer_s) for s in seconds[1:]]
    return Hiding(
        broadcast_s=max(seconds, default=0.0),
        hidden=not any(late),
        exposed_s=sum(seconds[:1]) + sum(late),
        needed_bytes_per_s=traffic.blocks * max(stage[1:], default=0) / layer_s,
    )


def _bundle_bytes(layout: GroupLayout) -> list[int]:
    return [bundle.page_bytes for bundle in layout.stage.targets]
