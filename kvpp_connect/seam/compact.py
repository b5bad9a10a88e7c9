"""Compact mode inside vLLM's model runner: scratch layers see positions instead of block ids.

vLLM keys slot mappings by layer name and builds attention metadata per attention group. So each of
the runner's attention groups is split, into the layers that this rank owns and those in scratch,
whose metadata is built from renumbered common metadata, whatever the backend. Caches that fill
scratch from the back have numbers of their own, and so a group of their own.
"""

from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.utils import AttentionGroup

from kvpp_connect.broadcast.active import ActiveBlocks
from kvpp_connect.broadcast.engine import PrefetchEngine
from kvpp_connect.broadcast.payload import CompactPayload
from kvpp_connect.errors import SeamError
from kvpp_connect.layout import ComponentPlace, RankPlacement

if TYPE_CHECKING:
    import torch
    from vllm.v1.attention.backend import AttentionMetadata, CommonAttentionMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class CompactForward:
    """One worker's compact mode. ``open`` -> the runner prepares its batch -> ``close``."""

    def __init__(
        self,
        placement: RankPlacement,
        payload: CompactPayload,
        engine: PrefetchEngine,
        runner: "GPUModelRunner",
    ) -> None:
        """Split the runner's attention groups and take over its slot mappings."""
        self._placement = placement
        self._payload = payload
        self._engine = engine
        self._runner = runner
        self._scratch = {
            name: place for name, place in placement.by_layer_name.items() if not place.persistent
        }
        self._open = False
        self._history = False
        self._start = True
        self.active: ActiveBlocks | None = None
        self.block_tokens = _block_tokens(runner, placement)
        self._split_groups()
        self._zero_owned_layers_only()
        _translate_alone(runner.compilation_config.static_forward_context, placement)
        self._original_slot_mappings = runner._get_slot_mappings  # noqa: SLF001 - in the ledger
        runner._get_slot_mappings = self._get_slot_mappings  # noqa: SLF001 - in the ledger

    def open(self, *, history: bool, start: bool = True) -> None:
        """A step of real requests begins; dummy runs happen outside of steps.

        Args:
            start: see :meth:`PrefetchEngine.arm`.
        """
        self._open, self._history, self._start, self.active = True, history, start, None

    def close(self) -> None:
        """The step is over."""
        self._open, self.active = False, None

    def _get_slot_mappings(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ANN401
        by_group, by_layer = self._original_slot_mappings(*args, **kwargs)
        if not self._open or by_layer is None:
            return by_group, by_layer
        if not isinstance(by_layer, dict):
            raise SeamError("KVPP compact: slot mappings of micro-batches are not supported")
        self.active = self._collect_active()
        self._payload.use(self.active)
        if self._history:
            self._engine.arm(start=self._start)
        renumbered: dict[tuple[int, int], torch.Tensor] = {}
        for name in self._scratch.keys() & by_layer.keys():
            slots, first = by_layer[name], self._scratch[name].first_block(len(self.active))
            if (id(slots), first) not in renumbered:
                renumbered[id(slots), first] = self.active.renumber_slots(
                    slots, self.block_tokens, first
                )
            by_layer[name] = renumbered[id(slots), first]
        return by_group, by_layer

    def _collect_active(self) -> ActiveBlocks:
        batch = self._runner.input_batch
        requests = batch.num_reqs
        tokens = self._runner.optimistic_seq_lens_cpu[:requests]
        blocks_used = (tokens + self.block_tokens - 1) // self.block_tokens
        table = batch.block_table[0].get_cpu_tensor()[:requests]
        blocks = self._placement.num_blocks
        return ActiveBlocks(table, blocks_used, blocks, self._runner.device)

    def _split_groups(self) -> None:
        runner = self._runner
        for group_id, groups in enumerate(runner.attn_groups):
            split: list[AttentionGroup] = []
            for group in groups:
                parts: dict[str, list[str]] = {}
                for name in group.layer_names:
                    parts.setdefault(self._part(name), []).append(name)
                for part, names in parts.items():
                    if part == "owned":
                        group.layer_names = names
                        split.append(group)
                    else:
                        split.append(self._scratch_group(group, names, group_id))
            runner.attn_groups[group_id] = split

    def _zero_owned_layers_only(self) -> None:
        """Where vLLM zeroes new blocks it does so by their ids, which are not scratch's."""
        runner = self._runner
        if not runner.kv_cache_config.needs_kv_cache_zeroing:
            return
        groups = runner.attn_groups
        runner.attn_groups = [
            [group for group in split if not isinstance(group, _ScratchGroup)] for split in groups
        ]
        runner._init_kv_zero_meta()  # noqa: SLF001 - in the ledger
        runner.attn_groups = groups

    def _part(self, name: str) -> str:
        """What the layers of one group have in common: how their blocks are numbered."""
        if name not in self._scratch:
            return "owned"
        return "from back" if self._scratch[name].from_back else "from front"

    def _scratch_group(
        self, group: AttentionGroup, names: list[str], group_id: int
    ) -> "_ScratchGroup":
        made = _ScratchGroup(
            backend=group.backend,
            layer_names=names,
            kv_cache_spec=group.kv_cache_spec,
            kv_cache_group_id=group.kv_cache_group_id,
            forward=self,
            place=self._scratch[names[0]],
        )
        runner = self._runner
        made.create_metadata_builders(
            runner.vllm_config,
            runner.device,
            runner._kernel_block_sizes[group_id],  # noqa: SLF001 - in the ledger
        )
        for builder in made.metadata_builders:
            # Else vLLM derives the metadata from the other half's, with that half's block table.
            builder.supports_update_block_table = False
        return made


@dataclass
class _ScratchGroup(AttentionGroup):
    """An attention group whose metadata is built from renumbered common metadata."""

    forward: CompactForward | None = field(default=None, kw_only=True)
    place: ComponentPlace | None = field(default=None, kw_only=True)  # of any of the layers

    def build_metadata(
        self,
        common_attn_metadata: "CommonAttentionMetadata",
        ubatch_idx: int = 0,
        common_prefix_len: int = 0,
        **kwargs: Any,  # noqa: ANN401 - passed through
    ) -> "AttentionMetadata":
        assert self.forward is not None
        assert self.place is not None
        active = self.forward.active
        if active is not None:
            renumbered = copy(common_attn_metadata)
            first = self.place.first_block(len(active))
            renumbered.block_table_tensor = active.renumber_table(
                renumbered.block_table_tensor, first
            )
            renumbered.slot_mapping = active.renumber_slots(
                renumbered.slot_mapping, self.forward.block_tokens, first
            )
            common_attn_metadata = renumbered
        return super().build_metadata(common_attn_metadata, ubatch_idx, common_prefix_len, **kwargs)


def _translate_alone(layers: dict[str, Any], placement: RankPlacement) -> None:
    """Let each layer translate the indexer's choice to block numbers by itself.

    Layers that share a choice share its translation too, which the first of them makes with its own
    block table. Here the others may need other numbers.
    """
    for place in placement.components:
        impl = getattr(layers[place.component.layer_name], "impl", None)
        group = getattr(impl, "index_group", None)
        if impl is not None and group is not None and group.num_layers > 1:
            # Without an indexer of its own a group waits for all that the layer was given before,
            # so that all of them may use one set of buffers.
            impl.index_group = replace(group, num_layers=1, has_indexer=False)
            impl.index_group_index = 0


def _block_tokens(runner: "GPUModelRunner", placement: RankPlacement) -> int:
    groups = runner.kv_cache_config.kv_cache_groups
    block_tokens = groups[0].kv_cache_spec.block_size
    kernel_tokens = runner._kernel_block_sizes[0]  # noqa: SLF001 - in the ledger
    if kernel_tokens != block_tokens:
        raise SeamError(
            f"KVPP compact: the attention kernel uses blocks of {kernel_tokens} tokens, the cache "
            f"of {block_tokens}; set --block-size {kernel_tokens} or kvpp.mode full"
        )
    assert placement.num_blocks == runner.kv_cache_config.num_blocks
    return block_tokens
