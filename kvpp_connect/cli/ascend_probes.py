"""What `kvpp doctor` finds out about Ascend NPUs and vllm-ascend. Each probe raises nothing."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvpp_connect.cli.machine import Run, run_command, versions_of
from kvpp_connect.cli.probes import Finding
from kvpp_connect.seam import ascend
from kvpp_connect.seam.ascend_ledger import SUPPORTED_ASCEND

# vLLM's of the vllm-ascend releases that were looked at; whose KVPP it is decides about more.
SUPPORTED_VLLM = (">= 0.23",)
_HCCN = Path("/etc/hccn.conf")
_CANN = Path("/usr/local/Ascend/ascend-toolkit/latest")
_PACKAGES = ("vllm-ascend", "torch-npu", "torch")
_MOONCAKE = "mooncake-transfer-engine-npu"
_OTHER_MOONCAKES = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
# A row of `npu-smi info` with an NPU's number, name and health; rows of chips have no name.
_NPU = re.compile(r"^\|\s*(\d+)\s+([\w-]*[A-Za-z][\w-]*)\s*\|\s*(\w+)", re.MULTILINE)
_READ_BY_US = ("ASCEND_TRANSFER_TIMEOUT", "HCCL_RDMA_TIMEOUT", "HCCL_RDMA_RETRY_CNT")
_NUMBERS = (
    *_READ_BY_US,
    "ASCEND_CONNECT_TIMEOUT",
    "ASCEND_BASE_PORT",
    "HCCL_BUFFSIZE",
    "HCCL_CONNECT_TIMEOUT",
    "HCCL_EXEC_TIMEOUT",
)


def versions() -> dict[str, str]:
    """Versions of the packages of an Ascend machine that are installed."""
    return versions_of((*_PACKAGES, _MOONCAKE, *_OTHER_MOONCAKES))


def is_ascend(installed: Mapping[str, str]) -> bool:
    """Whether this is meant to be a machine with NPUs."""
    return "vllm-ascend" in installed or "torch-npu" in installed


def probe(
    installed: Mapping[str, str],
    ranks: int,
    *,
    transfers: bool,
    run: Run = run_command,
    environment: Mapping[str, str] | None = None,
    hccn: Path = _HCCN,
) -> Iterator[Finding]:
    """vllm-ascend and its situation, torch-npu and CANN, NPUs, HCCN, environment, Mooncake.

    Args:
        installed: what ``versions`` found.
        ranks: of the tensor parallel group.
        transfers: whether the deployment names a connector that transfers with Mooncake.
        run: prints what a command prints.
        environment: the server's; default: this process's.
        hccn: the network configuration of the NPUs.
    """
    environment = os.environ if environment is None else environment
    yield _host(installed)
    yield from _torch(installed)
    yield _cann(environment)
    yield _npus(run("npu-smi info"), ranks)
    yield _hccn(hccn, needed=transfers)
    yield from _environment(environment)
    yield _mooncake(installed, needed=transfers)


def _host(installed: Mapping[str, str]) -> Finding:
    """Whose KVPP serves the layers there."""
    topic, version = "vllm-ascend", installed.get("vllm-ascend")
    if version is None:
        return Finding(
            topic=topic,
            state="fail",
            said="not installed, and torch-npu is",
            way_out="pip install 'kvpp-connect[ascend]'",
        )
    if ascend.has_own_kvpp():
        said = f"{version} has a KVPP of its own, which serves the layers"
        return Finding(topic=topic, state="ok", said=said)
    said = f"{version} has no KVPP of its own: kvpp-connect serves the layers"
    if f"vllm-ascend {version} " in f"{SUPPORTED_ASCEND} ":
        return Finding(topic=topic, state="ok", said=said)
    return Finding(
        topic=topic,
        state="note",
        said=f"{said}; known is {SUPPORTED_ASCEND}",
        way_out="start-up compares what is leaned on and refuses by name; see docs/ascend.md",
    )


def _torch(installed: Mapping[str, str]) -> Iterator[Finding]:
    torch, npu = installed.get("torch"), installed.get("torch-npu")
    if npu is None:
        yield Finding(
            topic="torch-npu",
            state="fail",
            said="not installed",
            way_out="install the torch-npu that this vllm-ascend release names",
        )
    elif torch is None or _release(torch) != _release(npu):
        yield Finding(
            topic="torch-npu",
            state="fail",
            said=f"{npu} is for another torch than {torch}",
            way_out=f"install torch {_release(npu)}, or the torch-npu of torch {torch}",
        )
    else:
        yield Finding(topic="torch-npu", state="ok", said=f"{npu}, torch {torch}")


def _release(version: str) -> str:
    """The first three numbers of a version, which torch-npu shares with its torch."""
    return ".".join(re.findall(r"\d+", version)[:3])


def _cann(environment: Mapping[str, str]) -> Finding:
    home = environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME")
    folder = Path(home) if home else _CANN
    files = [*sorted(folder.glob("*/ascend_toolkit_install.info")), folder / "version.cfg"]
    number = next(filter(None, map(_version_in, files)), "")
    if not number:
        return Finding(
            topic="CANN",
            state="fail",
            said=f"not found in {folder}",
            way_out="install CANN, and source its set_env.sh before the server starts",
        )
    if not home:
        return Finding(
            topic="CANN",
            state="note",
            said=f"{number} in {folder}, and ASCEND_HOME_PATH is not set",
            way_out=f"source {folder.parent}/set_env.sh",
        )
    return Finding(topic="CANN", state="ok", said=f"{number} in {folder}")


def _version_in(path: Path) -> str:
    try:
        found = re.search(r"version=\[?[^\d\n]*([\d.]+\w*)", path.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def _npus(printed: str, ranks: int) -> Finding:
    found = _NPU.findall(printed)
    if not found:
        return Finding(
            topic="NPUs",
            state="fail",
            said="npu-smi info shows none",
            way_out="install the driver; in containers mount /dev/davinci* and npu-smi",
        )
    ill = [number for number, _, health in found if health not in ("OK", "Alarm")]
    said = f"{len(found)} x {found[0][1]}"
    if ill:
        return Finding(
            topic="NPUs",
            state="note",
            said=f"{said}, not healthy: {', '.join(ill)}",
            way_out="leave them out with ASCEND_RT_VISIBLE_DEVICES",
        )
    if len(found) < ranks:
        return Finding(
            topic="NPUs",
            state="fail",
            said=f"{said}, for {ranks} tensor parallel ranks",
            way_out=f"--tensor-parallel-size {len(found)}, or more NPUs",
        )
    return Finding(topic="NPUs", state="ok", said=said)


def _hccn(path: Path, *, needed: bool) -> Finding:
    try:
        addresses = re.findall(r"^address_\d+=\S+", path.read_text(), re.MULTILINE)
    except OSError:
        addresses = []
    if addresses:
        return Finding(topic="HCCN", state="ok", said=f"{len(addresses)} addresses in {path}")
    return Finding(
        topic="HCCN",
        state="fail" if needed else "note",
        said=f"no address in {path}; transfers between nodes need one for each NPU",
        way_out="hccn_tool -i N -ip -s address A netmask M; mount the file into containers",
    )


def _environment(environment: Mapping[str, str]) -> Iterator[Finding]:
    given = {name: environment[name] for name in _NUMBERS if environment.get(name)}
    wrong = [name for name, text in given.items() if not text.isdecimal()]
    for name in wrong:
        yield Finding(
            topic="environment",
            state="fail",
            said=f"{name} is {given[name]!r}, no whole number",
            way_out=f"unset {name}, or set a number; docs/ascend.md has units and defaults",
        )
    if environment.get("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("", "0"):
        yield Finding(
            topic="environment",
            state="note",
            said="VLLM_USE_V2_MODEL_RUNNER selects a model runner that KVPP refuses here",
            way_out="VLLM_USE_V2_MODEL_RUNNER=0",
        )
    if expansion := ascend.expansion_problem(environment):
        yield Finding(
            topic="environment",
            state="fail",
            said=f"with enable_kvpp {expansion}",
            way_out=f"unset {ascend.EXPANSION}",
        )
    elif not wrong:
        said = ", ".join(f"{name}={text}" for name, text in given.items())
        yield Finding(topic="environment", state="ok", said=said or "defaults of HCCL and ASCEND_*")


def _mooncake(installed: Mapping[str, str], *, needed: bool) -> Finding:
    topic = "mooncake for NPUs"
    others = [name for name in _OTHER_MOONCAKES if name in installed]
    if _MOONCAKE in installed and not others:
        return Finding(topic=topic, state="ok", said=f"{_MOONCAKE} {installed[_MOONCAKE]}")
    if _MOONCAKE in installed:
        said = f"{', '.join(others)} writes into the same folder as {_MOONCAKE}"
        way_out = f"pip uninstall {' '.join(others)}; reinstall {_MOONCAKE}"
    else:
        said = f"{_MOONCAKE} is not installed; connectors need it for the Ascend transport"
        way_out = f"pip install {_MOONCAKE}"
    return Finding(topic=topic, state="fail" if needed else "note", said=said, way_out=way_out)
