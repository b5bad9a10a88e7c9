"""vLLM's configuration as on eight Hopper GPUs, on a machine and with a build that have none.

What a build for CPUs lacks is replaced by names that nobody calls: no kernel runs, and no symbol is
held against the ledger, which other tests do.
"""

import os
import sys
import types
from pathlib import Path

MODEL = Path(__file__).parent / "examples" / "DeepSeek-V3.2"


class _Nothing(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **more: None


def play():
    """Make CUDA the platform, and load the plugin; once, before anything else of vLLM's."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    names = ("_C_stable_libtorch", "vllm_flash_attn", "vllm_flash_attn.flash_attn_interface")
    for name in names:
        sys.modules[f"vllm.{name}"] = _Nothing(f"vllm.{name}")

    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Hopper(NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "played")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 141 << 30)
        is_fully_connected = classmethod(lambda cls, device_ids: True)
        device_count = classmethod(lambda cls: 8)

    vllm.platforms._current_platform = Hopper()  # noqa: SLF001 - there is no other way in

    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = True  # as beside every build for CUDA

    from kvpp_connect.plugin import register
    from kvpp_connect.seam.variants import Variant

    Variant.verify = lambda self: None
    register()


def engine_config(*, kvpp=True, **more):
    """vLLM's configuration of a server."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        **{
            "model": str(MODEL),
            "skip_tokenizer_init": True,
            "tensor_parallel_size": 8,
            "distributed_executor_backend": "mp",
            "max_model_len": 2048,
            "additional_config": {"enable_kvpp": kvpp},
            **more,
        }
    ).create_engine_config()


def said(**more):
    """What a server says to this; nothing where it starts."""
    try:
        engine_config(**more)
    except Exception as error:  # noqa: BLE001 - vLLM's, pydantic's or ours
        return " ".join(str(error).split())
    return ""
