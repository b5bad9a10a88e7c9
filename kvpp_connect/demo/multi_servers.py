"""The servers of `kvpp demo multi` as data: two prefill nodes, a decode node, and their router."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpp_connect.demo.pool_servers import PoolServers
from kvpp_connect.demo.servers import RouterServer, VllmServer

GROUP_PORTS_NEEDED = 6
_RANKS = 2
_MODULE = "kvpp_connect.connectors"
# The router asks a dead prefill node, which refuses, no more after about a second.
_PROMPT = (
    *("--health-check-interval-secs", "1", "--health-failure-threshold", "1"),
    *("--health-check-timeout-secs", "10"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiServers:
    """All that runs beside the pool."""

    plain: VllmServer
    first: VllmServer
    second: VllmServer
    decode: VllmServer
    router: RouterServer

    @property
    def engines(self) -> tuple[VllmServer, ...]:
        """The servers behind the router."""
        return (self.first, self.second, self.decode)


def plan_servers(
    model: Path, ports: Sequence[int], pool: PoolServers, *, kv_cache_bytes: int
) -> MultiServers:
    """Describe the servers.

    Args:
        model: checkpoint directory.
        ports: GROUP_PORTS_NEEDED of them, all different.
        kv_cache_bytes: per rank of every server.
    """
    plain, first, second, decode, router, metrics = ports

    def server(name: str, port: int, ranks: int, kv: dict[str, Any] | None) -> VllmServer:
        return VllmServer(
            name=name,
            model=model,
            port=port,
            tensor_parallel_size=ranks,
            kv_cache_bytes=kv_cache_bytes,
            additional_config={"enable_kvpp": True} if ranks > 1 else None,
            kv_transfer_config=kv,
        )

    pooled = pool.kv_transfer_config()
    give, take = _p2p("kv_producer"), _p2p("kv_consumer")
    # Either order of the children is right.
    nodes = {
        "p1": server("p1", first, _RANKS, _multi("kv_both", give, pooled)),
        "p2": server("p2", second, _RANKS, _multi("kv_both", pooled, give)),
        "d": server("d", decode, 1, _multi("kv_both", take, pooled)),
    }
    return MultiServers(
        plain=server("plain", plain, 1, None),
        first=nodes["p1"],
        second=nodes["p2"],
        decode=nodes["d"],
        router=RouterServer(
            name="router",
            port=router,
            metrics_port=metrics,
            prefill_urls=(nodes["p1"].url, nodes["p2"].url),
            decode_urls=(nodes["d"].url,),
            extra_args=_PROMPT,
        ),
    )


def _p2p(role: str) -> dict[str, Any]:
    return {
        "kv_connector": "MooncakeConnectorV2",
        "kv_connector_module_path": _MODULE,
        "kv_role": role,
    }


def _multi(role: str, *children: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
    }
