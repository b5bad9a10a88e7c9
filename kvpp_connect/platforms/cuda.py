"""CUDA: streams and events of ``torch.cuda``.

The order in which NCCL's kernels of several streams start is the worker's business, not this
file's: a broadcast beside an all-reduce that spins inside a kernel can deadlock.
"""

from types import ModuleType

import torch

from kvpp_connect.errors import ConfigError
from kvpp_connect.platforms.device import StreamDevice


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
        super().__init__(torch_module.cuda)
