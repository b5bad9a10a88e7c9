"""Compact mode inside vllm-ascend's model runner: scratch layers see positions, not block ids.

The runner builds the attention metadata of a batch in one method, from one block table and one
mapping of slots, by the builder of each attention group. All caches of a layer, its indexer's among
them, are found by the metadata of its main cache. So each group is split into the layers that this
rank owns and those in scratch, and the builder of the latter renumbers what it is given. Drafts are
owned by every rank, and the proposer gets the runner's metadata as it was.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import wraps
from typing import Any

from kvpp_connect.broadcast.active import ActiveBlocks
from kvpp_connect.broadcast.engine import PrefetchEngine
from kvpp_connect.broadcast.payload import CompactPayload
from kvpp_connect.errors import SeamError
from kvpp_connect.layout import RankPlacement

# Those that are known to take all block numbers from the two tensors that are renumbered here, and
# to keep nothing between batches that depends on them.
_BUILDERS = frozenset(
    {
        "vllm_ascend.attention.mla_v1.AscendMLAMetadataBuilder",
        "vllm_ascend.attention.sfa_v1.AscendSFAMetadataBuilder",
        "vllm_ascend.attention.indexer.AscendSFAIndexerMetadataBuilder",
    }
)


class AscendCompactForward:
    """One worker's compact mode. ``open`` -> the runner prepares its batch -> ``close``."""

    def __init__(
        self,
        placement: RankPlacement,
        payload: CompactPayload,
        engine: PrefetchEngine,
        runner: Any,  # noqa: ANN401 - an NPUModelRunner
    ) -> None:
        """Split the runner's attention groups and go in front of its metadata.

        Raises:
            SeamError: the runner numbers blocks in a way that is not known here.
        """
        self._placement = placement
        self._payload = payload
        self._engine = engine
        self._runner = runner
        self._block_tokens = _block_tokens(runner)
        self._open = False
        self._history = False
        self._start = True
        self._active: ActiveBlocks | None = None
        self._renumbered: Any = None  # this step's metadata for layers in scratch, once it is asked
        self._split_groups()
        build = runner._build_attention_metadata  # noqa: SLF001 - in the ledger
        runner._build_attention_metadata = self._beginning(build)  # noqa: SLF001 - in the ledger

    def open(self, *, history: bool, start: bool = True) -> None:
        """A step of real requests begins; dummy runs happen outside of steps.

        Args:
            start: see :meth:`PrefetchEngine.arm`.
        """
        self._open, self._history, self._start = True, history, start

    def close(self) -> None:
        """The step is over."""
        self._open, self._active, self._renumbered = False, None, None

    def warming_up(self) -> AbstractContextManager[None]:
        """Nothing: the runner warms up with dummy runs, which take no part in a step."""
        return nullcontext()

    def _beginning(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """The runner's method, which knows a batch's blocks, with the begin of a forward before."""

        @wraps(build)
        def build_attention_metadata(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self._open:
                self._begin()
            return build(*args, **kwargs)

        return build_attention_metadata

    def _begin(self) -> None:
        batch = self._runner.input_batch
        requests = batch.num_reqs
        tokens = self._runner.optimistic_seq_lens_cpu[:requests]
        self._active = ActiveBlocks(
            batch.block_table[0].get_cpu_tensor()[:requests],
            (tokens + self._block_tokens - 1) // self._block_tokens,
            self._placement.num_blocks,
            self._runner.device,
        )
        self._renumbered = None
        self._payload.use(self._active)
        if self._history:
            self._engine.arm(start=self._start)

    def _split_groups(self) -> None:
        owned = self._placement.persistent_layers
        runner = self._runner
        for number, groups in enumerate(runner.attn_groups):
            split: list[Any] = []
            for group in groups:
                for builder in group.metadata_builders:
                    _check_builder(builder)
                held = [name for name in group.layer_names if name in owned]
                others = [name for name in group.layer_names if name not in owned]
                if held:
                    split.append(replace(group, layer_names=held))
                if others:
                    builders = [self._renumbering(builder) for builder in group.metadata_builders]
                    split.append(replace(group, layer_names=others, metadata_builders=builders))
            runner.attn_groups[number] = split

    def _renumbering(self, builder: Any) -> Any:  # noqa: ANN401 - of any of the known classes
        """A builder for layers in scratch.

        A copy, since builders keep a batch's tensors in attributes. What both refer to is a work
        space on the device, and lengths that are the same in both.
        """
        made = copy(builder)
        build = made.build

        @wraps(build)
        def renumbered(
            common_prefix_len: int,
            common_attn_metadata: Any,  # noqa: ANN401 - vllm-ascend's
            **kwargs: Any,  # noqa: ANN401 - passed through
        ) -> Any:  # noqa: ANN401 - each builder's own
            return build(common_prefix_len, self._in_scratch(common_attn_metadata), **kwargs)

        made.build = renumbered
        return made

    def _in_scratch(self, common: Any) -> Any:  # noqa: ANN401 - vllm-ascend's common metadata
        active = self._active
        if active is None:
            return common  # of a dummy run
        if self._renumbered is None:
            self._renumbered = copy(common)
            self._renumbered.block_table_tensor = active.renumber_table(common.block_table_tensor)
            self._renumbered.slot_mapping = active.renumber_slots(
                common.slot_mapping, self._block_tokens
            )
        return self._renumbered


def _check_builder(builder: Any) -> None:  # noqa: ANN401 - of any class
    name = f"{type(builder).__module__}.{type(builder).__qualname__}"
    if name not in _BUILDERS:
        raise SeamError(
            f"KVPP compact: {name} builds attention metadata in a way that is not known here; set "
            "kvpp.mode full"
        )


def _block_tokens(runner: Any) -> int:  # noqa: ANN401 - an NPUModelRunner
    """Tokens in a block.

    Raises:
        SeamError: attention and the cache differ in it, or new blocks are zeroed by their ids.
    """
    config = runner.kv_cache_config
    block_tokens: int = config.kv_cache_groups[0].kv_cache_spec.block_size
    if runner.kernel_block_sizes != [[block_tokens]]:
        raise SeamError(
            f"KVPP compact: attention uses blocks of {runner.kernel_block_sizes} tokens, the cache "
            f"of {block_tokens}; set kvpp.mode full"
        )
    if config.needs_kv_cache_zeroing:
        raise SeamError(
            "KVPP compact: vllm-ascend zeroes new blocks here, by ids that scratch does not have; "
            "set kvpp.mode full"
        )
    return block_tokens
