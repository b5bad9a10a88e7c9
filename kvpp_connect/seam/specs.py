"""vLLM's cache specs to the nouns of :mod:`kvpp_connect.layout`. The single translator."""

import importlib
import importlib.util
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import CacheComponent, StageLayers, stage_layers, tensor_name
from kvpp_connect.seam.tensors import allocated_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

_PLANNERS = ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils")  # 0.33, 0.32
_PLENTY_BYTES = 1 << 50  # the planner divides memory, it does not touch any


def stage_from_specs(
    specs: "dict[str, KVCacheSpec]",
    draft_names: Set[str] = frozenset(),
    tensors: Mapping[str, tuple[int, ...]] | None = None,
) -> StageLayers:
    """Describe this stage's layers: the main cache and, where there is one, the indexer's.

    vLLM gives an indexer's cache a layer name of its own under the same decoder layer; its scales
    and those of a packed main cache lie inside the pages.

    Args:
        specs: cache spec of every attention layer of the stage, by layer name.
        draft_names: those among them that belong to the speculative proposer.
        tensors: bytes per block of the tensors that are bound to each layer, where it is more than
            one of a whole page.

    Raises:
        LayoutError: a layer's cache is not MLA.
    """
    targets: dict[int, list[CacheComponent]] = {}
    drafts: list[CacheComponent] = []
    for name, spec in specs.items():
        if not isinstance(spec, MLAAttentionSpec):
            raise LayoutError(
                f"layer {name}: cache of kind {type(spec).__name__}, KVPP supports MLA only"
            )
        pages = tensors[name] if tensors is not None else (_padded_page_bytes(spec),)
        components = [
            CacheComponent(layer_name=tensor_name(name, number), page_bytes=page_bytes)
            for number, page_bytes in enumerate(pages)
        ]
        if name in draft_names:
            drafts.extend(components)
        else:
            targets.setdefault(extract_layer_index(name), []).extend(components)
    return stage_layers(targets=targets, drafts=drafts)


def _padded_page_bytes(spec: "KVCacheSpec") -> int:
    """Bytes from one block to the next where blocks of one layer lie together."""
    alignment = spec.get_block_stride_alignment()
    return -(-spec.page_size_bytes // alignment) * alignment


def planner_block_bytes(vllm_config: "VllmConfig", specs: "dict[str, KVCacheSpec]") -> int:
    """Bytes by which vLLM's planner divides a worker's budget, out of a plan that it makes.

    Caches of one kind are one group, whatever their page sizes, and a block costs the sum of their
    padded pages. Where there are several groups a block belongs to one of them at a time and costs
    what the widest group needs, which is less than the sum.

    Args:
        specs: cache spec of every attention layer of the stage, by layer name.
    """
    planner = _planner()
    groups = planner_groups(vllm_config, specs)
    plan = planner.get_kv_cache_config_from_groups(vllm_config, groups, _PLENTY_BYTES)
    return allocated_bytes(plan) // plan.num_blocks


def planner_groups(
    vllm_config: "VllmConfig", specs: "dict[str, KVCacheSpec]"
) -> "list[KVCacheGroupSpec]":
    """The groups in which vLLM's planner puts a stage's caches."""
    return _planner().get_kv_cache_groups(vllm_config, dict(specs))


def _planner() -> Any:  # noqa: ANN401 - a module
    found = next(name for name in _PLANNERS if importlib.util.find_spec(name))
    return importlib.import_module(found)
