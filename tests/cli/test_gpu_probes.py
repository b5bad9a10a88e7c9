"""What `kvpp doctor` makes of what an NVIDIA machine prints, with the prints played."""

import pytest

from kvpp_connect.cli import gpu_probes

TWO = "NVIDIA H200, 570.86.15\nNVIDIA H200, 570.86.15\n"
LINKED = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tNV18\tPXB\t0-47\t0
GPU1\tNV18\t X \tNV18\tSYS\t0-47\t0
GPU2\tNV18\tNV18\t X \tSYS\t48-95\t1
NIC0\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
"""
PEERS = " \tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n\nLegend:\n  X   = Self\n  OK  = Status Ok\n"


@pytest.fixture
def judge(monkeypatch):
    """Findings of a machine that prints this, with these packages installed."""

    def run(ranks=2, *, kvpp=True, packages=None, **printed):
        known = {"nvidia-nccl-cu13": "2.29.7"} if packages is None else packages
        monkeypatch.setattr(
            gpu_probes, "versions_of", lambda names: {n: v for n, v in known.items() if n in names}
        )
        answers = {
            gpu_probes._QUERY: printed.get("query", TWO),  # noqa: SLF001
            "nvidia-smi topo -m": printed.get("links", LINKED),
            "nvidia-smi topo -p2p r": printed.get("peers", PEERS),
        }
        found = gpu_probes.cuda(ranks, kvpp=kvpp, run=answers.__getitem__)
        return {finding.topic: finding for finding in found}

    return run


def test_a_machine_where_nothing_is_wrong(judge):
    found = judge()
    assert {f.state for f in found.values()} == {"ok"}
    assert found["GPUs"].said == "2 x NVIDIA H200 (driver 570.86.15)"
    assert found["NVLink"].said == "between all 3 pairs of GPUs"
    assert found["NCCL"].said == "2.29.7 (nvidia-nccl-cu13)"
    assert "peer access" not in found


def test_gpus_that_are_missing_or_too_few_would_fail(judge):
    assert judge(query="")["GPUs"].state == "fail"
    assert "--gpus all" in judge(query="")["GPUs"].way_out
    few = judge(ranks=4)["GPUs"]
    assert (few.state, few.way_out) == ("fail", "--tensor-parallel-size 2, or more GPUs")


def test_pairs_without_nvlink_or_peer_access_are_named(judge):
    links = judge(links=LINKED.replace("NV18\tNV18\tPXB", "NV18\tSYS\tPXB"))["NVLink"]
    assert links.state == "note"
    assert links.said.startswith("not between 1 of 3 pairs, such as GPU0-GPU2 (SYS)")
    peers = judge(peers=PEERS.replace("X\tOK", "X\tCNS"))["peer access"]
    assert "1 of 1 pairs of GPUs have none, such as GPU0-GPU1 (CNS)" in peers.said
    assert "NVLink" not in judge(links="")


@pytest.mark.parametrize(("kvpp", "state"), [(True, "fail"), (False, "note")])
def test_an_nccl_that_cannot_order_launches_stops_kvpp_only(judge, kvpp, state):
    found = judge(kvpp=kvpp, packages={"nvidia-nccl-cu12": "2.25.1"})["NCCL"]
    assert (found.state, found.way_out) == (state, "install nvidia-nccl-cu12 2.26 or newer")


def test_a_mooncake_for_another_cuda_than_torchs_is_a_hint(judge):
    installed = {"nvidia-nccl-cu13": "2.29.7", "mooncake-transfer-engine": "0.3.13.post1"}
    found = judge(packages=installed)["mooncake's CUDA"]
    assert found.said == "mooncake-transfer-engine is built for CUDA 12, torch for 13"
    assert found.way_out.endswith("pip install mooncake-transfer-engine-cuda13")
    right = {"nvidia-nccl-cu12": "2.28.3", "mooncake-transfer-engine": "0.3.13.post1"}
    assert "mooncake's CUDA" not in judge(packages=right)


def test_variables_that_bring_deadlocks_back_would_fail(judge, monkeypatch):
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    assert judge()["environment"].state == "fail"
    assert "environment" not in judge(kvpp=False)


def test_rdma_needs_a_port_that_is_up(tmp_path):
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    loaded = tmp_path / "mlx5_0"
    (up,) = gpu_probes.rdma(tmp_path, loaded, gpus=True)
    assert (up.state, up.said) == ("ok", "up: mlx5_0; down: mlx5_1")
    _, note = gpu_probes.rdma(tmp_path, tmp_path / "absent", gpus=True)
    assert (note.topic, note.way_out) == ("GPUDirect", "as root: modprobe nvidia-peermem")
    assert len([*gpu_probes.rdma(tmp_path, tmp_path / "absent", gpus=False)]) == 1
    (tmp_path / "mlx5_0" / "ports" / "1" / "state").write_text("1: DOWN")
    (down,) = gpu_probes.rdma(tmp_path, loaded, gpus=True)
    assert (down.state, down.said) == ("fail", "no port is up (down: mlx5_0, mlx5_1)")
    (none,) = gpu_probes.rdma(tmp_path / "nowhere", loaded, gpus=True)
    assert none.said == "there is no device"
