"""Where target layers ask for their caches: before the first access to any component.

A dense MLA layer is asked for in ``prepare_kv_cache_update``, before it writes. A sparse one has an
indexer, which writes and reads its keys before that, inside the opaque op ``sparse_attn_indexer``.
Models for accelerators write both caches in one kernel of their own; before it they call the
implementation's ``prepare_for_batch``. All three run in eager code, in compiled models as well.
Only a breakable CUDA graph captures the calls around the kernels that write, and replays the
kernels alone. There the hooks end the captured segment, so that layers ask at each replay.
Whichever comes first acquires the layer; the others find it held.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.model_executor.layers import sparse_attn_indexer
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from kvpp_connect.broadcast.engine import BroadcastError, PrefetchEngine
from kvpp_connect.errors import SeamError
from kvpp_connect.layout import BundlePlace, RankPlacement
from kvpp_connect.seam import graph_breaks


class LayerHooks:
    """The target layers of one worker, tied to its engine."""

    def __init__(
        self, placement: RankPlacement, layers: dict[str, Any], engine: PrefetchEngine
    ) -> None:
        """Hook the layers.

        Args:
            layers: vLLM's layers that have caches, by name.

        Raises:
            SeamError: a bundle without a main cache: nothing would tell when the layer is done.
        """
        self._engine = engine
        self._placement = placement
        self._seen: set[str] = set()
        self._hook_layers(layers)

    def _hook_layers(self, layers: dict[str, Any]) -> None:
        indexers: dict[str, Callable[[], None]] = {}
        for bundle in self._placement.bundles:
            names = bundle_names(bundle)
            if not any(isinstance(layers[name], MLAAttention) for name in names):
                raise SeamError(f"KVPP: no MLA layer among {', '.join(names)}")
            for name in names:
                enter = self._entrance([name], bundle.ordinal)
                if isinstance(layers[name], MLAAttention):
                    _hook_main(layers[name], enter)
                else:
                    indexers[name] = enter
        if indexers:
            _hook_indexers(indexers)

    def finish(self) -> None:
        """End a forward that broadcast.

        Raises:
            BroadcastError: a layer did not take its turn, or touched a cache unasked.
        """
        if self._engine.held is not None:
            self._engine.release(self._engine.held)
        self._engine.finish()
        names = {c.layer_name for b in self._placement.layout.stage.targets for c in b.components}
        unasked = sorted(names - self._seen)
        self._seen.clear()
        if unasked:
            reason = f"this vLLM uses the cache of {', '.join(unasked)} without asking"
            self._engine.abandon(reason)
            raise BroadcastError(f"KVPP rank {self._placement.rank}: {reason}")

    def _entrance(self, names: list[str], ordinal: int) -> Callable[[], None]:
        """What to call before the first access to some of a bundle's caches."""
        engine = self._engine

        def enter() -> None:
            if not engine.armed:
                return
            self._seen.update(names)
            if engine.held == ordinal:
                return
            if engine.held is not None:  # the layer before: its attention is behind us
                engine.release(engine.held)
            engine.acquire(ordinal)

        return enter


def bundle_names(bundle: BundlePlace) -> list[str]:
    """Names of a bundle's caches."""
    return [place.component.layer_name for place in bundle.components]


def _hook_main(layer: Any, enter: Callable[[], None]) -> None:  # noqa: ANN401 - an MLAAttention
    """Ask before the main cache's first access, in either of the ways that models announce it."""

    enter_at_replay = graph_breaks.at_replay(enter)

    def asking(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def prepare(attn_metadata: Any) -> None:  # noqa: ANN401 - each backend's own
            if graph_breaks.capturing():
                enter_at_replay()
            # Without metadata it is a dummy run, which touches no cache.
            elif attn_metadata is not None:
                enter()
            original(attn_metadata)

        return prepare

    layer.prepare_kv_cache_update = asking(layer.prepare_kv_cache_update)
    layer.impl.prepare_for_batch = asking(layer.impl.prepare_for_batch)


def _hook_indexers(enter: dict[str, Callable[[], None]]) -> None:
    """Ask before an indexer's first access.

    The op looks its layer's name up before anything else, by a function of its own module.
    """
    module: Any = sparse_attn_indexer
    original = module._resolve_layer_name  # noqa: SLF001 - in the ledger

    @wraps(original)
    def resolve_layer_name(layer_name: Any) -> str:  # noqa: ANN401 - a type of vLLM's own
        name = original(layer_name)
        if name in enter:
            enter[name]()
        return name

    module._resolve_layer_name = resolve_layer_name  # noqa: SLF001 - in the ledger
