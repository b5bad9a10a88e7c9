import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvpp_connect import __version__
from kvpp_connect.errors import SeamError
from kvpp_connect.seam.device_ledger import (
    CPU_LEDGER,
    CUDA_LEDGER,
    CUDA_WORKER_LEDGER,
    STOCK_LEDGER,
)
from kvpp_connect.seam.ledger import LEDGER, Touchpoint, verify, vllm_version
from kvpp_connect.seam.runner_v2_ledger import RUNNER_V2_LEDGER

pytestmark = pytest.mark.timeout(300)  # a fresh process imports vLLM


def test_the_installed_vllm_fits():
    verify((*LEDGER, *CPU_LEDGER))
    verify((*CUDA_LEDGER, *CUDA_WORKER_LEDGER))


def test_no_check_on_cuda_replaces_torchs_streams():
    """As importing vLLM's worker for CPUs does."""
    code = (
        "import torch; stream = torch.cuda.Stream; pin = torch.Tensor.pin_memory\n"
        "from kvpp_connect.seam.variants import variant\n"
        "variant('cuda').verify()\n"
        "assert torch.cuda.Stream is stream and torch.Tensor.pin_memory is pin\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_model_runner_v2_of_the_installed_vllm_fits():
    """Its modules load without Triton, whose kernels are functions then."""
    verify(RUNNER_V2_LEDGER)


@pytest.mark.parametrize(
    ("touchpoint", "message"),
    [
        (Touchpoint(target="vllm.nowhere:x", why=""), "vllm.nowhere:x is missing"),
        (Touchpoint(target="vllm.config:VllmConfig.nothing", why=""), "nothing is missing"),
        (
            Touchpoint(
                target="vllm.v1.worker.gpu_worker:Worker.execute_model",
                parameters=("self", "other"),
                why="",
            ),
            r"takes \('self', 'scheduler_output'\), expected \('self', 'other'\)",
        ),
        (
            Touchpoint(
                target="vllm.v1.kv_cache_interface:KVCacheTensor", fields=("shared_by",), why=""
            ),
            "has no field shared_by",
        ),
    ],
)
def test_a_vllm_that_does_not_fit_is_refused_with_both_versions(touchpoint, message):
    with pytest.raises(SeamError, match=message) as error:
        verify((*LEDGER, touchpoint))
    assert vllm_version() in str(error.value)
    assert __version__ in str(error.value)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_the_ledger_fits_the_signatures_of_each_supported_vllm(version):
    """Facts read from the released wheels by scripts/vllm_facts.py, without importing them."""
    facts = json.loads((Path(__file__).parent / f"vllm_facts_{version}.json").read_text())
    for entry in STOCK_LEDGER:
        fact = facts[entry.target]
        if entry.parameters is not None:
            assert tuple(fact["parameters"]) == entry.parameters, entry.target
        assert set(entry.fields) <= set(fact.get("fields", ())), entry.target


def test_the_document_of_touchpoints_is_up_to_date():
    root = Path(__file__).parents[2]
    script = runpy.run_path(str(root / "scripts" / "touchpoints.py"))
    assert (root / "docs" / "touchpoints.md").read_text() == script["render"]()
