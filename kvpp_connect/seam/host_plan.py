"""Ownership from the plan of a vLLM that has a KVPP of its own, as vllm-ascend has from 0.28 on.

The plan tells the owner of each cache's layer, the bundles in their order in memory, and the bytes
per block of each tensor. On the main branch the cache configuration carries it (``kvpp_plan``); the
releases 0.28 to 0.30 keep it in the worker, and its function that makes it is asked, as their
allocation does. Nothing of it is computed here. It is held against the tensors that were really
registered: a plan that does not describe them is refused, since by it peers would read another
layer's scratch.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from vllm.model_executor.models.utils import extract_layer_index

from kvpp_connect.config import parse_additional_config
from kvpp_connect.errors import LayoutError, SeamError
from kvpp_connect.layout import (
    CacheComponent,
    GroupLayout,
    RankPlacement,
    place_rank,
    stage_layers,
    tensor_name,
)
from kvpp_connect.layout.placement import NUM_SCRATCH_SLOTS
from kvpp_connect.seam.ascend_ledger import HOST_LEDGER
from kvpp_connect.seam.groups import GroupInfo, group_info
from kvpp_connect.seam.ledger import check_touchpoint, look_up
from kvpp_connect.seam.runtime import active_placement, check_same_plan
from kvpp_connect.seam.variants import variant

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class HostPlan(Protocol):
    """What is read of the host's plan.

    ``layer_owner_ranks``: rank in the group by cache name, target layers only. ``layer_bundles``:
    by first name, the caches of a layer in their order in memory, drafts as well. ``tensor_sizes``:
    bytes per block of the tensors that are bound to a name. ``kvpp_rank``: whose plan it is.
    """

    layer_owner_ranks: Mapping[str, int]
    layer_bundles: Mapping[str, tuple[str, ...]]
    tensor_sizes: Mapping[str, tuple[int, ...]]
    kvpp_rank: int


_FIELDS = ("layer_owner_ranks", "layer_bundles", "tensor_sizes", "kvpp_rank")


def placement_for(
    vllm_config: "VllmConfig", cache_config: "KVCacheConfig", caches: "Mapping[str, torch.Tensor]"
) -> RankPlacement | None:
    """Who owns what in this worker, be it our runtime's plan or the host's; for the connectors.

    Collective over the KVPP group where the plan is the host's. Offsets of such a placement mean
    nothing: the host's bundles are allocations of their own.

    Args:
        caches: the registered tensors by ``tensor_name``.

    Returns: ``None`` with KVPP off.

    Raises:
        SeamError: KVPP is on and nobody has a plan, or one that cannot be read.
        LayoutError: the host's plan does not describe the registered tensors.
    """
    placement = active_placement()
    if placement is not None or not _is_on(vllm_config):
        return placement
    group = group_info()
    plan = _ask_for_plan(vllm_config, cache_config, group.rank_in_group)
    placement = placement_of_plan(plan, group, cache_config.num_blocks, caches)
    check_same_plan(placement.layout, group)
    return placement


def host_serves(vllm_config: "VllmConfig") -> bool:
    """Whether KVPP is on and its layers are served by the host's runtime instead of ours."""
    device_type = vllm_config.device_config.device_type
    return _is_on(vllm_config) and variant(device_type).serves_kvpp()


def _ask_for_plan(vllm_config: "VllmConfig", cache_config: "KVCacheConfig", rank: int) -> HostPlan:
    """The host's plan, out of the cache configuration or by the host's own function."""
    plan: Any = getattr(cache_config, "kvpp_plan", None)
    problems = [] if plan is not None else [*filter(None, map(check_touchpoint, HOST_LEDGER))]
    if plan is None and not problems:
        specs, make = (look_up(entry) for entry in HOST_LEDGER)
        plan = make(vllm_config, specs(cache_config), rank)
    problems = problems or [f"it has no {f}" for f in _FIELDS if not hasattr(plan, f)]
    if problems:
        raise SeamError(
            "KVPP is on, but there is no plan that tells the layers' owners: "
            f"{'; '.join(problems)}. Use a vllm-ascend that kvpp-connect knows, or turn "
            "enable_kvpp off"
        )
    return cast("HostPlan", plan)


def _is_on(vllm_config: "VllmConfig") -> bool:
    return parse_additional_config(vllm_config.additional_config).enabled


