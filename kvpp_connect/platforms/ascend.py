"""Ascend: streams and events of ``torch_npu``, which is imported when a device is made."""

from importlib import import_module
from types import ModuleType

from kvpp_connect.errors import ConfigError
from kvpp_connect.platforms.device import StreamDevice


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


def _load() -> ModuleType:
    try:
        return import_module("torch_npu")
    except ImportError as error:
        raise ConfigError(
            f"enable_kvpp: an NPU needs the package torch-npu ({error}); install "
            "kvpp-connect[ascend]"
        ) from error
