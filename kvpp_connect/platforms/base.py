"""What differs between devices, as data. One entry per device that KVPP runs on."""

from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any

from kvpp_connect.errors import ConfigError
from kvpp_connect.layout import BlockNumbers
from kvpp_connect.platforms.device import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """Facts about a device type.

    Attributes:
        name: vLLM's device type.
        collective_backend: ``torch.distributed`` backend of the KVPP group.
        alignment_bytes: alignment of every cache component's base.
        worker_cls: dotted name of the vLLM worker that the platform would use by itself.
        kvpp_worker_cls: dotted name of its KVPP subclass.
        device_cls: dotted name of its :class:`~kvpp_connect.platforms.device.Device`.
        transfer_protocol: default protocol of the transfer engine.
        group_options: dotted name of what makes the options of the KVPP group's process group;
            empty for torch's own.
        block_numbers: what has block numbers of its own in compact's scratch; "layer" where
            attention has one block table for all caches of a layer.
    """

    name: str
    collective_backend: str
    alignment_bytes: int
    worker_cls: str
    kvpp_worker_cls: str
    device_cls: str
    transfer_protocol: str
    group_options: str = ""
    block_numbers: BlockNumbers = "component"

    def create_device(self) -> Device:
        """Make this process's device; its module may load the vendor's libraries.

        Raises:
            ConfigError: the device or its libraries are missing.
        """
        return _find(self.device_cls)()

    def create_group_options(self, timeout: timedelta) -> Any | None:  # noqa: ANN401 - each backend's
        """Options of a new process group; ``None`` for torch's own."""
        return _find(self.group_options)(timeout) if self.group_options else None


def _find(dotted_name: str) -> Any:  # noqa: ANN401 - whatever the table names
    module, _, name = dotted_name.rpartition(".")
    return getattr(import_module(module), name)


PLATFORMS: dict[str, Platform] = {
    "cpu": Platform(
        name="cpu",
        collective_backend="gloo",
        alignment_bytes=64,
        worker_cls="vllm.v1.worker.cpu_worker.CPUWorker",
        kvpp_worker_cls="kvpp_connect.seam.cpu_worker.KvppCPUWorker",
        device_cls="kvpp_connect.platforms.cpu.CpuDevice",
        transfer_protocol="tcp",
    ),
    "cuda": Platform(
        name="cuda",
        collective_backend="nccl",
        alignment_bytes=512,  # of torch's own allocations, which kernels are written for
        worker_cls="vllm.v1.worker.gpu_worker.Worker",
        kvpp_worker_cls="kvpp_connect.seam.cuda_worker.KvppGPUWorker",
        device_cls="kvpp_connect.platforms.cuda.CudaDevice",
        transfer_protocol="rdma",
        group_options="kvpp_connect.platforms.cuda.group_options",
    ),
    "npu": Platform(
        name="npu",
        collective_backend="hccl",
        alignment_bytes=2 << 20,  # the Ascend transport's
        worker_cls="vllm_ascend.worker.worker.NPUWorker",
        kvpp_worker_cls="kvpp_connect.seam.ascend_worker.KvppNPUWorker",
        device_cls="kvpp_connect.platforms.ascend.AscendDevice",
        transfer_protocol="ascend",
        group_options="kvpp_connect.platforms.ascend.group_options",
        block_numbers="layer",
    ),
}


def select_platform(device_type: str) -> Platform:
    """Return the platform of a vLLM device type.

    Raises:
        ConfigError: KVPP does not run on that device.
    """
    try:
        return PLATFORMS[device_type]
    except KeyError:
        raise ConfigError(
            f"enable_kvpp: device type {device_type!r} is not supported by this version of "
            f"kvpp-connect; supported: {', '.join(sorted(PLATFORMS))}"
        ) from None
