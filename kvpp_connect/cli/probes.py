"""What `kvpp doctor` finds out about a machine. Each probe returns findings and raises nothing."""

import ctypes
import errno
import importlib.metadata
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvpp_connect import __version__
from kvpp_connect.errors import KvppError
from kvpp_connect.planning.units import format_bytes
from kvpp_connect.seam import checks, ledger
from kvpp_connect.seam.variants import variant

State = Literal["ok", "note", "fail"]

# Shared libraries that Mooncake loads from the system, and the Debian packages that hold them.
SYSTEM_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
_OTHER_LIBRARIES = {
    "librdmacm.so.1": "librdmacm1",
    "libmlx5.so.1": "ibverbs-providers",
    "libcudart.so.12": "mooncake-transfer-engine-cuda13 beside a torch for CUDA 13, the CUDA 12 "
    "runtime, or mooncake-transfer-engine-non-cuda on a CPU machine",
    "libcudart.so": "the CUDA runtime, or mooncake-transfer-engine-non-cuda on a CPU machine",
    "libcuda.so.1": "the NVIDIA driver, or mooncake-transfer-engine-non-cuda on a CPU machine",
    "libascendcl.so": "CANN, or mooncake-transfer-engine-non-cuda on a CPU machine",
}
_MOONCAKE_DISTRIBUTIONS = (
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-npu",
)
_MISSING_LIBRARY = re.compile(r"(?P<library>lib[\w.+-]+\.so[\d.]*): cannot open shared object")
_ENGINE_START_S = 60
_CONNECT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at: ``note`` is worth knowing, ``fail`` would stop a server."""

    topic: str
    state: State
    said: str
    way_out: str = ""


def versions(supported: tuple[str, ...] = ledger.SUPPORTED_VLLM) -> Iterator[Finding]:
    """Python, kvpp-connect, vLLM and whether it is one that the seam knows.

    Args:
        supported: bounds of vLLM's version, such as ``>= 0.32``.
    """
    python = ".".join(str(part) for part in sys.version_info[:3])
    yield Finding(topic="kvpp-connect", state="ok", said=f"{__version__}, Python {python}")
    found = ledger.vllm_version()
    wanted = " and ".join(supported)
    if found == "unknown":
        yield Finding(
            topic="vLLM",
            state="fail",
            said="not installed",
            way_out=f"install vLLM {wanted}: pip install 'kvpp-connect[cpu]' or [cuda]",
        )
    elif not is_supported(found, supported):
        yield Finding(
            topic="vLLM",
            state="fail",
            said=f"{found} is not supported",
            way_out=f"install vLLM {wanted}",
        )
    else:
        yield Finding(topic="vLLM", state="ok", said=f"{found}, supported: {wanted}")


def is_supported(version: str, supported: tuple[str, ...] = ledger.SUPPORTED_VLLM) -> bool:
    """Whether a vLLM release lies in a range, by its first two numbers."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return False
    numbers = (int(match[1]), int(match[2]))
    checks = {">=": numbers.__ge__, "<": numbers.__lt__}
    for bound in supported:
        sign, limit = bound.split()
        major, minor = limit.split(".")
        if checks[sign]((int(major), int(minor))) is not True:
            return False
    return True


def touchpoints(device_type: str) -> Iterator[Finding]:
    """Whether the installed vLLM looks as the seam expects; imports it."""
    checks.quiet_vllm()
    host = variant(device_type)
    try:
        host.verify()
    except KvppError as error:
        yield Finding(
            topic="vLLM seam",
            state="fail",
            said=str(error),
            way_out="install a supported vLLM, or turn enable_kvpp off",
        )
    except (ImportError, OSError, RuntimeError) as error:
        yield Finding(
            topic="vLLM seam",
            state="fail",
            said=f"vLLM does not load ({error})",
            way_out="mend the installation until `python -c 'import vllm'` works",
        )
    else:
        said = f"all {len(host.touchpoints)} symbols look as expected"
        yield Finding(topic="vLLM seam", state="ok", said=said)


def mooncake(host: str, protocol: str, *, needed: bool) -> Iterator[Finding]:
    """Mooncake's package, its system libraries, and whether an engine starts at the host.

    Args:
        needed: whether the deployment names a connector that transfers with it.
    """
    worst: State = "fail" if needed else "note"
    name = next((n for n in _MOONCAKE_DISTRIBUTIONS if _version_of(n)), None)
    if name is None:
        yield Finding(
            topic="mooncake",
            state=worst,
            said="not installed; connectors need it",
            way_out="pip install mooncake-transfer-engine-non-cuda on CPU machines, "
            "mooncake-transfer-engine-cuda13 with CUDA 13, mooncake-transfer-engine with CUDA 12, "
            "mooncake-transfer-engine-npu on Ascend",
        )
        return
    missing = [lib for lib in SYSTEM_LIBRARIES if not _loads(lib)]
    if missing:
        packages = " ".join(SYSTEM_LIBRARIES[lib] for lib in missing)
        yield Finding(
            topic="mooncake",
            state=worst,
            said=f"{name} {_version_of(name)} needs {', '.join(missing)}",
            way_out=f"as root: apt-get install {packages}",
        )
        return
    problem = _engine_problem(host, protocol)
    if problem is None:
        said = f"{name} {_version_of(name)}, an engine starts on {host} with {protocol}"
        yield Finding(topic="mooncake", state="ok", said=said)
    else:
        yield Finding(topic="mooncake", state=worst, said=problem, way_out=_library_hint(problem))


