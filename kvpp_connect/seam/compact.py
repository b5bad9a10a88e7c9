"""Compact mode inside vLLM's model runners: scratch layers see positions instead of block ids.

vLLM keys slot mappings by layer name and builds attention metadata per attention group. So each of
the runner's attention groups is split, into the layers that this rank owns and those in scratch,
whose metadata is built from renumbered common metadata, whatever the backend. Caches that fill
scratch from the back have numbers of their own, and so a group of their own.

Here is what the runners have in common; each has a subclass in a module of its own, which finds the
blocks of a batch and takes over the runner's slot mappings.
"""

from abc import ABC, abstractmethod
from contextlib import contextmanager
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
    from collections.abc import Iterator

    import torch
    from vllm.v1.attention.backend import AttentionMetadata, CommonAttentionMetadata


class CompactForward(ABC):
    """One worker's compact mode. ``open`` -> the runner prepares its batch -> ``close``."""

    def __init__(
        self,
        placement: RankPlacement,
        payload: CompactPayload,
        engine: PrefetchEngine,
        runner: Any,  # noqa: ANN401 - a GPUModelRunner of vLLM's; there are two
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
        self._warming_up = False
        self.active: ActiveBlocks | None = None
        self.block_tokens = self._block_tokens()
        self._split_groups()
        self._zero_owned_layers_only()
        _translate_alone(runner.compilation_config.static_forward_context, placement)
        self._take_over()

    @abstractmethod
    def _kernel_block_tokens(self) -> list[int]:
        """Tokens in a block of the attention kernels, by cache group."""

    @abstractmethod
    def _take_over(self) -> None:
        """Put ``_begin`` where the runner knows a batch's blocks, ``_renumber`` behind its slots.

        ``_begin`` comes before the batch's metadata is built.
        """

    def open(self, *, history: bool, start: bool = True) -> None:
        """A step of real requests begins; dummy runs happen outside of steps.

        Args:
            start: see :meth:`PrefetchEngine.arm`.
        """
        self._open, self._history, self._start, self.active = True, history, start, None

    def close(self) -> None:
        """The step is over."""
        self._open, self.active = False, None

    @contextmanager
    def warming_up(self) -> "Iterator[None]":
        """vLLM makes requests up, without its scheduler: they may use more than scratch holds."""
        self._warming_up = True
        try:
            yield
        finally:
            self._warming_up = False

    def _begin(self, block_table: "torch.Tensor", tokens: "torch.Tensor") -> None:
        """Learn the blocks of this step's batch, and let the broadcasts begin.

        Args:
            block_table: block ids in host memory, shape ``(requests, width)``; the same on all
                ranks of the group.
            tokens: of each request when this step is done, shape ``(requests,)``.
        """
        blocks_used = (tokens + self.block_tokens - 1) // self.block_tokens
        self.active = ActiveBlocks(
            block_table,
            blocks_used,
            self._placement.num_blocks,
            self._runner.device,
            # Of made-up requests any tokens will do, but not other layers' memory.
            at_most=self._placement.scratch_blocks if self._warming_up else None,
        )
        self._payload.use(self.active)
        if self._history:
            self._engine.arm(start=self._start)

    def _renumber(self, slots_by_layer: "dict[str, torch.Tensor]") -> None:
        """Give the layers in scratch their own slots."""
        active = self.active
        if active is None:
            return
        renumbered: dict[tuple[int, int], torch.Tensor] = {}
        for name in self._scratch.keys() & slots_by_layer.keys():
            slots, first = slots_by_layer[name], self._scratch[name].first_block(len(active))
            if (id(slots), first) not in renumbered:
                renumbered[id(slots), first] = active.renumber_slots(
                    slots, self.block_tokens, first
                )
            slots_by_layer[name] = renumbered[id(slots), first]

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
            self._kernel_block_tokens()[group_id],
        )
        builder: Any  # of a class of the backend's own
        for builder, owned in zip(made.metadata_builders, group.metadata_builders, strict=False):
            # Else vLLM derives the metadata from the other half's, with that half's block table.
            builder.supports_update_block_table = False
            workspace = getattr(owned, "chunked_prefill_workspace", None)
            if workspace is not None:
                # Layers run one after the other, and a second one is memory that nobody measured.
                builder.chunked_prefill_workspace = workspace
        return made

    def _block_tokens(self) -> int:
        config = self._runner.kv_cache_config
        block_tokens = config.kv_cache_groups[0].kv_cache_spec.block_size
        kernel_tokens = self._kernel_block_tokens()[0]
        if kernel_tokens != block_tokens:
            raise SeamError(
                f"KVPP compact: the attention kernel uses blocks of {kernel_tokens} tokens, the "
                f"cache of {block_tokens}; set --block-size {kernel_tokens} or kvpp.mode full"
            )
        assert self._placement.num_blocks == config.num_blocks
        return block_tokens


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
