"""The caches of vllm-ascend's model runner, cut from one allocation that follows the placement.

The runner binds a tuple of tensors to each layer: latent and rope, or a packed cache, or an
indexer's keys and scales. It allocates each by itself, and gives them their shapes afterwards.
The sizes are the runner's own answer, measured on a plan of one block; only where the bytes lie is
decided here. Every tensor begins on a multiple of ``alignment_bytes``, as the transfer engine asks,
and the bytes lost to that count in the budget.
"""

from collections.abc import Iterable, Set
from typing import TYPE_CHECKING, Any

import torch

from kvpp_connect.errors import SeamError
from kvpp_connect.layout import RankPlacement, tensor_name
from kvpp_connect.seam.specs import planner_groups
from kvpp_connect.seam.tensors import check_bound, one_block_each

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def tensor_bytes(
    runner: Any,  # noqa: ANN401 - an NPUModelRunner
    vllm_config: "VllmConfig",
    specs: "dict[str, KVCacheSpec]",
) -> dict[str, tuple[int, ...]]:
    """Bytes per block of the tensors that the runner would bind to each layer.

    Args:
        specs: cache spec of every attention layer of the stage, by layer name.

    Raises:
        SeamError: the runner allocates a layer in a way that is not known here.
    """
    plan = one_block_each(planner_groups(vllm_config, specs), specs)

    def allocate(numel: int, alignment: int) -> torch.Tensor:
        del alignment
        return torch.empty(numel, dtype=torch.int8)

    runner._allocate_int8_cache_tensor = allocate  # noqa: SLF001 - in the ledger
    try:
        raw: dict[str, Any] = runner._allocate_kv_cache_tensors(plan)  # noqa: SLF001
    finally:
        del runner._allocate_int8_cache_tensor  # noqa: SLF001 - the method is back
    return {name: _sizes(name, raw[name], spec.page_size_bytes) for name, spec in specs.items()}


def _sizes(name: str, tensors: Any, page_bytes: int) -> tuple[int, ...]:  # noqa: ANN401
    if not isinstance(tensors, tuple):
        raise SeamError(f"KVPP: vllm-ascend gives {name} a {type(tensors).__name__}, not a tuple")
    sizes = tuple(tensor.numel() for tensor in tensors)
    if sum(sizes) != page_bytes:
        raise SeamError(
            f"KVPP: vllm-ascend splits the {page_bytes} bytes of a block of {name} into {sizes}, "
            f"which are {sum(sizes)}"
        )
    return sizes


def with_indexers(draft_names: Set[str], names: Iterable[str]) -> frozenset[str]:
    """The proposer's caches, its indexers' among them: vllm-ascend names those of attention only.

    Args:
        draft_names: as the proposer names them, ``<module>.attn``.
        names: of all caches.
    """
    modules = tuple(f"{name.rpartition('.')[0]}." for name in draft_names)
    return frozenset(name for name in names if name.startswith(modules)) | draft_names


class PlacedCaches:
    """One rank's caches: an allocation, and the tensors in it by layer."""

    def __init__(self, placement: RankPlacement, alignment_bytes: int) -> None:
        self._placement = placement
        self._alignment_bytes = alignment_bytes
        self.memory = torch.empty(0, dtype=torch.int8)  # until it is allocated

    def serve(self, runner: Any) -> None:  # noqa: ANN401 - an NPUModelRunner
        """Let the runner take its raw tensors from here."""

        def allocate(kv_cache_config: "KVCacheConfig") -> dict[str, tuple[torch.Tensor, ...]]:
            groups = kv_cache_config.kv_cache_groups
            return self._allocate([n for g in groups for n in g.layer_names], runner.device)

        runner._allocate_kv_cache_tensors = allocate  # noqa: SLF001 - in the ledger

    def check(self, layers: dict[str, Any]) -> None:
        """Hold what is bound to the layers against the placement, before scratch is narrowed.

        Raises:
            SeamError: a tensor lies elsewhere than planned, or has another size.
        """
        bound = {
            tensor_name(name, number): tensor
            for name in self._layer_names()
            for number, tensor in enumerate(layers[name].kv_cache)
        }
        for name, tensor in bound.items():
            size = self._view_bytes(name)
            if tensor.nbytes != size:
                raise SeamError(
                    f"KVPP: vllm-ascend bound {tensor.nbytes} bytes as {name}, planned {size}"
                )
        check_bound(self._placement, self.memory, bound)

    def _allocate(
        self, names: list[str], device: torch.device
    ) -> dict[str, tuple[torch.Tensor, ...]]:
        planned = self._layer_names()
        if sorted(names) != sorted(planned):
            strange = set(names) ^ set(planned)
            raise SeamError(f"KVPP: caches planned for other layers: {', '.join(sorted(strange))}")
        total = self._placement.total_bytes
        raw = torch.zeros(total + self._alignment_bytes, dtype=torch.int8, device=device)
        start = -raw.data_ptr() % self._alignment_bytes
        self.memory = raw[start : start + total]
        places = self._placement.by_layer_name
        found: dict[str, tuple[torch.Tensor, ...]] = {}
        for name, count in planned.items():
            parts = [tensor_name(name, number) for number in range(count)]
            found[name] = tuple(
                self.memory[places[part].offset :][: self._view_bytes(part)] for part in parts
            )
        return found

    def _view_bytes(self, name: str) -> int:
        """Bytes of all blocks of a tensor: the runner refuses to bind fewer, in scratch as well."""
        place = self._placement.by_layer_name.get(name)
        return place.component.page_bytes * self._placement.num_blocks if place else 0

    def _layer_names(self) -> dict[str, int]:
        """The layers, and how many tensors each has."""
        counts: dict[str, int] = {}
        for name in self._placement.by_layer_name:
            layer, _, _ = name.partition("/")
            counts[layer] = counts.get(layer, 0) + 1
        return counts