def placement_of_plan(
    plan: HostPlan, group: GroupInfo, num_blocks: int, caches: "Mapping[str, torch.Tensor]"
) -> RankPlacement:
    """Translate a host's plan, and hold it against the registered tensors.

    Raises:
        LayoutError: the plan is another rank's, contradicts itself, or does not describe them.
    """
    if plan.kvpp_rank != group.rank_in_group:
        raise LayoutError(
            f"KVPP: vllm-ascend's plan is that of rank {plan.kvpp_rank}, this is rank "
            f"{group.rank_in_group} of the KVPP group"
        )
    bundles = [_bundle(plan, names) for names in plan.layer_bundles.values()]
    _check_names(bundles, caches)
    targets = {extract_layer_index(b.names[0]): b for b in bundles if b.owner is not None}
    layout = GroupLayout(
        stage=stage_layers(
            targets={index: b.components() for index, b in targets.items()},
            drafts=[c for b in bundles if b.owner is None for c in b.components()],
        ),
        group_size=group.group_size,
        owners=tuple(b.owner for _, b in sorted(targets.items()) if b.owner is not None),
    )
    spans = [bundle.span(num_blocks, caches) for bundle in bundles]
    kept = [b.owner in (None, plan.kvpp_rank) for b in bundles]
    _check_memory(
        persistent=[span for span, keep in zip(spans, kept, strict=True) if keep],
        scratch=[span for span, keep in zip(spans, kept, strict=True) if not keep],
    )
    return place_rank(layout, group.rank_in_group, num_blocks)


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of memory, and the layer that they are for."""

    first: int
    end: int
    name: str


@dataclass(frozen=True, slots=True)
class _Bundle:
    """A layer's caches; ``owner`` is ``None`` for a draft, ``sizes`` are bytes per block."""

    names: tuple[str, ...]
    owner: int | None
    sizes: tuple[tuple[str, int], ...]

    def components(self) -> list[CacheComponent]:
        return [CacheComponent(layer_name=name, page_bytes=size) for name, size in self.sizes]

    def span(self, num_blocks: int, caches: "Mapping[str, torch.Tensor]") -> _Span:
        """Where the bundle lies: its tensors one behind the other, in the plan's order.

        Raises:
            LayoutError: the registered tensors are not like that.
        """
        first = cursor = caches[self.sizes[0][0]].data_ptr()
        for name, size in self.sizes:
            tensor = caches[name]
            if tensor.nbytes != size * num_blocks or not tensor.is_contiguous():
                raise LayoutError(
                    f"KVPP: {name} has {tensor.nbytes} bytes, vllm-ascend's plan says {num_blocks} "
                    f"blocks of {size} bytes, one after the other"
                )
            if tensor.data_ptr() != cursor:
                raise LayoutError(f"KVPP: {name} is not where vllm-ascend's plan has it")
            cursor += tensor.nbytes
        return _Span(first, cursor, self.names[0])


def _bundle(plan: HostPlan, names: tuple[str, ...]) -> _Bundle:
    owners = {plan.layer_owner_ranks.get(name) for name in names}
    if len(owners) != 1:
        raise LayoutError(f"KVPP: vllm-ascend's plan gives {', '.join(names)} to ranks {owners}")
    sizes: list[tuple[str, int]] = []
    for name in names:
        pages: tuple[Any, ...] = plan.tensor_sizes[name]
        if not all(isinstance(page, int) for page in pages):
            raise SeamError(f"KVPP: vllm-ascend's plan has no plain sizes for {name}: {pages}")
        sizes += [(tensor_name(name, number), page) for number, page in enumerate(pages)]
    return _Bundle(names, owners.pop(), tuple(sizes))


def _check_names(bundles: Sequence[_Bundle], caches: "Mapping[str, torch.Tensor]") -> None:
    planned = {name for bundle in bundles for name, _ in bundle.sizes}
    strange = sorted(planned ^ caches.keys())
    if strange:
        raise LayoutError(
            f"KVPP: vllm-ascend's plan and the registered caches differ in {', '.join(strange)}"
        )


def _check_memory(persistent: list[_Span], scratch: list[_Span]) -> None:
    """Nothing else lies in what this rank holds, and what it does not hold is in few buffers."""
    bases = {span.first for span in scratch}
    if len(bases) > NUM_SCRATCH_SLOTS:
        raise LayoutError(
            f"KVPP: the layers of other ranks lie in {len(bases)} buffers, expected at most "
            f"{NUM_SCRATCH_SLOTS}: they are not scratch, vllm-ascend's plan has other owners"
        )
    buffers = [
        _Span(base, max(span.end for span in scratch if span.first == base), "scratch")
        for base in bases
    ]
    spans = sorted([*persistent, *buffers], key=lambda span: span.first)
    for left, right in itertools.pairwise(spans):
        if right.first < left.end:
            raise LayoutError(
                f"KVPP: {left.name} and {right.name} share memory, though vllm-ascend's plan says "
                "that this rank holds what lies there"
            )
