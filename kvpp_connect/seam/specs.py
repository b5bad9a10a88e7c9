"""vLLM's cache specs to the nouns of :mod:`kvpp_connect.layout`. The single translator."""

from typing import TYPE_CHECKING

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from kvpp_connect.errors import LayoutError
from kvpp_connect.layout import CacheComponent, StageLayers, stage_layers

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec


def stage_from_specs(specs: "dict[str, KVCacheSpec]") -> StageLayers:
    """Describe this stage's layers.

    Args:
        specs: cache spec of every attention layer of the stage, by layer name.

    Raises:
        LayoutError: a layer's cache is not MLA, or a block of it is padded.
    """
    targets: dict[int, list[CacheComponent]] = {}
    for name, spec in specs.items():
        if not isinstance(spec, MLAAttentionSpec):
            raise LayoutError(
                f"layer {name}: cache of kind {type(spec).__name__}, KVPP supports MLA only"
            )
        component = CacheComponent(layer_name=name, page_bytes=spec.page_size_bytes)
        targets.setdefault(extract_layer_index(name), []).append(component)
    return stage_layers(targets=targets, drafts=[])


def planner_block_bytes(specs: "dict[str, KVCacheSpec]") -> int:
    """Bytes by which vLLM's planner divides a worker's budget, for one cache group.

    ``KvppWorker`` checks the planner's answer against it before anything is allocated.
    """
    total = 0
    for spec in specs.values():
        alignment = spec.get_block_stride_alignment()
        total += -(-spec.page_size_bytes // alignment) * alignment
    return total
