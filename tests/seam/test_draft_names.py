"""The proposer's caches, by the name that each of vLLM's model runners has for it."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.model_executor.layers.attention import Attention

from kvpp_connect.errors import LayoutError
from kvpp_connect.seam.drafts import draft_cache_names


class SharingLayer(Attention):
    """An attention layer that keeps no cache of its own, and nothing else."""

    def __init__(self, target):
        torch.nn.Module.__init__(self)
        self.kv_sharing_target_layer_name = target


def runner_v1(shared=(), drafts=None):
    drafter = SimpleNamespace(_draft_attn_layer_names=drafts) if drafts else None
    return SimpleNamespace(shared_kv_cache_layers=dict(shared), drafter=drafter)


def runner_v2(shared=(), drafts=None):
    layers = {name: SharingLayer(target) for name, target in dict(shared).items()}
    layers |= {"model.layers.0.attn": SharingLayer(None)}
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=layers)
        ),
        speculator=SimpleNamespace(draft_attn_layer_names=drafts) if drafts else None,
    )


RUNNERS = pytest.mark.parametrize("runner", [runner_v1, runner_v2])


@RUNNERS
def test_drafts_are_those_that_the_proposer_has_loaded(runner):
    assert draft_cache_names(runner(drafts={"draft.1", "draft.0"})) == {"draft.0", "draft.1"}


@RUNNERS
def test_without_a_proposer_or_its_caches_there_are_none(runner):
    assert draft_cache_names(runner()) == frozenset()
    bare = runner()
    bare.drafter = bare.speculator = SimpleNamespace()  # such as one that looks n-grams up
    if runner is runner_v1:
        del bare.speculator
    assert draft_cache_names(bare) == frozenset()


@RUNNERS
def test_a_layer_that_shares_a_target_layers_cache_is_refused_by_name(runner):
    shared = {"draft.attn": "model.layers.0.attn"}
    with pytest.raises(
        LayoutError, match=r"draft\.attn shares the cache of model\.layers\.0\.attn"
    ):
        draft_cache_names(runner(shared=shared))
