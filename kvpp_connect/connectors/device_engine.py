"""A transfer engine for caches in a device's memory, called from threads that never used it."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvpp_connect.connectors.mooncake_engine import TransferEngine


class DeviceEngine:
    """Makes the device current in each thread that reads, once; the rest is the engine's."""

    def __init__(
        self,
        engine: TransferEngine,
        device: torch.device,
        set_device: Callable[[torch.device], Any] | None = None,
    ) -> None:
        """Wrap an engine.

        Args:
            set_device: makes a device current in the calling thread; default: torch's for it.
        """
        self._engine = engine
        self._device = device
        self._set_device = set_device or torch.get_device_module(device).set_device
        self._thread = threading.local()

    @property
    def session(self) -> str:
        return self._engine.session

    def register(self, address: int, length_bytes: int) -> None:
        self._engine.register(address, length_bytes)

    def read(
        self,
        session: str,
        local_addresses: Sequence[int],
        remote_addresses: Sequence[int],
        lengths_bytes: Sequence[int],
    ) -> None:
        if not getattr(self._thread, "ready", False):
            self._set_device(self._device)
            self._thread.ready = True
        self._engine.read(session, local_addresses, remote_addresses, lengths_bytes)