def own_address(host: str) -> Finding:
    """Whether the host is this machine; Mooncake itself does not notice."""
    error = _bind_error(host, 0)
    if error is None:
        return Finding(topic="host", state="ok", said=f"{host} is an address of this machine")
    return Finding(
        topic="host",
        state="fail",
        said=f"{host} is no address of this machine ({error.strerror or error})",
        way_out="set kv_connector_extra_config.host, or VLLM_HOST_IP",
    )


def port(topic: str, host: str, number: int) -> Finding:
    """Whether a server could listen there."""
    if not 0 < number < 65536:
        said = f"{number} is no port"
        return Finding(topic=topic, state="fail", said=said, way_out="choose 1 to 65535")
    error = _bind_error(host, number)
    if error is None:
        return Finding(topic=topic, state="ok", said=f"{host}:{number} is free")
    ways_out = {
        errno.EADDRINUSE: "end the program that listens there, or choose another port",
        errno.EADDRNOTAVAIL: f"{host} is no address of this machine: set host, or VLLM_HOST_IP",
        errno.EACCES: "choose a port above 1023",
    }
    return Finding(
        topic=topic,
        state="fail",
        said=f"{host}:{number} cannot be used ({error.strerror or error})",
        way_out=ways_out.get(error.errno or 0, "check the host's name and the port"),
    )


def _bind_error(host: str, number: int) -> OSError | None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error
    return None


def reachable(topic: str, host: str, number: int, way_out: str) -> Finding:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((host, number), timeout=_CONNECT_S):
            pass
    except (OSError, OverflowError) as error:
        said = f"{host}:{number} does not answer ({error})"
        return Finding(topic=topic, state="fail", said=said, way_out=way_out)
    return Finding(topic=topic, state="ok", said=f"{host}:{number} accepts connections")


def producer(host: str, number: int, secret_file: str) -> Finding:
    """Ask a prefill node's control port for its manifest, as a decode node does."""
    from kvpp_connect.connectors.mooncake_v2 import wire
    from kvpp_connect.connectors.mooncake_v2.control import ControlClient
    from kvpp_connect.connectors.mooncake_v2.secret import load_keys

    topic = "producer"
    way_out = (
        "start the prefill node first; its log names the control port, which firewalls must let "
        "through (kv_connector_extra_config.control_port fixes it)"
    )
    found = reachable(topic, host, number, way_out)
    if found.state == "fail":
        return found
    try:
        with ControlClient(host, number, _CONNECT_S, load_keys(secret_file)) as client:
            answer = client.ask(wire.GetManifest())
    except KvppError as error:
        return Finding(topic=topic, state="fail", said=str(error), way_out=way_out)
    if not isinstance(answer, wire.ManifestAnswer):
        said = f"{host}:{number} answered with {type(answer).__name__} instead of a manifest"
        return Finding(topic=topic, state="fail", said=said, way_out="upgrade both nodes alike")
    manifest = answer.manifest
    said = (
        f"{host}:{number} is engine {manifest.engine_id}: {len(manifest.ranks)} ranks, "
        f"{manifest.num_blocks} blocks of {manifest.block_tokens} tokens"
    )
    return Finding(topic=topic, state="ok", said=said)


def locked_memory(protocol: str) -> Finding:
    """How much memory may be locked, which registration for RDMA needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    topic = "locked memory"
    if soft == resource.RLIM_INFINITY:
        return Finding(topic=topic, state="ok", said="unlimited")
    said = f"limited to {format_bytes(soft)} (ulimit -l)"
    if protocol != "rdma":
        return Finding(topic=topic, state="ok", said=f"{said}; {protocol} locks none")
    return Finding(
        topic=topic,
        state="fail",
        said=f"{said}; RDMA locks the whole KV cache",
        way_out="ulimit -l unlimited (containers: --ulimit memlock=-1)",
    )


def _engine_problem(host: str, protocol: str) -> str | None:
    """Start an engine as a worker does, in a process of its own: its libraries may end it."""
    code = (
        "import sys\n"
        "from kvpp_connect.connectors.mooncake_engine import MooncakeEngine\n"
        "from kvpp_connect.errors import KvppError\n"
        "try: MooncakeEngine(sys.argv[1], sys.argv[2])\n"
        "except KvppError as error: sys.exit(f'KVPP {error}')\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, host, protocol],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ENGINE_START_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"mooncake does not start on {host} within {_ENGINE_START_S} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or ["no message"]
    ours = [line.removeprefix("KVPP ") for line in lines if line.startswith("KVPP ")]
    return ours[0] if ours else f"mooncake ends with code {done.returncode}: {lines[-1]}"


def _library_hint(problem: str) -> str:
    match = _MISSING_LIBRARY.search(problem)
    if match is None:
        return ""
    known = {**SYSTEM_LIBRARIES, **_OTHER_LIBRARIES}
    for library, package in known.items():
        if match["library"].startswith(library):
            return f"install {package} (Debian names)"
    return f"install the package that holds {match['library']} (Debian: apt-file search)"


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
