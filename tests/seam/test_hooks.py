"""Layers ask for their caches before the first access, by whichever way vLLM comes."""

from types import SimpleNamespace

import pytest
from builders import bundle_stage
from noting_engine import NotingEngine

pytest.importorskip("vllm")

import torch
from vllm import _custom_ops as ops
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadata

from kvpp_connect.broadcast.engine import BroadcastError
from kvpp_connect.errors import SeamError
from kvpp_connect.layout import place_rank, plan_group
from kvpp_connect.seam.hooks import LayerHooks

METADATA = object()


class MainLayer(MLAAttention):
    """An MLA layer with nothing but its hook points."""

    def __init__(self, log, name):
        torch.nn.Module.__init__(self)
        self.hisparse_cache = None
        self.impl = SimpleNamespace(prepare_for_batch=lambda m: log.append(f"batch {name}"))


def main_name(index):
    return f"model.layers.{index}.self_attn.c0"


def index_name(index):
    return f"model.layers.{index}.self_attn.c1"


@pytest.fixture
def build(monkeypatch):
    """Hooked layers; True stands for a layer with an indexer."""
    name = "_resolve_layer_name"  # put back after the test
    monkeypatch.setattr(sparse_attn_indexer, name, getattr(sparse_attn_indexer, name))

    def make(*indexers):
        log = []
        stage = bundle_stage([[8, 2] if indexer else [8] for indexer in indexers])
        layers = {
            c.layer_name: MainLayer(log, c.layer_name) if c.layer_name.endswith("c0") else object()
            for bundle in stage.targets
            for c in bundle.components
        }
        engine = NotingEngine(log)
        hooks = LayerHooks(place_rank(plan_group(stage, 2), 0, 3), layers, engine)
        engine.armed = True
        return SimpleNamespace(log=log, layers=layers, engine=engine, hooks=hooks)

    return make


def run_indexer_op(name, monkeypatch, log):
    """vLLM's op, with a batch of one token that has nothing to score."""
    monkeypatch.setattr(
        ops, "indexer_k_quant_and_cache", lambda *a: log.append("writes keys"), raising=False
    )
    slots = torch.zeros(1, dtype=torch.int64)
    metadata = DeepseekV32IndexerMetadata(
        seq_lens=slots,
        max_seq_len=1,
        slot_mapping=slots,
        num_decodes=0,
        num_decode_tokens=0,
        num_prefills=0,
        num_prefill_tokens=0,
    )
    state, vector = torch.zeros(1, 4), torch.zeros(1, 128)
    chosen = torch.zeros(1, 8, dtype=torch.int32)
    keys = torch.zeros(3, 64, 132, dtype=torch.uint8)
    with set_forward_context({name: metadata}, VllmConfig(), slot_mapping={name: slots}):
        torch.ops.vllm.sparse_attn_indexer(
            state,
            name,
            keys,
            vector,
            None,
            vector,
            torch.zeros(1, 1),
            *(128, "ue8m0", 8, 128, 64, 64),
            chosen,
            *(False, False, False, ""),
        )


def test_a_dense_layer_asks_before_it_writes_and_gives_back_when_the_next_one_asks(build):
    made = build(False, False)
    for index in (0, 1):
        made.layers[main_name(index)].prepare_kv_cache_update(METADATA)
    made.hooks.finish()
    assert made.log == [
        *(("acquire", 0), ("release", 0), ("acquire", 1), ("release", 1), "finish"),
    ]


def test_an_indexer_asks_before_it_writes_its_keys_and_the_main_cache_finds_it_held(
    build, monkeypatch
):
    made = build(True)
    run_indexer_op(index_name(0), monkeypatch, made.log)
    made.layers[main_name(0)].prepare_kv_cache_update(METADATA)
    made.hooks.finish()
    assert made.log == [("acquire", 0), "writes keys", ("release", 0), "finish"]


def test_a_kernel_that_writes_both_caches_is_announced_by_the_implementation(build, monkeypatch):
    made = build(True)
    layer = made.layers[main_name(0)]
    layer.impl.prepare_for_batch(METADATA)
    run_indexer_op(index_name(0), monkeypatch, made.log)
    layer.impl.prepare_for_batch(METADATA)
    made.hooks.finish()
    batch = f"batch {main_name(0)}"
    expected = [("acquire", 0), batch, "writes keys", batch, ("release", 0), "finish"]
    assert made.log == expected


def test_layers_with_and_without_an_indexer_take_turns(build, monkeypatch):
    made = build(True, False, True)
    for index in (0, 1, 2):
        if index != 1:
            run_indexer_op(index_name(index), monkeypatch, made.log)
        made.layers[main_name(index)].prepare_kv_cache_update(METADATA)
    made.hooks.finish()
    assert [call for call in made.log if call != "writes keys"] == [
        *(call for i in range(3) for call in (("acquire", i), ("release", i))),
        "finish",
    ]


def test_without_history_and_in_dummy_runs_nobody_asks(build, monkeypatch):
    made = build(True)
    layer = made.layers[main_name(0)]
    layer.prepare_kv_cache_update(None)
    layer.impl.prepare_for_batch(None)
    made.engine.armed = False
    layer.prepare_kv_cache_update(METADATA)
    run_indexer_op(index_name(0), monkeypatch, made.log)
    assert [call for call in made.log if call[0] == "acquire"] == []


def test_a_cache_that_nobody_asked_for_stops_the_engine_by_name(build):
    made = build(True)
    made.layers[main_name(0)].prepare_kv_cache_update(METADATA)
    with pytest.raises(BroadcastError, match=rf"rank 0: .*{index_name(0)} without asking"):
        made.hooks.finish()
    assert made.log[-1][0] == "abandon"


def test_a_bundle_without_a_main_cache_is_refused_by_name():
    stage = bundle_stage([[8]])
    layers = {main_name(0): object()}
    with pytest.raises(SeamError, match=main_name(0)):
        LayerHooks(place_rank(plan_group(stage, 2), 0, 3), layers, NotingEngine([]))


class FakeGraph:
    """A captured segment, which repeats nothing of what the host did."""

    def __init__(self, log):
        self.log = log

    def capture_begin(self):
        """Nothing to prepare."""

    def capture_end(self):
        """Nothing to keep."""

    def replay(self):
        self.log.append("kernels")


@pytest.mark.parametrize("announce", ["prepare_kv_cache_update", "impl.prepare_for_batch"])
def test_in_a_breakable_graph_layers_ask_between_its_segments_at_every_replay(
    build, monkeypatch, announce
):
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    made = build(False, False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(made.log))

    def model():
        for index in (0, 1):
            layer = made.layers[main_name(index)]
            (
                layer.impl.prepare_for_batch
                if "batch" in announce
                else layer.prepare_kv_cache_update
            )(None)

    with set_forward_context(None, VllmConfig()), BreakableCUDAGraphCapture() as capture:
        model()
    assert [call for call in made.log if call[0] == "acquire"] == []  # a dummy run
    made.log.clear()
    for _ in range(2):
        with set_forward_context({main_name(0): METADATA}, VllmConfig()):
            capture.replay()
        made.hooks.finish()
        made.engine.armed = True
    with set_forward_context(None, VllmConfig()):
        capture.replay()
    asked = [("acquire", 0), "kernels", ("release", 0), ("acquire", 1), "kernels", ("release", 1)]
    forward = ["kernels", *asked, "finish"]
    assert made.log == [*forward, *forward, *["kernels"] * 3]
