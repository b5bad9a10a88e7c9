"""A KV pool on Mooncake's own programs: its master, and a node that lends memory.

The memory is a process of its own, so the pool outlives the engines that use it.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpp_connect.connectors.mooncake_engine import install_hint
from kvpp_connect.demo.client import sum_samples
from kvpp_connect.demo.local_http import get_text
from kvpp_connect.demo.ports import LOOPBACK
from kvpp_connect.demo.process import Launch
from kvpp_connect.errors import ConfigError

POOL_PORTS_NEEDED = 4
_METRICS_TIMEOUT_S = 10.0
_CLIENT_LIVES_S = 60  # without a sign of life: busy machines pause


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """What the master says that the pool holds."""

    objects: int
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolServers:
    """Describes a mooncake_master and one memory node.

    Attributes:
        ports: ``POOL_PORTS_NEEDED`` of them, all different.
        segment_bytes: memory of the node; used as objects come.
    """

    ports: tuple[int, ...]
    segment_bytes: int = 512 << 20

    @property
    def address(self) -> str:
        """``host:port`` of the master, as engines need it."""
        return f"{LOOPBACK}:{self.ports[0]}"

    def master(self) -> Launch:
        """The program that knows where each object lies."""
        flags = {
            "rpc_address": LOOPBACK,
            "rpc_port": self.ports[0],
            "rpc_thread_num": 2,
            "metrics_host": LOOPBACK,
            "metrics_port": self.ports[1],
            "client_ttl": _CLIENT_LIVES_S,
        }
        return _launch("pool-master", "mooncake_master", flags, self.ports[1], self.ports[0])

    def node(self) -> Launch:
        """The program that lends memory to the pool; needs the master."""
        flags = {
            "host": LOOPBACK,
            "port": self.ports[2],
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": self.address,
            "protocol": "tcp",
            "global_segment_size": str(self.segment_bytes),
            "local_buffer_size": str(16 << 20),
            "enable_http_server": "true",
            "http_port": self.ports[3],
        }
        return _launch("pool-node", "mooncake_client", flags, self.ports[3], self.ports[2])

    def figures(self) -> PoolFigures:
        """What is in the pool now.

        Raises:
            PeerError: the master does not answer.
        """
        url = f"http://{LOOPBACK}:{self.ports[1]}/metrics"
        text = get_text(url, timeout_s=_METRICS_TIMEOUT_S)
        return PoolFigures(
            objects=int(sum_samples(text, "master_key_count") or 0),
            stored_bytes=int(sum_samples(text, "master_allocated_bytes") or 0),
        )

    def kv_transfer_config(self) -> dict[str, Any]:
        """Settings of an engine that stores into the pool and loads from it, lending nothing."""
        return {
            "kv_connector": "AscendStoreConnector",
            "kv_connector_module_path": "kvpp_connect.connectors",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "backend": "mooncake",
                "master_server_address": self.address,
                "global_segment_size": 0,
                "protocol": "tcp",
                # A machine that pauses must not turn a hit into a recompute.
                "lookup_timeout_s": 20,
                "load_timeout_s": 60,
            },
        }


def _launch(
    name: str, program: str, flags: Mapping[str, object], health_port: int, rpc_port: int
) -> Launch:
    return Launch(
        name=name,
        argv=(_program(program), *(f"--{key}={value}" for key, value in flags.items())),
        port=health_port,
        other_ports=(rpc_port,),
        env={"MC_FORCE_TCP": "1", "MC_TCP_BIND_ADDRESS": LOOPBACK},
    )


def _program(name: str) -> str:
    """Path of a program of mooncake's package."""
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder, name)).exists():
            return str(path)
    raise ConfigError(f"cannot find Mooncake's {name}. {install_hint()}")
