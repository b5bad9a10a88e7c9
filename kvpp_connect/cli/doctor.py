"""`kvpp doctor`: what would stop a server on this machine, each problem with the way out."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpp_connect.cli.output import AsJson, make_console, print_json
from kvpp_connect.cli.transfers import check_connectors, connectors_of, extra_of
from kvpp_connect.errors import ConfigError, KvppError

if TYPE_CHECKING:
    from kvpp_connect.cli.probes import Finding

_DEFAULT_HOST = "127.0.0.1"


def doctor(
    path: Annotated[
        Path | None, typer.Argument(help="Checkpoint; lets vLLM judge the whole deployment.")
    ] = None,
    serve_arguments: Annotated[
        list[str] | None, typer.Argument(help="After --: further arguments of `vllm serve`.")
    ] = None,
    *,
    tp: Annotated[int, typer.Option(help="Tensor parallel size.")] = 1,
    kv_transfer_config: Annotated[str, typer.Option(help="JSON, as for the server.")] = "",
    additional_config: Annotated[str, typer.Option(help="JSON, as for the server.")] = "",
    port: Annotated[
        list[int] | None, typer.Option(help="Port that must be free; may be repeated.")
    ] = None,
    master: Annotated[str, typer.Option(help="HOST:PORT of a mooncake_master.")] = "",
    producer: Annotated[
        str, typer.Option(help="HOST:PORT of a prefill node's control channel.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Say what would stop a server on this machine, each problem with the way out.

    Checks versions, libraries, ports, limits, and the configuration by the code
    with which the servers check it. Exit code 1 where anything would fail.

    \b
    Example: a prefill node
      $ kvpp doctor /models/DeepSeek-R1 --tp 8 \\
          --additional-config '{"enable_kvpp": true}' \\
          --kv-transfer-config '{"kv_connector": "MooncakeConnectorV2",
            "kv_connector_module_path": "kvpp_connect.connectors",
            "kv_connector_extra_config": {"control_port": 7000},
            "kv_role": "kv_producer"}' \\
          -- --max-model-len 32768
    Example: can this decode node reach the prefill node?
      $ kvpp doctor --producer 10.0.0.7:7000
    """
    from kvpp_connect.cli import ascend_probes, gpu_probes, probes
    from kvpp_connect.seam import ascend

    packages = ascend_probes.versions()
    has_npus = ascend_probes.is_ascend(packages)
    vllms = {"supported": ascend_probes.SUPPORTED_VLLM} if has_npus else {}
    findings: list[Finding] = [*probes.versions(**vllms)]
    transfer, found = _parse_json(kv_transfer_config, "--kv-transfer-config")
    findings += found
    additional, found = _parse_json(additional_config, "--additional-config")
    findings += found
    keys = [*_configuration(transfer, additional)]
    findings += keys
    connectors = [] if _has_failure(keys) else connectors_of(transfer)
    device_type = "npu" if has_npus else "cuda" if gpu_probes.is_cuda() else "cpu"
    if has_npus:
        findings += ascend_probes.probe(packages, tp, transfers=bool(transfer))
    elif device_type == "cuda":
        findings += gpu_probes.cuda(tp, kvpp=_wants_kvpp(additional))
    if _is_installed(findings):
        if not ascend.has_own_kvpp():
            findings += probes.touchpoints(device_type)
        if path is not None and not _has_failure(keys):
            arguments = [f"--tensor-parallel-size={tp}", *(serve_arguments or ())]
            findings += _deployment(path, arguments, additional, transfer)
    for host, protocol in dict.fromkeys(map(_endpoint, connectors)) or [_endpoint({})]:
        findings += probes.mooncake(host, protocol, needed=bool(transfer))
        findings.append(probes.locked_memory(protocol))
        if protocol == "rdma":
            findings += gpu_probes.rdma(gpus=gpu_probes.is_cuda())
    findings += _network(connectors, port or [], master, producer)
    failed = _has_failure(findings)
    if as_json:
        print_json("doctor", {"ok": not failed, "findings": [asdict(f) for f in findings]})
    else:
        _print(findings)
    if failed:
        raise typer.Exit(1)


def _wants_kvpp(additional: Mapping[str, Any]) -> bool:
    """Whether a server with this would run KVPP; it says itself what is wrong with it."""
    from kvpp_connect.config import parse_additional_config

    try:
        return parse_additional_config(additional).enabled
    except ConfigError:
        return False


def _is_installed(findings: "list[Finding]") -> bool:
    """Whether vLLM is there to be asked."""
    return not any(f.topic == "vLLM" and f.said == "not installed" for f in findings)


def _has_failure(findings: "Iterable[Finding]") -> bool:
    return any(finding.state == "fail" for finding in findings)


