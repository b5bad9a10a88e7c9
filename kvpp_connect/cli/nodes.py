"""What a node of a described deployment is started with: pure, from options to vLLM's JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvpp_connect.cli.transfers import check_connectors
from kvpp_connect.config import parse_additional_config
from kvpp_connect.errors import ConfigError
from kvpp_connect.seam.multi import CONNECTOR_MODULE, MULTI
from kvpp_connect.seam.settings import group_problem


class Kind(StrEnum):
    """What a node does."""

    PREFILL = "prefill"
    DECODE = "decode"
    POOL = "pool"
    MULTI = "multi"


class Side(StrEnum):
    """A node's part in P/D disaggregation."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


_ROLES = {Side.PREFILL: "kv_producer", Side.DECODE: "kv_consumer", Side.BOTH: "kv_both"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node as its operator describes it; empty and ``None`` stand for defaults.

    Attributes:
        side: part in P/D of a ``multi`` node; the other kinds have one already.
        kvpp: ``None``: on where there are ranks to share layers, but not on a decode node.
        store_decoded: a decode node puts blocks into the pool.
    """

    kind: Kind
    side: Side | None = None
    tp: int = 1
    pp: int = 1
    kvpp: bool | None = None
    mode: str = ""
    host: str = ""
    protocol: str = ""
    control_port: int | None = None
    secret_file: str = ""
    backend: str = "mooncake"
    master_address: str = ""
    segment_size: str = ""
    namespace: str = ""
    store_decoded: bool = False

    @property
    def part(self) -> Side:
        """The node's part in P/D; a node with a pool alone gives and takes."""
        own = {Kind.PREFILL: Side.PREFILL, Kind.DECODE: Side.DECODE, Kind.POOL: Side.BOTH}
        return own.get(self.kind) or self.side or Side.PREFILL

    @property
    def runs_kvpp(self) -> bool:
        """Whether KVPP is on."""
        return self.tp > 1 and self.part is not Side.DECODE if self.kvpp is None else self.kvpp


def additional_config(node: Node) -> dict[str, Any]:
    """vLLM's ``--additional-config``; empty where none is needed."""
    if not node.runs_kvpp:
        return {}
    return {"enable_kvpp": True, **({"kvpp": {"mode": node.mode}} if node.mode else {})}


def transfer_config(node: Node) -> dict[str, Any]:
    """vLLM's ``--kv-transfer-config``."""
    if node.kind is Kind.POOL:
        return _pool(node)
    if node.kind is not Kind.MULTI:
        return _p2p(node) | _recompute(node.part is Side.DECODE)
    return {
        "kv_connector": MULTI,
        # Both sides load: from the other node or from the pool.
        "kv_role": "kv_consumer" if node.part is Side.DECODE else "kv_both",
        **_recompute(True),
        "kv_connector_extra_config": {"connectors": [_p2p(node), _pool(node)]},
    }


def check_node(node: Node) -> None:
    """Check a node by the parsers of its server.

    Raises:
        ConfigError: an option that does not go with the others, or whatever the server would say.
    """
    _refuse_strangers(node)
    if node.runs_kvpp and (problem := group_problem(node.tp)):
        raise ConfigError(f"enable_kvpp: {problem}")
    if node.mode and not node.runs_kvpp:
        raise ConfigError(f"--mode {node.mode} has no meaning without KVPP; add --kvpp")
    parse_additional_config(additional_config(node))
    check_connectors(transfer_config(node))


def _refuse_strangers(node: Node) -> None:
    """Options without meaning for this kind of node."""
    of_pool = {
        "--master-address": node.master_address,
        "--segment-size": node.segment_size,
        "--namespace": node.namespace,
        "--store-decoded": node.store_decoded,
    }
    of_p2p = {"--secret-file": node.secret_file, "--control-port": node.control_port is not None}
    strange: Mapping[str, object] = {
        "--side": node.side is not None and node.kind is not Kind.MULTI,
        **(of_p2p if node.kind is Kind.POOL else {}),
        **(of_pool if node.kind in (Kind.PREFILL, Kind.DECODE) else {}),
    }
    for option, given in strange.items():
        if given:
            raise ConfigError(f"{option} has no meaning for a {node.kind} node; leave it out")
    if node.store_decoded and node.part is not Side.DECODE:
        raise ConfigError(
            "--store-decoded concerns decode nodes, the others always store; leave it out"
        )


def _p2p(node: Node) -> dict[str, Any]:
    extra = {
        "host": node.host,
        "protocol": node.protocol,
        "control_port": node.control_port,
        "control_secret_file": node.secret_file,
    }
    return _connector("MooncakeConnectorV2", _ROLES[node.part], extra)


def _pool(node: Node) -> dict[str, Any]:
    is_mooncake = node.backend == "mooncake"
    extra = {
        "backend": node.backend,
        "host": node.host,
        "protocol": node.protocol if is_mooncake else "",
        "master_server_address": node.master_address,
        "global_segment_size": node.segment_size,
        "namespace": node.namespace,
        "consumer_is_to_put": node.store_decoded or None,
    }
    role = "kv_consumer" if node.part is Side.DECODE else "kv_both"
    return _connector("AscendStoreConnector", role, extra)


def _connector(name: str, role: str, extra: Mapping[str, object]) -> dict[str, Any]:
    given = {key: value for key, value in extra.items() if value not in ("", None)}
    return {
        "kv_connector": name,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": role,
        **({"kv_connector_extra_config": given} if given else {}),
    }


def _recompute(loads: bool) -> dict[str, str]:
    return {"kv_load_failure_policy": "recompute"} if loads else {}
