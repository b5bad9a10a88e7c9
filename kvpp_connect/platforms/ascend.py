"""Ascend: streams and events of ``torch_npu``, which is imported when a device is made."""

import os
from datetime import timedelta
from importlib import import_module
from types import ModuleType
from typing import Any

from kvpp_connect.errors import ConfigError
from kvpp_connect.platforms.device import StreamDevice

# As vllm-ascend for each of its groups but the experts', for which HCCL_BUFFSIZE is set.
_BUFFER_MB = 200


class AscendDevice(StreamDevice):
    """The current NPU with a transfer stream of its own."""

    def __init__(self, torch_npu: ModuleType | None = None) -> None:
        """Make the transfer stream; the worker has chosen the device before.

        Args:
            torch_npu: the package, if it is loaded already.

        Raises:
            ConfigError: the package is missing, or sees no NPU.
        """
        npu = (torch_npu or _load()).npu
        if not npu.is_available():
            raise ConfigError("enable_kvpp: torch_npu sees no NPU; check npu-smi info")
        super().__init__(npu)


def group_options(timeout: timedelta) -> Any:  # noqa: ANN401 - of torch_npu
    """Options of the KVPP group: HCCL's buffers for it take no more than they have to.

    Args:
        timeout: of the group.
    """
    options: Any = _load()._C._distributed_c10d.ProcessGroupHCCL.Options()  # noqa: SLF001
    options.hccl_config = {"hccl_buffer_size": min(_BUFFER_MB, _asked_mb())}
    options._timeout = timeout  # noqa: SLF001 - else it is HCCL's own
    return options


def _asked_mb() -> int:
    asked = os.environ.get("HCCL_BUFFSIZE", "")
    return int(asked) if asked.isdecimal() else _BUFFER_MB


def _load() -> ModuleType:
    try:
        return import_module("torch_npu")
    except ImportError as error:
        raise ConfigError(
            f"enable_kvpp: an NPU needs the package torch-npu ({error}); install "
            "kvpp-connect[ascend]"
        ) from error