def _endpoint(connector: Mapping[str, Any]) -> tuple[str, str]:
    """Where this node's server would listen for its peers, and the protocol of transfers."""
    from kvpp_connect.cli import gpu_probes
    from kvpp_connect.platforms.base import PLATFORMS
    from kvpp_connect.seam import checks

    extra = extra_of(connector)
    host = str(extra.get("host") or "") or checks.host_address() or _DEFAULT_HOST
    default = PLATFORMS["cuda" if gpu_probes.is_cuda() else "cpu"].transfer_protocol
    return host, str(extra.get("protocol") or default)


def _parse_json(text: str, flag: str) -> "tuple[dict[str, Any], list[Finding]]":
    from kvpp_connect.cli.probes import Finding

    if not text:
        return {}, []
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = f"{flag} is no JSON ({error})"
    else:
        if isinstance(value, dict):
            return value, []
        problem = f"{flag} is no JSON object"
    way_out = 'quote it for the shell: \'{"key": "value"}\''
    return {}, [Finding(topic="configuration", state="fail", said=problem, way_out=way_out)]


def _configuration(
    transfer: Mapping[str, Any], additional: Mapping[str, Any]
) -> "Iterator[Finding]":
    """Our own keys, by the parsers of the servers."""
    from kvpp_connect.cli.probes import Finding
    from kvpp_connect.config import parse_additional_config

    checks: list[tuple[str, Callable[[], object]]] = []
    if additional:
        checks.append(("additional config", lambda: parse_additional_config(additional)))
    if transfer:
        checks.append(("connector config", lambda: check_connectors(transfer)))
    for topic, check in checks:
        try:
            check()
        except KvppError as error:
            yield Finding(topic=topic, state="fail", said=str(error))
        else:
            yield Finding(topic=topic, state="ok", said="all keys known, all values fit")


def _deployment(
    path: Path, arguments: list[str], additional: dict[str, Any], transfer: dict[str, Any]
) -> "Iterator[Finding]":
    """What vLLM and the seam say to the whole."""
    from kvpp_connect.cli.probes import Finding
    from kvpp_connect.planning.checkpoint import read_checkpoint
    from kvpp_connect.seam import checks

    try:
        file = read_checkpoint(path).path
        problems = checks.deployment_problems(file, arguments, additional, transfer)
    except ConfigError as error:
        problems = (str(error),)
    for problem in problems:
        yield Finding(topic="deployment", state="fail", said=problem)
    if not problems:
        yield Finding(topic="deployment", state="ok", said="vLLM and KVPP accept it")


def _network(
    connectors: list[Mapping[str, Any]], ports: list[int], master: str, producer: str
) -> "Iterator[Finding]":
    from kvpp_connect.cli import probes

    for host in dict.fromkeys(_endpoint(connector)[0] for connector in connectors):
        yield probes.own_address(host)
    for connector in connectors:
        extra = extra_of(connector)
        number = extra.get("control_port", 0)
        produces = connector.get("kv_role") in ("kv_producer", "kv_both")
        if produces and isinstance(number, int) and 0 < number < 65536:
            host = str(extra.get("bind_host") or _endpoint(connector)[0])
            yield probes.port("control port", host, number)
    for number in ports:
        yield probes.port("port", _endpoint(connectors[0] if connectors else {})[0], number)
    named = [
        str(extra_of(connector).get("master_server_address") or "") for connector in connectors
    ]
    direct = [text for text in named if "://" not in text]  # the others are found in a registry
    for text in dict.fromkeys(filter(None, (master, *direct))):
        yield _master(text)
    if producer:
        address = _address(producer)
        files = (str(extra_of(one).get("control_secret_file") or "") for one in connectors)
        secret_file = next(filter(None, files), "")
        yield (
            probes.producer(*address, secret_file) if address else _no_address("producer", producer)
        )


def _master(text: str) -> "Finding":
    from kvpp_connect.cli import probes

    address = _address(text)
    if address is None:
        return _no_address("master", text)
    way_out = "start mooncake_master there, and let its port through firewalls"
    return probes.reachable("master", *address, way_out)


def _address(text: str) -> tuple[str, int] | None:
    host, _, number = text.rpartition(":")
    if not host or not number.isdecimal() or not 0 < int(number) < 65536:
        return None
    return host.removeprefix("[").removesuffix("]"), int(number)


def _no_address(topic: str, text: str) -> "Finding":
    from kvpp_connect.cli.probes import Finding

    said = f"{text!r} is no address"
    return Finding(topic=topic, state="fail", said=said, way_out="write HOST:PORT")


def _print(findings: "list[Finding]") -> None:
    console = make_console()
    colours = {"ok": "green", "note": "yellow", "fail": "red"}
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        console.print(
            f"[{colours[finding.state]}]{finding.state:>4}[/]  {finding.topic:<{width}}  ", end=""
        )
        console.print(" ".join(finding.said.split()), markup=False)
        if finding.way_out:
            console.print(f"{'':>4}  {'':<{width}}  -> {finding.way_out}", markup=False)
    failed = sum(finding.state == "fail" for finding in findings)
    console.print(
        f"{failed} of {len(findings)} checks would fail" if failed else "nothing would fail"
    )
