"""Mooncake's transfer engine behind a small interface, and what its TCP transport needs.

Besides this file only the pool's Mooncake store imports mooncake.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

from kvpp_connect.errors import ConfigError, PeerError

PROTOCOLS = ("tcp", "rdma", "ascend")

_INSTALL_HINT = (
    "Install mooncake-transfer-engine-cuda13 or mooncake-transfer-engine, as the CUDA of torch "
    "(mooncake-transfer-engine-non-cuda on CPU machines), and the system library it names (Debian: "
    "libibverbs1)"
)
_ASCEND_INSTALL_HINT = (
    "Install mooncake-transfer-engine-npu, and none of its other builds beside it, and source "
    "CANN's set_env.sh"
)

_TCP_SETTINGS = {
    # Builds without CUDA ignore the protocol argument and pick RDMA where a device exists.
    "MC_FORCE_TCP": "1",
    "MC_TCP_ENABLE_CONNECTION_POOL": "true",
    # Mooncake reports a batch as failed with its first piece, and goes on with those that it has
    # queued: four at a time, each until its own time-out. So no more than four are queued for a
    # peer, and the others wait for admission, which ends. A read then writes for at most ten
    # seconds and two time-outs of five, less than failed_read_hold_s is by default. A read with
    # more pieces than may wait fails at once; Mooncake takes no higher limit than about this.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "4",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "32768",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "10000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
}

_ASCEND_REGIONS = 256  # that one process may register with HCCL


def install_hint(protocol: str = "") -> str:
    """What to do where mooncake cannot be loaded."""
    return _ASCEND_INSTALL_HINT if protocol == "ascend" else _INSTALL_HINT


def set_tcp_environment(host: str) -> None:
    """Make Mooncake use TCP well; to be called before mooncake is imported. User settings stay."""
    # The address to bind. Mooncake 0.3.13 listens on the other interfaces all the same.
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", host)
    for name, value in _TCP_SETTINGS.items():
        os.environ.setdefault(name, value)


class TransferEngine(Protocol):
    """One-sided reads between processes. Safe to use from several threads."""

    @property
    def session(self) -> str:
        """Name under which peers reach this engine: ``host:port``."""
        ...

    def register(self, address: int, length_bytes: int) -> None:
        """Let peers read, and this engine write, a range of local memory."""
        ...

    def read(
        self,
        session: str,
        local_addresses: Sequence[int],
        remote_addresses: Sequence[int],
        lengths_bytes: Sequence[int],
    ) -> None:
        """Copy remote ranges into local ones; returns when all bytes have arrived.

        Raises:
            PeerError: the read failed or timed out. It may still write its destination later.
        """
        ...


class MooncakeEngine:
    """``mooncake.engine.TransferEngine`` with return codes turned into errors."""

    def __init__(self, host: str, protocol: str, device_name: str = "") -> None:
        """Start an engine that peers reach at ``host``.

        Args:
            device_name: RDMA devices to use, separated by commas; empty: all.

        Raises:
            ConfigError: mooncake is not installed, or does not start.
        """
        if protocol == "tcp":
            set_tcp_environment(host)
        if protocol == "ascend":
            # Longer than the network tries, so that a transfer that is given up writes no more.
            timeout_ms = round(1000 * late_write_s(protocol)) + 3000
            os.environ.setdefault("ASCEND_TRANSFER_TIMEOUT", str(timeout_ms))
        try:
            from mooncake.engine import TransferEngine as Engine
        except ImportError as error:
            raise ConfigError(
                f"MooncakeConnectorV2: cannot load mooncake ({error}). {install_hint(protocol)}"
            ) from error
        self._engine: Any = Engine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, device_name)
        if code != 0:
            raise ConfigError(
                f"MooncakeConnectorV2: mooncake does not start on host {host!r} with protocol "
                f"{protocol!r} (code {code}); is {host!r} an address of this machine"
                + (f", and are there devices {device_name!r}?" if device_name else "?")
            )
        self._session = f"{host}:{self._engine.get_rpc_port()}"
        self._protocol = protocol
        self._device_name = device_name
        self._regions_left = _ASCEND_REGIONS if protocol == "ascend" else None

    @property
    def session(self) -> str:
        return self._session

    @property
    def protocol(self) -> str:
        """Transfer protocol that the engine was started with."""
        return self._protocol

    @property
    def device_name(self) -> str:
        """RDMA devices that the engine was started with; empty for all."""
        return self._device_name

    @property
    def native_handle(self) -> object:
        """What a Mooncake store in this process takes to share this engine's connections."""
        return self._engine.get_engine()

    def register(self, address: int, length_bytes: int) -> None:
        if self._regions_left is not None:
            if self._regions_left == 0:
                raise ConfigError(
                    f"MooncakeConnectorV2: more than {_ASCEND_REGIONS} memory regions of KV cache, "
                    "which is all that an NPU can register. With KVPP on this node it is one; or "
                    "use more pipeline stages"
                )
            self._regions_left -= 1
        code = self._engine.register_memory(address, length_bytes)
        if code != 0:
            check = (
                "the devices in /etc/hccn.conf and their links (kvpp doctor)"
                if self._protocol == "ascend"
                else "the locked-memory limit (ulimit -l)"
            )
            raise ConfigError(
                f"MooncakeConnectorV2: mooncake refuses to register {length_bytes} bytes of KV "
                f"cache (code {code}); check {check}"
            )

    def read(
        self,
        session: str,
        local_addresses: Sequence[int],
        remote_addresses: Sequence[int],
        lengths_bytes: Sequence[int],
    ) -> None:
        code = self._engine.batch_transfer_sync_read(
            session, list(local_addresses), list(remote_addresses), list(lengths_bytes)
        )
        if code != 0:
            raise PeerError(
                f"reading {sum(lengths_bytes)} bytes in {len(lengths_bytes)} pieces from "
                f"{session} failed (mooncake code {code})"
            )


