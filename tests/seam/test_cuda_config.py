"""vLLM's own configuration on a played CUDA machine: what is settled, and what is refused."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("vllm")

pytestmark = pytest.mark.distributed  # each question is asked in a process of its own

TESTS = str(Path(__file__).parents[1])


def run(code, **environment):
    """Lines that a fresh process prints behind a mark."""
    script = f"""
import os, sys
sys.path.insert(0, {TESTS!r})
os.environ.update({environment!r})
import played_cuda
played_cuda.play()
from played_cuda import engine_config, said
{textwrap.dedent(code)}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line[2:] for line in done.stdout.splitlines() if line.startswith("> ")]


SHOW = """
    names = [
        "NCCL_LAUNCH_ORDER_IMPLICIT", "VLLM_ALLREDUCE_USE_SYMM_MEM",
        "VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC",
        "VLLM_USE_NCCL_SYMM_MEM",
    ]

    def show(config):
        compilation, parallel = config.compilation_config, config.parallel_config
        print(">", parallel.worker_cls, compilation.cudagraph_mode.name)
        print(">", parallel.disable_custom_all_reduce, compilation.pass_config.fuse_allreduce_rms)
        print(">", *(os.environ.get(name, "-") for name in names))
"""


@pytest.mark.timeout(300)
def test_what_the_user_left_open_is_settled_and_with_kvpp_off_nothing_is():
    assert run(
        textwrap.dedent(SHOW)
        + textwrap.dedent("""
        show(engine_config(kvpp=False))
        show(engine_config())
        show(engine_config(enforce_eager=True))
        """),
        VLLM_USE_BREAKABLE_CUDAGRAPH="0",
    ) == [
        "vllm.v1.worker.gpu_worker.Worker FULL_AND_PIECEWISE",
        "False False",  # no FlashInfer here, which vLLM would fuse with
        "- - - - -",
        "kvpp_connect.seam.cuda_worker.KvppGPUWorker PIECEWISE",
        "True False",
        "1 0 0 0 0",
        "kvpp_connect.seam.cuda_worker.KvppGPUWorker NONE",
        "True False",
        "1 0 0 0 0",
    ]


@pytest.mark.timeout(300)
def test_what_the_user_asked_for_and_cannot_work_is_refused_with_the_way_out():
    assert (
        run("""
        def compiled(**settings):
            return said(compilation_config=settings)

        print(">", "cudagraph_mode FULL_AND_PIECEWISE captures attention" in
              compiled(cudagraph_mode="FULL_AND_PIECEWISE"))
        print(">", "Remove it from --compilation-config" in
              compiled(pass_config={"fuse_allreduce_rms": True}))
        print(">", "Use --all2all-backend allgather_reducescatter" in
              said(all2all_backend="deepep_low_latency", enable_expert_parallel=True,
                   data_parallel_size=2))
        os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = "1"
        print(">", "FlashInfer's all-reduce hangs beside broadcasts. Unset it" in said())
        os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"
        os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "0"
        print(">", "in no fixed order hangs beside broadcasts. Unset it" in said())
        """)
        == ["True"] * 5
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("runner", "settled"),
    [
        ("1", ["NONE KvppScheduler", "PIECEWISE None", "PIECEWISE None", "True"]),
        ("0", ["NONE KvppScheduler", "NONE None", "write no KV", "True"]),
    ],
)
def test_breakable_graphs_go_where_compact_mode_or_the_runner_cannot_have_them(runner, settled):
    """They are vLLM's default for this model."""
    assert (
        run(
            """
        def settled(**more):
            try:
                config = engine_config(async_scheduling=False, **more)
            except Exception as error:
                return "write no KV" if "write no KV" in str(error) else str(error)
            scheduler = str(config.scheduler_config.scheduler_cls).rpartition(".")[2]
            return f"{config.compilation_config.cudagraph_mode.name} {scheduler}"

        full = {"enable_kvpp": True, "kvpp": {"mode": "full"}}
        print(">", settled())
        print(">", settled(additional_config=full))
        print(">", settled(compilation_config={"cudagraph_mode": "PIECEWISE"}))
        print(">", "Remove --kv-offloading-size" in said(kv_offloading_size=4.0))
        """,
            VLLM_USE_V2_MODEL_RUNNER=runner,
        )
        == settled
    )


@pytest.mark.timeout(300)
def test_graphs_that_are_split_by_the_compiler_have_to_leave_caches_out():
    assert (
        run(
            """
        def compiled(**settings):
            return said(compilation_config=settings)

        print(">", compiled() == "")
        print(">", "lack vllm::unified_mla_kv_cache_update, vllm::sparse_attn_indexer, so that" in
              compiled(splitting_ops=["vllm::unified_mla_attention_with_output"]))
        print(">", "keeps vllm::unified_mla_kv_cache_update in graphs" in
              compiled(use_inductor_graph_partition=True))
        print(">", "fuse_attn_quant needs whole graphs" in
              compiled(pass_config={"fuse_attn_quant": True}))
        print(">", compiled(cudagraph_mode="NONE", splitting_ops=[]) == "")
        """,
            VLLM_USE_BREAKABLE_CUDAGRAPH="0",
        )
        == ["True"] * 5
    )


@pytest.mark.timeout(300)
def test_a_server_that_doctor_judges_is_settled_like_one_that_starts():
    assert run("""
        from kvpp_connect.seam.checks import deployment_problems
        from kvpp_connect.seam import install
        arguments = ["--tensor-parallel-size=8", "--max-model-len=2048",
                     "--distributed-executor-backend=mp", "--skip-tokenizer-init"]
        path = played_cuda.MODEL / "config.json"
        print(">", deployment_problems(path, arguments, {"enable_kvpp": True}, {}))
        print(">", install._always_settles)
        full = ["--compilation-config", '{"cudagraph_mode": "FULL"}']
        print(">", "cudagraph_mode FULL" in
              str(deployment_problems(path, arguments + full, {"enable_kvpp": True}, {})))
        print(">", deployment_problems(path, arguments + full, {}, {}))
        """) == ["()", "False", "True", "()"]
