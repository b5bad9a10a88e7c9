"""Where every cache of a stage lies in one rank's backing allocation.

One rank's allocation, in this order: scratch slot 0, scratch slot 1, the bundles that it owns,
the drafts. Scratch comes first because vLLM views every layer's cache with all its blocks: a view
that begins in a small scratch slot then still ends inside the allocation, over bytes that the
layer, whose block numbers stay below the slot's, never touches.

Inside a bundle every component is dense, block after block, because attention kernels ask for
that, or for padding where it is not so. In a slot for running requests a forward uses some of the
blocks, and they are broadcast as one range. So where a bundle has two components the first one
fills its blocks from the back and the second one from the front:

    first component [ . . . 0 1 2 ] second component [ 0 1 2 . . . ]
                          |<------- one range ------->|

That gives the two different block numbers. Where attention has one block table for all components
of a layer, each of them fills its blocks from the front, and each is a range of its own.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import Literal

from kvpp_connect.errors import LayoutError
from kvpp_connect.layout.model import CacheComponent, LayerBundle, StageLayers
from kvpp_connect.layout.ownership import assign_owners
from kvpp_connect.layout.scratch import FullScratch, ScratchSize

NUM_SCRATCH_SLOTS = 2
MAX_RUNNING_COMPONENTS = 2  # of a bundle, in a slot for running requests, as one range

# What has block numbers of its own in a slot for running requests.
BlockNumbers = Literal["component", "layer"]


def align_up(value: int, alignment: int) -> int:
    """Round up to a multiple of ``alignment``."""
    return -(-value // alignment) * alignment


def running_obstacle(stage: StageLayers, block_numbers: BlockNumbers = "component") -> str:
    """Why a slot for running requests cannot hold a stage's layers; empty if it can."""
    if block_numbers == "layer":
        return ""
    most = max((len(bundle.components) for bundle in stage.targets), default=0)
    if most <= MAX_RUNNING_COMPONENTS:
        return ""
    return (
        f"a layer has {most} cache components, the blocks of at most {MAX_RUNNING_COMPONENTS} form "
        "one range"
    )


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """The plan of one KVPP group: the same object on every rank, whatever its memory.

    ``owners[i]`` is the rank in the group that owns ``stage.targets[i]``.
    ``alignment_bytes`` applies to the base of every component. ``scratch`` says how many blocks
    a scratch slot holds, ``block_numbers`` what has numbers of its own in one that does not mirror
    a layer.
    """

    stage: StageLayers
    group_size: int
    owners: tuple[int, ...]
    alignment_bytes: int = 1
    scratch: ScratchSize = field(default_factory=FullScratch)
    block_numbers: BlockNumbers = "component"

    def __post_init__(self) -> None:
        if len(self.owners) != len(self.stage.targets):
            raise LayoutError(
                f"{len(self.owners)} owners for {len(self.stage.targets)} target layers"
            )
        strangers = [owner for owner in self.owners if not 0 <= owner < self.group_size]
        if strangers:
            raise LayoutError(f"owners {strangers} are outside a group of {self.group_size} ranks")
        obstacle = ""
        if not self.mirrors_layers:
            obstacle = running_obstacle(self.stage, self.block_numbers)
        if obstacle:
            raise LayoutError(f"compact mode: {obstacle}. Set kvpp.mode to full")

    @property
    def mirrors_layers(self) -> bool:
        """Whether a scratch slot looks like the owner's bundle, byte for byte."""
        return isinstance(self.scratch, FullScratch)

    @property
    def slots_change_shape(self) -> bool:
        """Whether what one layer leaves in a slot lies under other components of the next one."""
        shapes = [[c.page_bytes for c in bundle.components] for bundle in self.stage.targets]
        return any(len(set(pages) - {0}) > 1 for pages in zip_longest(*shapes, fillvalue=0))

    def slot(self, ordinal: int) -> int:
        """Scratch slot of the ``ordinal``-th target bundle of the stage."""
        return ordinal % NUM_SCRATCH_SLOTS

    def bundle_bytes(self, bundle: LayerBundle, num_blocks: int) -> int:
        """Bytes of a whole bundle of ``num_blocks`` blocks, alignment included."""
        return sum(self.component_bytes(c, num_blocks) for c in bundle.components)

    def component_bytes(self, component: CacheComponent, num_blocks: int) -> int:
        """Bytes of a component of ``num_blocks`` blocks, alignment included."""
        return align_up(component.page_bytes * num_blocks, self.alignment_bytes)

    def rank_bytes(self, rank: int, num_blocks: int) -> int:
        """Bytes of ``rank``'s whole allocation; the budget and the placement both use this."""
        slots = NUM_SCRATCH_SLOTS * self.slot_bytes(num_blocks)
        return max(slots + self.persistent_bytes(rank, num_blocks), self._view_end(num_blocks))

    def persistent_bytes(self, rank: int, num_blocks: int) -> int:
        """Bytes of the bundles that ``rank`` owns and of the drafts."""
        owned = sum(
            self.bundle_bytes(bundle, num_blocks)
            for bundle, owner in zip(self.stage.targets, self.owners, strict=True)
            if owner == rank
        )
        drafts = sum(self.component_bytes(c, num_blocks) for c in self.stage.drafts)
        return owned + drafts

    def slot_bytes(self, num_blocks: int) -> int:
        """Bytes of one scratch slot: the largest target bundle, 0 without target layers."""
        blocks = self.scratch.blocks(num_blocks)
        return max((self.bundle_bytes(b, blocks) for b in self.stage.targets), default=0)

    @property
    def fullest_rank_bytes(self) -> int:
        """Bytes of one block of the bundles and drafts of the rank that holds most."""
        owned = [0] * self.group_size
        for bundle, owner in zip(self.stage.targets, self.owners, strict=True):
            owned[owner] += bundle.page_bytes
        return max(owned) + sum(component.page_bytes for component in self.stage.drafts)

    def shared_block_bytes(self, scratch_share: float) -> float:
        """Bytes that one block costs the fullest rank, its part of scratch included.

        Args:
            scratch_share: blocks of a scratch slot over all blocks, 1 in ``full`` mode.
        """
        slots = NUM_SCRATCH_SLOTS * scratch_share
        return self.fullest_rank_bytes + slots * self.stage.largest_target_bytes

    def _view_end(self, num_blocks: int) -> int:
        """Where the views of all blocks end that vLLM makes of layers in the last scratch slot."""
        offset = (NUM_SCRATCH_SLOTS - 1) * self.slot_bytes(num_blocks)
        return max(
            (
                place.offset + place.component.page_bytes * num_blocks
                for bundle in self.stage.targets
                for place in place_scratch(self, bundle, offset, num_blocks)
            ),
            default=0,
        )


