"""The rows of the demo as data: what to start, where to send requests, where to look."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvpp_connect.demo.process import Launch
from kvpp_connect.demo.servers import RouterServer, VllmServer
from kvpp_connect.layout import FullScratch, ScratchSize, running_scratch

PORTS_NEEDED = 7
_PREFILL_RANKS = 2
_BLOCK_TOKENS = 16  # fixed by vLLM's CPU kernels


class Launchable(Protocol):
    """A description of a server."""

    @property
    def name(self) -> str:
        """Unique among the servers of the demo."""
        ...

    def launch(self) -> Launch:
        """The program to start."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """One row of the table."""

    name: str
    title: str
    servers: tuple[Launchable, ...]  # started in parallel
    router: Launchable | None = None  # started when the servers are ready
    entry: str  # name of the server or router that gets the requests
    capacity_of: str  # name of the server whose KV cache size counts
    kvpp_ranks: int | None = None
    scratch: ScratchSize = field(default_factory=FullScratch)  # of a server with KVPP
    puller: str | None = None  # name of the server whose pull counters count

    def scratch_share(self, cached_tokens: int) -> float:
        """Blocks of a scratch slot over all blocks, at a KV cache of so many tokens."""
        blocks = cached_tokens // _BLOCK_TOKENS
        return self.scratch.blocks(blocks) / blocks

    def ports(self) -> tuple[tuple[str, int], ...]:
        """Names of the servers and the ports that they bind."""
        router = (self.router,) if self.router else ()
        launches = [server.launch() for server in (*self.servers, *router)]
        return tuple((x.name, port) for x in launches for port in (x.port, *x.other_ports))


class RowPlanner(Protocol):
    """Makes the rows; the first is the one that the others are compared with."""

    def __call__(
        self, model: Path, ports: Sequence[int], *, kv_cache_bytes: int
    ) -> tuple[RowPlan, ...]:
        """See plan_rows()."""
        ...


def plan_rows(model: Path, ports: Sequence[int], *, kv_cache_bytes: int) -> tuple[RowPlan, ...]:
    """The four rows.

    Args:
        model: checkpoint directory.
        ports: PORTS_NEEDED of them, all different.
        kv_cache_bytes: per rank of every server.
    """
    plain_port, full_port, kvpp_port, prefill_port, decode_port, router_port, metrics_port = ports

    def server(
        name: str, port: int, ranks: int, *, role: str = "", kvpp: Mapping[str, object] | None
    ) -> VllmServer:
        return VllmServer(
            name=name,
            model=model,
            port=port,
            tensor_parallel_size=ranks,
            kv_cache_bytes=kv_cache_bytes,
            additional_config=None if kvpp is None else {"enable_kvpp": True, **kvpp},
            kv_transfer_config=_kv_transfer_config(role) if role else None,
        )

    plain = server("plain", plain_port, _PREFILL_RANKS, kvpp=None)
    full = server("full", full_port, _PREFILL_RANKS, kvpp={"kvpp": {"mode": "full"}})
    kvpp = server("kvpp", kvpp_port, _PREFILL_RANKS, kvpp={})
    prefill = server("prefill", prefill_port, _PREFILL_RANKS, role="kv_producer", kvpp={})
    decode = server("decode", decode_port, 1, role="kv_consumer", kvpp=None)
    router = RouterServer(
        name="router",
        port=router_port,
        metrics_port=metrics_port,
        prefill_urls=(prefill.url,),
        decode_urls=(decode.url,),
    )
    return (
        RowPlan(
            name="plain",
            title="plain vLLM, TP=2",
            servers=(plain,),
            entry=plain.name,
            capacity_of=plain.name,
        ),
        RowPlan(
            name="full",
            title="KVPP in full mode, TP=2",
            servers=(full,),
            entry=full.name,
            capacity_of=full.name,
            kvpp_ranks=_PREFILL_RANKS,
        ),
        RowPlan(
            name="kvpp",
            title="KVPP (compact), TP=2",
            servers=(kvpp,),
            entry=kvpp.name,
            capacity_of=kvpp.name,
            kvpp_ranks=_PREFILL_RANKS,
            scratch=_default_scratch(kvpp),
        ),
        RowPlan(
            name="pd",
            title="P/D: P with KVPP (compact), TP=2; D TP=1",
            servers=(prefill, decode),
            router=router,
            entry=router.name,
            capacity_of=prefill.name,
            kvpp_ranks=_PREFILL_RANKS,
            scratch=_default_scratch(prefill),
            puller=decode.name,
        ),
    )


def _default_scratch(server: VllmServer) -> ScratchSize:
    return running_scratch(
        block_tokens=_BLOCK_TOKENS,
        max_model_tokens=server.max_model_tokens,
        max_requests=server.max_requests,
        running_tokens=None,
    )


def _kv_transfer_config(role: str) -> dict[str, str]:
    return {
        "kv_connector": "MooncakeConnectorV2",
        "kv_role": role,
        "kv_connector_module_path": "kvpp_connect.connectors",
    }
