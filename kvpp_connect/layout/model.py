"""The nouns of a layout: cache components, layer bundles, the layers of one pipeline stage.

Nothing here knows about devices, ranks' memory or vLLM.
"""

from dataclasses import dataclass
from functools import cached_property

from kvpp_connect.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheComponent:
    """One cache tensor of a layer: main KV, indexer keys, quantisation scales.

    ``layer_name`` is the name under which vLLM binds the tensor, or ``tensor_name`` where it binds
    several to one name; it is unique in an engine.
    ``page_bytes`` is the size of one block of this component.
    """

    layer_name: str
    page_bytes: int

    def __post_init__(self) -> None:
        if self.page_bytes <= 0:
            raise LayoutError(
                f"component {self.layer_name!r}: page_bytes is {self.page_bytes}, expected > 0"
            )


def tensor_name(layer_name: str, number: int) -> str:
    """Name of the ``number``-th of the cache tensors that are bound to a layer."""
    return f"{layer_name}/{number}" if number else layer_name


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBundle:
    """All components of one target layer: contiguous in memory, one owner.

    ``layer_index`` is the decoder layer's number in the whole model, not in its stage.
    """

    layer_index: int
    components: tuple[CacheComponent, ...]

    def __post_init__(self) -> None:
        if not self.components:
            raise LayoutError(f"bundle of layer {self.layer_index} has no component")

    @property
    def page_bytes(self) -> int:
        """Bytes of one block over all components."""
        return sum(component.page_bytes for component in self.components)


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """The caches of one pipeline stage: target bundles in layer order, and replicated drafts."""

    targets: tuple[LayerBundle, ...]
    drafts: tuple[CacheComponent, ...] = ()

    def __post_init__(self) -> None:
        indices = [bundle.layer_index for bundle in self.targets]
        if indices != sorted(set(indices)):
            raise LayoutError(f"target layers are not in strictly rising order: {indices}")
        names = [c.layer_name for bundle in self.targets for c in bundle.components]
        names += [c.layer_name for c in self.drafts]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise LayoutError(f"cache names occur more than once: {', '.join(repeated)}")

    @cached_property
    def largest_target_bytes(self) -> int:
        """Bytes of one block of the largest target bundle; 0 without target layers."""
        return max((bundle.page_bytes for bundle in self.targets), default=0)

    @cached_property
    def plain_page_bytes(self) -> int:
        """Bytes that one block takes on a rank that holds every cache."""
        targets = sum(bundle.page_bytes for bundle in self.targets)
        return targets + sum(component.page_bytes for component in self.drafts)


def stage_layers(
    *,
    targets: dict[int, list[CacheComponent]],
    drafts: list[CacheComponent],
) -> StageLayers:
    """Build the layers of a stage, whatever the order of the input.

    Args:
        targets: components by the decoder layer's index.
        drafts: caches of the speculative proposer.
    """

    def by_name(component: CacheComponent) -> str:
        return component.layer_name

    return StageLayers(
        targets=tuple(
            LayerBundle(layer_index=index, components=tuple(sorted(targets[index], key=by_name)))
            for index in sorted(targets)
        ),
        drafts=tuple(sorted(drafts, key=by_name)),
    )
