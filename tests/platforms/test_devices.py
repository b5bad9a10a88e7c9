"""Devices against a module of the shape of torch.cuda that notes what is called on which stream."""

import inspect
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from kvpp_connect.errors import ConfigError
from kvpp_connect.platforms.ascend import AscendDevice
from kvpp_connect.platforms.base import select_platform
from kvpp_connect.platforms.cpu import CpuDevice
from kvpp_connect.platforms.cuda import CudaDevice
from kvpp_connect.platforms.device import StreamDevice


class FakeStreams:
    """``torch.cuda`` or ``torch.npu``: only what does not make the host wait."""

    def __init__(self, available=True):
        self.log = []
        self.current = "model's stream"
        self.available = available

    def is_available(self):
        return self.available

    def Stream(self, **options):  # noqa: N802 - torch's name
        self.options = options
        self.log.append("new stream")
        return "transfer stream"

    def Event(self):  # noqa: N802 - torch's name
        self.log.append("new event")
        return FakeEvent(self)

    @contextmanager  # like torch_npu's: entered once only
    def stream(self, stream):
        previous, self.current = self.current, stream
        yield
        self.current = previous


class FakeEvent:
    def __init__(self, streams):
        self.streams = streams

    def record(self, stream=None):
        self.streams.log.append(f"record on the {stream or self.streams.current}")

    def wait(self, stream=None):
        self.streams.log.append(f"the {stream or self.streams.current} waits")


def cuda(streams):
    return CudaDevice(SimpleNamespace(cuda=streams, __version__="2.0"))


def ascend(streams):
    return AscendDevice(SimpleNamespace(npu=streams))


@pytest.mark.parametrize("make", [cuda, ascend])
def test_events_go_to_the_stream_that_is_current(make):
    streams = FakeStreams()
    device = make(streams)
    ready, arrived = device.event(), device.event()
    assert streams.log == ["new stream", *["new event", "record on the model's stream"] * 2]
    streams.log.clear()
    for _ in range(3):
        ready.record()
        with device.transfers():
            ready.wait()
            arrived.record()
        arrived.wait()
    assert (
        streams.log
        == [
            "record on the model's stream",
            "the transfer stream waits",
            "record on the transfer stream",
            "the model's stream waits",
        ]
        * 3
    )


def test_transfers_go_first_on_a_gpu():
    streams = FakeStreams()
    cuda(streams)
    assert streams.options == {"priority": -1}


@pytest.mark.parametrize(("make", "names"), [(cuda, "CUDA"), (ascend, "NPU")])
def test_a_machine_without_the_device_is_told_so_in_one_line(make, names):
    with pytest.raises(ConfigError, match=f"enable_kvpp.* sees no {names}") as error:
        make(FakeStreams(available=False))
    assert "\n" not in str(error.value)


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_an_npu_without_its_package_is_told_what_to_install():
    with pytest.raises(ConfigError, match=r"torch-npu.*install kvpp-connect\[ascend\]"):
        AscendDevice()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_torch_without_cuda_is_refused():
    with pytest.raises(ConfigError, match=f"torch {torch.__version__}".replace("+", r"\+")):
        CudaDevice()


def test_the_fake_has_the_shape_of_torch():
    streams = torch.cuda.streams  # not what importing vLLM's CPU worker leaves in torch.cuda
    for owner, call in [
        (torch.cuda, "is_available()"),
        (streams, "Stream(device,priority)"),
        (streams, "Event()"),
        (torch.cuda, "stream(stream)"),
        (streams.Event, "record(self)"),
        (streams.Event, "wait(self)"),
    ]:
        name, _, arguments = call.rstrip(")").partition("(")
        inspect.signature(getattr(owner, name)).bind(*filter(None, arguments.split(",")))


def test_the_cpu_does_nothing_and_returns_at_once():
    device = CpuDevice()
    event = device.event()
    with device.transfers():
        event.wait()
        event.record()
    with device.transfers():
        event.wait()


def test_the_table_names_the_cpus_device():
    assert isinstance(select_platform("cpu").create_device(), CpuDevice)


@pytest.mark.parametrize("name", ["cuda.CudaDevice", "ascend.AscendDevice"])
def test_a_new_entry_of_the_table_needs_one_line_for_its_device(name):
    entry = replace(select_platform("cpu"), device_cls=f"kvpp_connect.platforms.{name}")
    with suppress(ConfigError):  # the usual case: a machine without it
        assert isinstance(entry.create_device(), StreamDevice)
