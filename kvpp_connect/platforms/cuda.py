"""CUDA: streams and events of ``torch.cuda``, and torch's NCCL.

In which order NCCL's kernels of several streams start is said in ``nccl.py``.
"""

from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from kvpp_connect.errors import ConfigError
from kvpp_connect.platforms.device import StreamDevice

_HIGH_PRIORITY = -1


class CudaDevice(StreamDevice):
    """The current CUDA device with a transfer stream of its own."""

    def __init__(self, torch_module: ModuleType = torch) -> None:
        """Make the transfer stream; the worker has chosen the device before.

        Raises:
            ConfigError: torch sees no CUDA device.
        """
        if not torch_module.cuda.is_available():
            raise ConfigError(
                f"enable_kvpp: torch {torch_module.__version__} sees no CUDA device; install a "
                "torch built for CUDA and check nvidia-smi"
            )
        # A layer waits for its transfer: it goes first where both want the same multiprocessors.
        super().__init__(torch_module.cuda, priority=_HIGH_PRIORITY)


def group_options(timeout: timedelta) -> Any:  # noqa: ANN401 - absent from a torch without CUDA
    """Options of the KVPP group: NCCL's own stream goes first as well."""
    options: Any = getattr(dist, "ProcessGroupNCCL").Options()  # noqa: B009 - as said above
    options.is_high_priority_stream = True
    options._timeout = timeout  # noqa: SLF001 - torch warns where it differs from the group's
    return options


def nccl_version() -> tuple[int, ...]:
    """Version of torch's NCCL; empty where torch has none."""
    if not (torch.version.cuda and dist.is_nccl_available()):
        return ()
    from torch.cuda import nccl

    found: Any = nccl.version()
    return tuple(found)
