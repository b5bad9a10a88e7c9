"""Devices of this machine for local processes, one each or several on one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from kvpp_connect.errors import ConfigError
from kvpp_connect.platforms.base import Platform, select_platform

_PACKAGES = {"npu": "torch_npu"}


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """Where one process keeps its memory.

    Attributes:
        platform: its backend is gloo where ranks share a device: NCCL and HCCL want one for each.
        memory: the device of its tensors.
        finish: waits for all work that the device was given.
        name: what the device is called.
    """

    platform: Platform
    memory: torch.device
    finish: Callable[[], None]
    name: str


def _done() -> None:
    """Work on a CPU is done when the call returns."""


def local_device(name: str, rank: int, ranks: int) -> LocalDevice:
    """Choose the device of one of several local processes, and make it current.

    Args:
        name: vLLM's device type.

    Raises:
        ConfigError: there is no such device here, or the package for it.
    """
    platform = select_platform(name)
    if name == "cpu":
        return LocalDevice(platform, torch.device("cpu"), _done, "cpu")
    module = _module_of(name)
    count = module.device_count() if module.is_available() else 0
    if count == 0:
        raise ConfigError(f"torch {torch.__version__} sees no {name} device here; use --device cpu")
    index = rank % count
    module.set_device(index)
    if ranks > count:
        platform = replace(platform, collective_backend="gloo", group_options="")
    memory = torch.device(name, index)
    return LocalDevice(platform, memory, module.synchronize, module.get_device_name(index))


def _module_of(name: str) -> Any:  # noqa: ANN401 - torch.cuda, torch.npu
    try:
        if name in _PACKAGES:
            import_module(_PACKAGES[name])
        return torch.get_device_module(name)
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"--device {name}: torch cannot use it ({error})") from error
