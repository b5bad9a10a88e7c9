"""Forwards of a rank through vllm-ascend's own op and attention code, without its operators.

The op that every MLA and SFA layer runs in, and the implementation's ``forward``, are the real
ones. What needs an NPU inside is replaced by fakes that look at the caches and write to them.
"""

import types
from contextlib import contextmanager

import ascend_chain

LAYERS = 4
HISTORY_BLOCK = 2  # filled before the forwards
NEW_BLOCK = 5  # written by them
UNTOUCHED = -1.0


class StopLayerError(Exception):
    """Ends a sparse layer at its first access; what follows needs operators."""


def batch(kind, tokens):
    """Attention metadata of one request, as the runner sorts it."""
    decodes = kind in ("decode", "short tail")
    return types.SimpleNamespace(
        num_decodes=int(decodes),
        num_prefills=int(not decodes),
        num_decode_tokens=tokens if decodes else 0,
        num_actual_tokens=tokens,
    )


def scheduled(kind, tokens):
    """The scheduler's output for that request."""
    computed = 0 if kind == "first prefill" else 256
    new = [types.SimpleNamespace(num_computed_tokens=computed)]
    running = types.SimpleNamespace(num_computed_tokens=[computed])
    nobody = types.SimpleNamespace(num_computed_tokens=[])
    return types.SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        scheduled_new_reqs=[] if kind == "decode" else new,
        scheduled_cached_reqs=running if kind == "decode" else nobody,
        kv_connector_metadata=None,
    )


BATCHES = {"first prefill": 64, "prefill": 64, "decode": 1, "short tail": 1}


def history(layer, part):
    return float(10 * (layer + 1) + part)


def forwards(pipe, model, ranks, rank, port, options):
    """Send what each layer saw in each batch, and what the owned caches hold afterwards."""
    chain = ascend_chain.start_rank(model, ranks, rank, port, options)
    fill(chain)
    seen = {}
    for kind, tokens in BATCHES.items():
        with faked_attention(chain, seen.setdefault(kind, [])):
            run_batch(chain, kind, tokens)
    pipe.send({"seen": seen, "held": held(chain), "broadcasts": broadcasts(chain)})
    pipe.recv()


def fill(chain):
    """Give the held layers a history."""
    from kvpp_connect.seam.runtime import active_placement

    held_names = active_placement().persistent_layers
    for layer in range(LAYERS):
        for part, tensor in enumerate(tensors(chain, layer)):
            tensor.fill_(UNTOUCHED)
            if main_name(layer) in held_names:
                tensor[HISTORY_BLOCK] = history(layer, part)


def main_name(layer):
    return f"model.layers.{layer}.self_attn.attn"


def tensors(chain, layer):
    """A layer's cache tensors, those of its indexer last."""
    found = [*chain.layers[main_name(layer)].kv_cache]
    indexer = chain.layers.get(f"model.layers.{layer}.self_attn.indexer.k_cache")
    return found + ([*indexer.kv_cache] if indexer is not None else [])


def run_batch(chain, kind, tokens):
    """A step of the worker, whose runner does nothing but call each layer's op."""
    import torch
    from vllm_ascend.ascend_forward_context import set_ascend_forward_context
    from vllm_ascend.ops.mla import mla_forward

    def run_layers(scheduler_output, intermediate):
        del scheduler_output, intermediate
        metadata = {main_name(layer): batch(kind, tokens) for layer in range(LAYERS)}
        hidden = torch.zeros(tokens, 128, dtype=torch.bfloat16)
        with set_ascend_forward_context(metadata, chain.config, num_tokens=tokens):
            for layer in range(LAYERS):
                output = torch.zeros_like(hidden)
                try:
                    mla_forward(hidden, False, output, f"model.layers.{layer}.self_attn")
                except StopLayerError:
                    continue

    chain.worker.model_runner.execute_model = run_layers
    chain.worker.execute_model(scheduled(kind, tokens))


@contextmanager
def faked_attention(chain, log):
    """Fakes for what needs operators; ``log`` gets (layer, what, the history that was there)."""
    import pytest
    import torch
    from vllm_ascend.attention.mla_v1 import AscendMLAImpl
    from vllm_ascend.attention.sfa_v1 import AscendSFAImpl

    def look(layer, what, caches):
        log.append((layer, what, [float(cache[HISTORY_BLOCK].float().mean()) for cache in caches]))

    def preprocess(impl, layer_name, hidden_states, kv_cache, attn_metadata, gather):
        """Writes the new token's values, as the real one does, after the projections."""
        del hidden_states, gather
        layer = int(layer_name.split(".")[2])
        look(layer, "write", kv_cache)
        for part, cache in enumerate(kv_cache):
            cache[NEW_BLOCK] = history(layer, part) + 100
        result = types.SimpleNamespace(
            **dict.fromkeys(("ql_nope", "q_pe", "q_nope", "k_nope", "k_pe", "value"), layer),
            dequant_scale_q_nope=kv_cache,
        )
        return (result, None) if attn_metadata.num_decodes else (None, result)

    def forward_decode(impl, layer, *arguments):
        look(layer, "decode attention", arguments[-1])
        return torch.zeros(1, impl.num_heads * impl.v_head_dim, dtype=torch.bfloat16)

    def forward_prefill(impl, layer, q_pe, k_nope, k_pe, value, kv_cache, attn_metadata):
        look(layer, "prefill attention", kv_cache)
        shape = attn_metadata.num_actual_tokens, impl.num_heads * impl.v_head_dim
        return torch.zeros(shape, dtype=torch.bfloat16)

    compose = AscendSFAImpl._compose_sfa_kv_cache  # noqa: SLF001 - its first access to caches

    def compose_and_stop(impl, kv_cache):
        caches = compose(impl, kv_cache)
        layer = len({layer for layer, _, _ in log})
        look(layer, "first access", caches)
        for part, cache in enumerate(caches):
            cache[NEW_BLOCK] = history(layer, part) + 100
        raise StopLayerError

    def o_proj(x, is_prefill=False):
        del is_prefill
        return (torch.zeros(x.shape[0], 128, dtype=x.dtype),)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AscendMLAImpl, "_mla_preprocess", preprocess)
        patch.setattr(AscendMLAImpl, "_forward_decode", forward_decode)
        patch.setattr(AscendMLAImpl, "_forward_prefill", forward_prefill)
        patch.setattr(AscendSFAImpl, "_compose_sfa_kv_cache", compose_and_stop)
        for layer in range(LAYERS):
            impl = chain.layers[main_name(layer)].impl
            impl.__dict__["o_proj"] = o_proj
        yield


def held(chain):
    """The two blocks of the layers that this rank holds, by layer, one value per tensor."""
    from kvpp_connect.seam.runtime import active_placement

    names = active_placement().persistent_layers
    return {
        layer: [
            [float(t[block].float().mean()) for t in tensors(chain, layer)]
            for block in (HISTORY_BLOCK, NEW_BLOCK)
        ]
        for layer in range(LAYERS)
        if main_name(layer) in names
    }


def broadcasts(chain):
    """How many the engine has made."""
    return chain.worker._kvpp._engine.counters.broadcasts  # noqa: SLF001
