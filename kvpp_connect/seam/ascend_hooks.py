"""Where vllm-ascend's layers ask for their caches: in front of the implementation's ``forward``.

Every eager or piecewise call of an MLA or SFA layer passes there, before its projections and so
before the first access to any of its caches, the indexer's included. vLLM's hooks do not serve:
these implementations write their caches themselves, and the connector's hook is left out in
batches of decodes and of short ends of prompts.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from kvpp_connect.errors import SeamError
from kvpp_connect.seam.hooks import LayerHooks, bundle_names


class AscendLayerHooks(LayerHooks):
    """The target layers of one NPU worker, tied to its engine."""

    def _hook_layers(self, layers: dict[str, Any]) -> None:
        for bundle in self._placement.bundles:
            names = bundle_names(bundle)
            mains = [layers[name] for name in names if isinstance(layers.get(name), MLAAttention)]
            if len(mains) != 1:
                raise SeamError(
                    f"KVPP: {len(mains)} MLA layers among {', '.join(names)}, expected one"
                )
            impl = mains[0].impl
            impl.forward = _asking(impl.forward, self._entrance(names, bundle.ordinal))


def _asking(original: Callable[..., Any], enter: Callable[[], None]) -> Callable[..., Any]:
    @wraps(original)
    def forward(
        layer_name: str,
        hidden_states: Any,  # noqa: ANN401 - passed through
        kv_cache: Any,  # noqa: ANN401 - passed through
        attn_metadata: Any,  # noqa: ANN401 - each backend's own
        *args: Any,  # noqa: ANN401 - passed through
        **kwargs: Any,  # noqa: ANN401 - passed through
    ) -> Any:  # noqa: ANN401 - passed through
        # Without metadata it is a dummy run, which touches no cache.
        if attn_metadata is not None:
            enter()
        return original(layer_name, hidden_states, kv_cache, attn_metadata, *args, **kwargs)

    return forward