# This process's engines by host and protocol, each as long as somebody uses it. A store that was
# given an engine holds on to the native one, so whoever closes first takes nothing from the others.
_engines: WeakValueDictionary[tuple[str, str], MooncakeEngine] = WeakValueDictionary()


def share_engine(host: str, protocol: str, device_name: str = "") -> MooncakeEngine:
    """This process's engine at ``host``; it is started where there is none.

    Memory is registered once with an engine, so its users register memory of their own only.

    Raises:
        ConfigError: mooncake is not installed, or does not start; or the engine that is there was
            started with other devices.
    """
    engine = _engines.get((host, protocol))
    if engine is None:
        engine = _engines[host, protocol] = MooncakeEngine(host, protocol, device_name)
    if engine.device_name != device_name:
        raise ConfigError(
            f"MooncakeConnectorV2: device_name is {device_name!r}, and this process's engine at "
            f"{host} uses {engine.device_name!r}; set both to the same"
        )
    return engine


def find_engine(host: str, protocol: str = "") -> MooncakeEngine | None:
    """The engine that somebody in this process uses at ``host``; no protocol stands for any."""
    wanted = [protocol] if protocol else PROTOCOLS
    found = (_engines.get((host, name)) for name in wanted)
    return next((engine for engine in found if engine is not None), None)


def late_write_s(protocol: str, environment: Mapping[str, str] = os.environ) -> float:
    """Seconds for which the network itself may go on with a read that was given up; 0 if unknown.

    Of the NPUs' RDMA: a packet is sent again ``HCCL_RDMA_RETRY_CNT`` times, each time after
    ``4.096 us * 2 ** HCCL_RDMA_TIMEOUT``.

    Example:
        >>> round(late_write_s("ascend", {}), 2)
        30.06
    """
    if protocol != "ascend":
        return 0.0
    again_us = 4.096 * 2 ** _number(environment, "HCCL_RDMA_TIMEOUT", 20)
    return again_us * _number(environment, "HCCL_RDMA_RETRY_CNT", 7) / 1e6


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, str(default))
    if not value.isdecimal():
        raise ConfigError(f"{name} is {value!r} in the environment; expected a number")
    return int(value)
