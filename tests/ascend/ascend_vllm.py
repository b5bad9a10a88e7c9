"""vllm-ascend on a machine without an NPU: what has to be arranged around it.

Everything here replaces hardware. The worker, the model runner, the attention layers, vLLM's
planner and the connector are the real ones.
"""

import contextlib
import dataclasses
import importlib.machinery
import inspect
import os
import sys
import tempfile
import types

PLUGINS = "ascend,ascend_kv_connector,kvpp_connect"  # ascend_model needs torchvision

registered: list[tuple[int, int]] = []  # address and length of what a connector has registered


def set_environment():
    """Before anything of vLLM is imported; child processes inherit it."""
    os.environ["VLLM_PLUGINS"] = PLUGINS
    os.environ["VLLM_CACHE_ROOT"] = os.path.join(tempfile.gettempdir(), "kvpp-ascend")
    os.environ["HF_HUB_OFFLINE"] = os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_HOST_IP"] = "127.0.0.1"


def prepare():
    """Let vLLM and vllm-ascend import, and construct their objects on CPU tensors."""
    set_environment()
    _fake_torchvision()
    from vllm.platforms import current_platform  # loads the stub of torch_npu
    from vllm_ascend.utils import adapt_patch

    assert type(current_platform).__name__ == "NPUPlatform", current_platform
    adapt_patch(is_global_patch=True)
    import vllm_ascend.ops  # the model runner cannot be imported first
    import vllm_ascend.worker.worker  # noqa: F401

    _no_pinned_memory()


def run_on_cpus():
    """Ranks on CPUs: gloo, a device without streams, and notes of what is registered."""
    from kvpp_connect.connectors.mooncake_engine import MooncakeEngine
    from kvpp_connect.platforms.base import PLATFORMS

    cpu, npu = PLATFORMS["cpu"], PLATFORMS["npu"]
    PLATFORMS["npu"] = dataclasses.replace(
        npu, collective_backend=cpu.collective_backend, device_cls=cpu.device_cls
    )
    register = MooncakeEngine.register

    def noting(self, address, length_bytes):
        registered.append((address, length_bytes))
        register(self, address, length_bytes)

    MooncakeEngine.register = noting


def manifest():
    """What this rank has published, as (name, address, page bytes, token bytes)."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return []
    import msgspec

    from kvpp_connect.layout import GroupManifest

    published = get_kv_transfer_group().get_handshake_metadata().publication
    group = msgspec.msgpack.decode(published, type=GroupManifest)
    return [
        [(c.layer_name, c.address, c.page_bytes, c.token_bytes) for c in rank.components]
        for rank in group.ranks
    ]


@contextlib.contextmanager
def weights_on_cpu(config):
    """Load the model to the CPU instead of an NPU."""
    import torch
    from vllm_ascend.platform import NPUPlatform

    device = config.device_config.device
    NPUPlatform.device_type, config.device_config.device = "cpu", torch.device("cpu")
    yield
    NPUPlatform.device_type, config.device_config.device = "npu", device


def _fake_torchvision():
    """A Qwen image processor, which vllm-ascend patches, wants a function of torchvision's."""
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # remembers that it is not installed
    for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
        module = types.ModuleType(f"torchvision{name}")
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.InterpolationMode = type("InterpolationMode", (), {})
        sys.modules.setdefault(module.__name__, module)


def _no_pinned_memory():
    """vLLM has decided for pinned memory, which a stub of a device cannot allocate."""
    from vllm.v1 import utils
    from vllm_ascend.platform import NPUPlatform

    for name, module in list(sys.modules.items()):
        if name.startswith("vllm") and vars(module).get("PIN_MEMORY"):
            module.PIN_MEMORY = False
    constructor = utils.CpuGpuBuffer.__init__
    parameters = inspect.signature(constructor).parameters.values()
    given = [p for p in parameters if p.default is not p.empty]
    keywords = {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY}
    if "pin_memory" in keywords:
        constructor.__kwdefaults__ = keywords | {"pin_memory": False}
    else:
        constructor.__defaults__ = tuple(
            False if p.name == "pin_memory" else p.default for p in given
        )
    NPUPlatform.is_pin_memory_available = classmethod(lambda cls: False)