def plan_group(
    stage: StageLayers,
    group_size: int,
    alignment_bytes: int = 1,
    scratch: ScratchSize | None = None,
    block_numbers: BlockNumbers = "component",
) -> GroupLayout:
    """Plan the ownership of a stage's target layers over a KVPP group."""
    owners = assign_owners([bundle.page_bytes for bundle in stage.targets], group_size)
    return GroupLayout(
        stage=stage,
        group_size=group_size,
        owners=owners,
        alignment_bytes=alignment_bytes,
        scratch=scratch or FullScratch(),
        block_numbers=block_numbers,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentPlace:
    """Where one component lies: ``offset`` and ``size`` in bytes of the rank's allocation, for
    ``num_blocks`` blocks, which in scratch may be fewer than the layer has.

    ``persistent`` is false for a scratch slot, whose bytes belong to another layer most of the
    time: nothing but the running forward may read them. ``from_back`` is true where a forward that
    uses some of the blocks takes the last ones.
    """

    component: CacheComponent
    offset: int
    size: int
    num_blocks: int
    persistent: bool
    from_back: bool = False

    def first_block(self, used_blocks: int) -> int:
        """Number, in this place, of the first of so many blocks that a forward uses."""
        return self.num_blocks - used_blocks if self.from_back else 0

    def used_range(self, used_blocks: int) -> tuple[int, int]:
        """Offset and size in bytes of the blocks that a forward uses."""
        page_bytes = self.component.page_bytes
        start = self.offset + self.first_block(used_blocks) * page_bytes
        return start, used_blocks * page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BundlePlace:
    """Where one target bundle lies on this rank, as one contiguous range of bytes.

    ``slot_offset`` is the base of the scratch slot that the layer uses on the ranks that do not
    own it; it exists on the owner as well. ``components`` are where the layer finds its caches,
    ``scratch`` is where they lie in the slot: the same but on the owner.
    """

    ordinal: int
    owner: int
    slot: int
    slot_offset: int
    offset: int
    size: int
    components: tuple[ComponentPlace, ...]
    scratch: tuple[ComponentPlace, ...]

    @property
    def runs(self) -> tuple[slice, ...]:
        """Which components' used blocks lie together in the slot; each run is one range of bytes.

        Those that a forward takes from the back touch the ones of the next component.
        """
        ends = [n + 1 for n, place in enumerate(self.scratch) if not place.from_back]
        return tuple(slice(*run) for run in pairwise([0, *ends]))

    def used_range(self, run: slice, used_blocks: int) -> tuple[int, int]:
        """Offset and size in bytes of the blocks of a run that a forward uses."""
        places = self.scratch[run]
        start, _ = places[0].used_range(used_blocks)
        last, size = places[-1].used_range(used_blocks)
        return start, last + size - start


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """The allocation of one rank of the group for a given number of blocks."""

    layout: GroupLayout
    rank: int
    num_blocks: int
    scratch_blocks: int
    total_bytes: int
    bundles: tuple[BundlePlace, ...]
    components: tuple[ComponentPlace, ...]

    @cached_property
    def by_layer_name(self) -> dict[str, ComponentPlace]:
        """Component places by vLLM layer name."""
        return {place.component.layer_name: place for place in self.components}

    @cached_property
    def persistent_layers(self) -> frozenset[str]:
        """Names of the layers whose cache this rank really holds."""
        return frozenset(p.component.layer_name for p in self.components if p.persistent)


def place_rank(layout: GroupLayout, rank: int, num_blocks: int) -> RankPlacement:
    """Place every component of the stage on ``rank`` for ``num_blocks`` blocks.

    Raises:
        LayoutError: the rank is not in the group, or there is no block to place.
    """
    if not 0 <= rank < layout.group_size:
        raise LayoutError(f"rank {rank} is outside a KVPP group of {layout.group_size} ranks")
    if num_blocks < 1:
        raise LayoutError(f"a placement needs at least one block, got {num_blocks}")
    slot_bytes = layout.slot_bytes(num_blocks)
    scratch_blocks = layout.scratch.blocks(num_blocks)

    bundles: list[BundlePlace] = []
    next_persistent = NUM_SCRATCH_SLOTS * slot_bytes
    for ordinal, (bundle, owner) in enumerate(
        zip(layout.stage.targets, layout.owners, strict=True)
    ):
        slot_offset = layout.slot(ordinal) * slot_bytes
        scratch = place_scratch(layout, bundle, slot_offset, num_blocks)
        if owner == rank:
            offset, size = next_persistent, layout.bundle_bytes(bundle, num_blocks)
            components = _place_run(layout, bundle.components, offset, num_blocks, True)
            next_persistent += size
        else:
            offset, size = slot_offset, layout.bundle_bytes(bundle, scratch_blocks)
            components = scratch
        bundles.append(
            BundlePlace(
                ordinal=ordinal,
                owner=owner,
                slot=layout.slot(ordinal),
                slot_offset=slot_offset,
                offset=offset,
                size=size,
                components=components,
                scratch=scratch,
            )
        )
    drafts = _place_run(layout, layout.stage.drafts, next_persistent, num_blocks, True)
    return RankPlacement(
        layout=layout,
        rank=rank,
        num_blocks=num_blocks,
        scratch_blocks=scratch_blocks,
        total_bytes=layout.rank_bytes(rank, num_blocks),
        bundles=tuple(bundles),
        components=(*(place for bundle in bundles for place in bundle.components), *drafts),
    )


def place_scratch(
    layout: GroupLayout, bundle: LayerBundle, slot_offset: int, num_blocks: int
) -> tuple[ComponentPlace, ...]:
    """Place a bundle in a scratch slot, where a layer of ``num_blocks`` blocks may have fewer."""
    blocks = layout.scratch.blocks(num_blocks)
    places = _place_run(layout, bundle.components, slot_offset, blocks, False)
    if layout.mirrors_layers or layout.block_numbers == "layer" or len(places) == 1:
        return places
    # Against the second component, so that no padding parts the two.
    first, second = places
    return (replace(first, offset=second.offset - first.size, from_back=True), second)


def _place_run(
    layout: GroupLayout,
    components: tuple[CacheComponent, ...],
    offset: int,
    num_blocks: int,
    persistent: bool,
) -> tuple[ComponentPlace, ...]:
    places: list[ComponentPlace] = []
    for component in components:
        places.append(
            ComponentPlace(
                component=component,
                offset=offset,
                size=component.page_bytes * num_blocks,
                num_blocks=num_blocks,
                persistent=persistent,
            )
        )
        offset += layout.component_bytes(component, num_blocks)
    return tuple(places)
