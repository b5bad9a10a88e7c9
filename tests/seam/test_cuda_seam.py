"""What is particular to CUDA, without a GPU."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.device_communicators import flashinfer_all_reduce
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.worker.gpu_worker import Worker

from kvpp_connect.errors import ConfigError, SeamError
from kvpp_connect.seam import cuda, cuda_graphs, cuda_worker
from kvpp_connect.seam.cuda_worker import KvppGPUWorker

SPLITS = [cuda_graphs.WRITES, cuda_graphs.READS, cuda_graphs.INDEXES]


def graphs(mode=CUDAGraphMode.PIECEWISE, splits=None, *, inductor=False, v2=True, **passes):
    """A configuration with CUDA graphs."""
    return SimpleNamespace(
        use_v2_model_runner=v2,
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode,
            splitting_ops=splits,
            use_inductor_graph_partition=inductor,
            pass_config=SimpleNamespace(
                **{"fuse_attn_quant": False, "fuse_rope_kvcache_cat_mla": False, **passes}
            ),
        ),
    )


@pytest.mark.parametrize(
    "settings",
    [
        graphs(None),
        graphs(CUDAGraphMode.NONE, []),
        graphs(),
        graphs(splits=SPLITS),
        graphs(splits=SPLITS, inductor=True),
    ],
)
def test_graphs_with_the_right_gaps_pass(settings):
    assert cuda_graphs.problem(settings, sparse=True) == ""


@pytest.mark.parametrize("gone", SPLITS)
def test_each_op_that_accesses_caches_has_to_split_the_graph(gone):
    left = [op for op in SPLITS if op != gone]
    said = cuda_graphs.problem(graphs(splits=left), sparse=True)
    assert f"splitting_ops lack {gone}, so that layers would not ask" in said
    dense = cuda_graphs.problem(graphs(splits=left), sparse=False)
    assert bool(dense) is (gone != cuda_graphs.INDEXES)


def test_a_fusion_that_writes_caches_inside_graphs_is_refused():
    settings = graphs(splits=SPLITS, inductor=True, fuse_rope_kvcache_cat_mla=True)
    assert "fuse_rope_kvcache_cat_mla writes" in cuda_graphs.problem(settings, sparse=False)


def test_breakable_graphs_need_no_splitting_ops(monkeypatch):
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    assert cuda_graphs.problem(graphs(splits=[]), sparse=True) == ""


def test_model_runner_v1_captures_breakable_graphs_without_caches(monkeypatch):
    """Without metadata, so that the kernel which writes is captured without a cache."""
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    with pytest.raises(ConfigError, match=r"write no KV in model runner V1.*--enforce-eager"):
        cuda_graphs.check_resolved(graphs(v2=False), sparse=True)
    cuda_graphs.check_resolved(graphs(CUDAGraphMode.NONE, v2=False), sparse=True)


def test_a_worker_refuses_what_vllm_has_come_to_since():
    config = graphs(CUDAGraphMode.FULL, [])
    with pytest.raises(ConfigError, match=r"has settled on cudagraph_mode FULL.*PIECEWISE"):
        cuda_graphs.check_resolved(config, sparse=False)
    config = graphs(splits=[])
    with pytest.raises(ConfigError, match="lack vllm::unified_mla_kv_cache_update"):
        cuda_graphs.check_resolved(config, sparse=False)
    config = graphs(splits=SPLITS)
    cuda_graphs.check_resolved(config, sparse=True)


@pytest.mark.parametrize("name", list(cuda.ENVIRONMENT))
def test_the_environment_is_set_where_it_is_open_and_refused_where_it_is_not(name):
    wanted, _ = cuda.ENVIRONMENT[name]
    environment = {"OTHER": "1"}
    cuda.settle_environment(environment)
    cuda.settle_environment(environment)
    assert environment[name] == wanted
    environment[name] = "01"[wanted == "0"]
    with pytest.raises(ConfigError, match=f"enable_kvpp: {name} is .*set it to {wanted}"):
        cuda.settle_environment(environment)


def layer_of(kind):
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    return layer


def test_layers_with_a_forward_of_their_own_are_refused_by_their_class():
    from vllm.models.deepseek_v32.attention import DeepseekV32Attention

    class Padded(MLAAttention):
        """Changes something else."""

    class Own(MLAAttention):
        def forward(self, positions):
            """Writes who knows where."""

    known = {"a": layer_of(MLAAttention), "b": layer_of(DeepseekV32Attention), "c": object()}
    cuda.check_layers(known | {"d": layer_of(Padded)})
    with pytest.raises(SeamError, match=r"layer d is a test_cuda_seam\.Own, whose own forward"):
        cuda.check_layers(known | {"d": layer_of(Own)})


@pytest.fixture
def worker(monkeypatch):
    """A KVPP worker over one of vLLM's that only notes its calls; ``log`` says in which order."""
    log = []
    runtime = SimpleNamespace(
        warm_up=lambda device: log.append(f"first collective on {device}"),
        budget=lambda memory: log.append("budget") or memory - 1,
    )

    def init(self, vllm_config):
        log.append(f"vLLM's worker, order {cuda.os.environ[cuda.LAUNCH_ORDER]}")
        log.append(f"FlashInfer {not flashinfer_all_reduce._fi_ar_workspace_failed}")  # noqa: SLF001
        self.vllm_config, self.device = vllm_config, "cuda:3"

    for name in cuda.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, cuda.ENVIRONMENT[name][0])  # so that it is put back
        monkeypatch.delenv(name)
    for flag in ("_fi_ar_workspace_failed", "_fi_ar_quant_workspace_failed"):
        monkeypatch.setattr(flashinfer_all_reduce, flag, False)
    monkeypatch.setattr(Worker, "__init__", init)
    monkeypatch.setattr(
        Worker, "determine_available_memory", lambda self: log.append("measured") or 100
    )
    monkeypatch.setattr(KvppGPUWorker, "_kvpp_runtime", lambda self: runtime)
    monkeypatch.setattr(cuda_worker, "nccl_version", lambda: (2, 29, 7))
    config = SimpleNamespace(
        compilation_config=graphs(splits=SPLITS).compilation_config,
        model_config=SimpleNamespace(hf_config=SimpleNamespace()),
    )
    return lambda: SimpleNamespace(made=KvppGPUWorker(config), log=log)


def test_launches_are_ordered_before_vllm_starts_and_nccl_is_there_before_memory_is_measured(
    worker,
):
    built = worker()
    assert built.made.determine_available_memory() == 99
    assert built.log == [
        *("vLLM's worker, order 1", "FlashInfer False"),
        *("first collective on cuda:3", "measured", "budget"),
    ]


def test_a_worker_whose_nccl_cannot_order_launches_says_so_before_anything_can_hang(
    worker, monkeypatch
):
    monkeypatch.setattr(cuda_worker, "nccl_version", lambda: (2, 20, 5))
    built = worker()
    with pytest.raises(ConfigError, match=r"enable_kvpp: NCCL is 2\.20\.5"):
        built.made.determine_available_memory()
    assert built.log[-1] == "FlashInfer False"
