"""What `kvpp doctor` finds out about NVIDIA GPUs and RDMA devices. Each probe raises nothing."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path

from kvpp_connect.cli.machine import Run, run_command, versions_of
from kvpp_connect.cli.probes import Finding
from kvpp_connect.platforms.nccl import LEAST_NCCL
from kvpp_connect.seam.cuda import environment_problems

_INFINIBAND = Path("/sys/class/infiniband")
_PEER_MEMORY = Path("/sys/module/nvidia_peermem")
# torch for CUDA installs one of these; then the CUDA that it is built for.
_NCCL_DISTRIBUTIONS = {"nvidia-nccl-cu13": 13, "nvidia-nccl-cu12": 12}
_MOONCAKE_CUDA = {"mooncake-transfer-engine-cuda13": 13, "mooncake-transfer-engine": 12}
_QUERY = "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader"


def is_cuda() -> bool:
    """Whether torch is built for CUDA here."""
    return bool(versions_of(_NCCL_DISTRIBUTIONS))


def cuda(ranks: int, *, kvpp: bool, run: Run = run_command) -> Iterator[Finding]:
    """GPUs, the ways between them, NCCL, and versions that go together.

    Args:
        ranks: of the tensor parallel group.
        kvpp: whether the deployment turns KVPP on.
        run: prints what a command prints.
    """
    yield _gpus(run(_QUERY), ranks)
    yield from _links(run("nvidia-smi topo -m"))
    yield from _peers(run("nvidia-smi topo -p2p r"))
    yield from _nccl(versions_of(_NCCL_DISTRIBUTIONS), kvpp=kvpp)
    yield from _mooncake_build(versions_of(_NCCL_DISTRIBUTIONS), versions_of(_MOONCAKE_CUDA))
    if kvpp:
        yield from _environment()


def _gpus(printed: str, ranks: int) -> Finding:
    lines = [line for line in printed.splitlines() if "," in line]
    if not lines:
        return Finding(
            topic="GPUs",
            state="fail",
            said="nvidia-smi sees none, and torch is built for CUDA",
            way_out="install the driver, or start the container with --gpus all",
        )
    kinds = Counter(tuple(part.strip() for part in line.split(",", 1)) for line in lines)
    said = ", ".join(f"{n} x {name} (driver {driver})" for (name, driver), n in kinds.items())
    if len(lines) < ranks:
        return Finding(
            topic="GPUs",
            state="fail",
            said=f"{said}, for {ranks} tensor parallel ranks",
            way_out=f"--tensor-parallel-size {len(lines)}, or more GPUs",
        )
    return Finding(topic="GPUs", state="ok", said=said)


def _matrix(printed: str) -> dict[tuple[str, str], str]:
    """Entries above the diagonal of what `nvidia-smi topo` prints, by the names of two GPUs."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", printed)  # headings are underlined
    rows = [line.split() for line in plain.splitlines()]
    table = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    pairs = combinations(range(len(table)), 2)
    return {(table[i][0], table[j][0]): table[i][j + 1] for i, j in pairs}


def _links(printed: str) -> Iterator[Finding]:
    pairs = _matrix(printed)
    slow = [pair for pair, way in pairs.items() if not way.startswith("NV")]
    if not pairs:
        return
    if not slow:
        yield Finding(topic="NVLink", state="ok", said=f"between all {len(pairs)} pairs of GPUs")
        return
    first = slow[0]
    yield Finding(
        topic="NVLink",
        state="note",
        said=f"not between {len(slow)} of {len(pairs)} pairs, such as {'-'.join(first)} "
        f"({pairs[first]}): broadcasts go over PCIe or the host",
        way_out="keep a tensor parallel group on GPUs with NVLink (CUDA_VISIBLE_DEVICES), if any",
    )


def _peers(printed: str) -> Iterator[Finding]:
    pairs = _matrix(printed)
    apart = [pair for pair, state in pairs.items() if state != "OK"]
    if apart:
        yield Finding(
            topic="peer access",
            state="note",
            said=f"{len(apart)} of {len(pairs)} pairs of GPUs have none, such as "
            f"{'-'.join(apart[0])} ({pairs[apart[0]]}): NCCL goes through host memory",
            way_out="turn PCIe ACS off in the BIOS or hypervisor; give containers --ipc=host",
        )


def _nccl(installed: Mapping[str, str], *, kvpp: bool) -> Iterator[Finding]:
    for name, version in installed.items():
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if numbers >= LEAST_NCCL:
            yield Finding(topic="NCCL", state="ok", said=f"{version} ({name})")
        else:
            yield Finding(
                topic="NCCL",
                state="fail" if kvpp else "note",
                said=f"{version} ({name}) starts kernels of several streams in no fixed order",
                way_out=f"install {name} {'.'.join(map(str, LEAST_NCCL))} or newer",
            )
    if len(installed) > 1:
        yield Finding(
            topic="NCCL",
            state="note",
            said=f"{' and '.join(installed)} are both installed",
            way_out="uninstall the one that is not for torch's CUDA",
        )


def _mooncake_build(nccl: Mapping[str, str], mooncake: Mapping[str, str]) -> Iterator[Finding]:
    majors = {_NCCL_DISTRIBUTIONS[name] for name in nccl}
    wrong = [name for name in mooncake if _MOONCAKE_CUDA[name] not in majors]
    if wrong and len(majors) == 1:
        major = majors.pop()
        right = next(name for name, cuda in _MOONCAKE_CUDA.items() if cuda == major)
        yield Finding(
            topic="mooncake's CUDA",
            state="note",
            said=f"{wrong[0]} is built for CUDA {_MOONCAKE_CUDA[wrong[0]]}, torch for {major}",
            way_out=f"pip uninstall {wrong[0]}; pip install {right}",
        )


def _environment() -> Iterator[Finding]:
    problems = [*environment_problems(os.environ)]
    for problem in problems:
        yield Finding(topic="environment", state="fail", said=problem)
    if not problems:
        said = "nothing keeps the model's collectives from NCCL, or its launches from their order"
        yield Finding(topic="environment", state="ok", said=said)


def rdma(
    folder: Path = _INFINIBAND, peer_memory: Path = _PEER_MEMORY, *, gpus: bool
) -> Iterator[Finding]:
    """RDMA devices with a port that is up, and whether they reach the GPUs' memory.

    Args:
        gpus: whether the caches are in GPU memory.
    """
    up: list[str] = []
    down: list[str] = []
    for device in sorted(folder.glob("*")):
        states = [_read(path) for path in sorted(device.glob("ports/*/state"))]
        (up if any("ACTIVE" in state for state in states) else down).append(device.name)
    if not up:
        yield Finding(
            topic="RDMA",
            state="fail",
            said=f"no port is up (down: {', '.join(down)})" if down else "there is no device",
            way_out='bring a port up (ibstat), or set "protocol": "tcp" on all nodes',
        )
        return
    said = f"up: {', '.join(up)}" + (f"; down: {', '.join(down)}" if down else "")
    yield Finding(topic="RDMA", state="ok", said=said)
    if gpus and not peer_memory.exists():
        yield Finding(
            topic="GPUDirect",
            state="note",
            said="nvidia_peermem is not loaded; without DMA-BUF in driver and kernel Mooncake "
            "cannot register GPU memory",
            way_out="as root: modprobe nvidia-peermem",
        )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
