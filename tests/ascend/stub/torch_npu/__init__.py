"""Stands for torch_npu where there is no NPU: names, and a device without streams.

vllm-ascend imports torch_npu as soon as vLLM asks for its platform. This stub has what importing it
and constructing its worker and model runner touch; no operator and no memory.
"""

import contextlib
import sys
import types

import torch


class Stream:
    """A stream that is always done."""

    def __init__(self, *args, **kwargs):
        del args, kwargs

    def synchronize(self):
        return

    def wait_stream(self, other):
        del other


class Event:
    """An event that has always happened."""

    def __init__(self, *args, **kwargs):
        del args, kwargs

    def record(self, stream=None):
        del stream

    def wait(self, stream=None):
        del stream

    def synchronize(self):
        return


class ExternalEvent(Event):
    pass


class NPUGraph:
    pass


class _PluggableAllocator:
    pass


_THE_STREAM = Stream()


def npu_format_cast(tensor, *args, **kwargs):
    """Memory formats are a matter of the device."""
    del args, kwargs
    return tensor


def _device_module():
    """What torch.npu is."""
    npu = types.ModuleType("torch.npu")
    npu.Stream, npu.Event, npu.ExternalEvent, npu.NPUGraph = Stream, Event, ExternalEvent, NPUGraph
    npu.config = types.SimpleNamespace(allow_internal_format=True)
    npu.memory = types.SimpleNamespace(NPUPluggableAllocator=_PluggableAllocator)
    npu.is_available = lambda: False
    npu.is_initialized = lambda: False
    npu.is_current_stream_capturing = lambda: False
    npu.device_count = lambda: 0
    npu.current_device = lambda: 0
    npu.set_device = lambda device: None
    npu.get_soc_version = lambda: 220  # an Atlas A2, which the released wheel is built for
    npu.current_stream = npu.default_stream = lambda device=None: _THE_STREAM
    npu.stream = lambda stream: contextlib.nullcontext(stream)
    npu.synchronize = npu.empty_cache = lambda *args: None
    npu.memory_stats = lambda device=None: {}
    npu.memory_reserved = npu.memory_allocated = npu.max_memory_allocated = lambda device=None: 0
    npu.reset_peak_memory_stats = lambda device=None: None
    npu.mem_get_info = lambda device=None: (1 << 36, 1 << 36)
    return npu


npu = _device_module()
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)  # noqa: SLF001 - as the vendor does
sys.modules["torch.npu"] = npu
torch.Tensor.npu = lambda self, *args, **kwargs: self

from torch_npu import _C as _C  # noqa: E402 - named through the package
from torch_npu import profiler as profiler  # noqa: E402

# Renaming the backend makes torch look for hooks that only the vendor's library has.
torch._C._get_accelerator = lambda *args: torch.device("cpu")  # noqa: SLF001
