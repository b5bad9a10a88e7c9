"""Copies between caches and rows: every byte of the named blocks, and no other."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvpp_connect.connectors.ascend_store.copying import DeviceCopier, HostCopier, byte_blocks
from kvpp_connect.connectors.ascend_store.objects import HEADER_BYTES
from kvpp_connect.layout import ComponentAddress

BLOCKS = 7


class FakeEvent:
    def __init__(self, device, name):
        self._device, self._name = device, name

    def record(self):
        self._device.log.append(f"record {self._name} on {self._device.stream}")

    def wait(self):
        self._device.log.append(f"wait for {self._name} on {self._device.stream}")


class FakeDevice:
    """A device that writes down what it is asked for."""

    def __init__(self):
        self.log = []
        self.stream = "the model's stream"
        self.events = 0

    def event(self):
        self.events += 1
        return FakeEvent(self, f"event {self.events}")

    @contextmanager
    def transfers(self):
        self.stream = "the transfer stream"
        yield
        self.stream = "the model's stream"

    def finish_transfers(self):
        self.log.append("finish transfers")


def on_device():
    return DeviceCopier(FakeDevice(), torch.device("cpu"))


COPIERS = pytest.mark.parametrize("make", [HostCopier, on_device], ids=["host", "device"])


def cache_in_memory(page, stride, fill=0, offset=24):
    """A cache whose blocks lie a stride apart in an allocation, and that allocation."""
    memory = torch.full((offset + BLOCKS * stride + 40,), fill, dtype=torch.uint8)
    address = ComponentAddress(
        layer_name="layer",
        address=memory.data_ptr() + offset,
        page_bytes=page,
        block_stride_bytes=stride,
        token_bytes=0,
        dtype="uint8",
    )
    return byte_blocks(memory, address, BLOCKS), memory


def random_bytes(shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.manual_seed(seed))


def test_a_cache_is_seen_as_bytes_of_its_own_memory():
    memory = torch.arange(400, dtype=torch.int32)
    address = ComponentAddress(
        layer_name="layer",
        address=memory.data_ptr() + 80,
        page_bytes=12,
        block_stride_bytes=40,
        token_bytes=0,
        dtype="int32",
    )
    blocks = byte_blocks(memory, address, 5)
    assert blocks.shape == (5, 12)
    assert blocks[3].view(torch.int32).tolist() == [50, 51, 52]
    blocks[4, 0] = 255
    assert memory[60] == 255


@COPIERS
def test_gathering_puts_every_cache_behind_the_header_in_its_order(make):
    (a, memory_a), (b, memory_b) = cache_in_memory(24, 24), cache_in_memory(8, 40)
    memory_a.copy_(random_bytes(memory_a.shape, 1))
    memory_b.copy_(random_bytes(memory_b.shape, 2))
    before = memory_a.clone(), memory_b.clone()
    rows = torch.full((3, 128), 9, dtype=torch.uint8)[:, : HEADER_BYTES + 32]
    make().gather((a, b), [5, 0, 2], rows, None)
    for row, block in zip(rows, [5, 0, 2], strict=True):
        assert row[:HEADER_BYTES].eq(9).all(), "the header belongs to somebody else"
        assert row[HEADER_BYTES:].tolist() == [*a[block].tolist(), *b[block].tolist()]
    assert memory_a.equal(before[0])
    assert memory_b.equal(before[1])


@COPIERS
@given(
    st.integers(1, 5).map(lambda words: 8 * words),
    st.integers(0, 4).map(lambda words: 8 * words),
    st.lists(st.integers(0, BLOCKS - 1), unique=True, min_size=1),
)
def test_scattering_writes_the_named_blocks_and_nothing_else(make, page, gap, block_ids):
    cache, memory = cache_in_memory(page, page + gap, fill=9)
    rows = random_bytes((len(block_ids), HEADER_BYTES + page))
    expected = memory.clone()
    for row, block in zip(rows, block_ids, strict=True):
        begin = 24 + block * (page + gap)
        expected[begin : begin + page] = row[HEADER_BYTES:]
    make().scatter(rows, (cache,), block_ids)
    assert memory.equal(expected)


@COPIERS
def test_what_was_gathered_comes_back_into_other_blocks_of_other_caches(make):
    sources = [cache_in_memory(24, 32)[0], cache_in_memory(16, 16)[0]]
    targets = [cache_in_memory(24, 24)[0], cache_in_memory(16, 48)[0]]
    for seed, source in enumerate(sources):
        source.copy_(random_bytes(source.shape, seed))
    rows = torch.zeros((2, HEADER_BYTES + 40), dtype=torch.uint8)
    copier = make()
    copier.gather(sources, [6, 1], rows, None)
    copier.scatter(rows, targets, [3, 0])
    for source, target in zip(sources, targets, strict=True):
        assert target[3].equal(source[6])
        assert target[0].equal(source[1])


@COPIERS
def test_a_part_of_an_object_begins_where_the_caller_says(make):
    cache, _ = cache_in_memory(16, 16)
    rows = random_bytes((2, 20))
    make().scatter(rows, (cache,), [4, 2], begin=4)
    assert cache[4].equal(rows[0, 4:])
    assert cache[2].equal(rows[1, 4:])


def test_a_device_gathers_on_the_transfer_stream_after_the_forward_that_was_marked():
    device = FakeDevice()
    copier = DeviceCopier(device, torch.device("cpu"))
    cache, _ = cache_in_memory(8, 8)
    rows = torch.zeros((1, HEADER_BYTES + 8), dtype=torch.uint8)
    first, second = copier.mark(), copier.mark()
    copier.gather((cache,), [1], rows, first)
    assert first is not second, "a later forward must not move an earlier one's mark"
    assert device.log == [
        "record event 1 on the model's stream",
        "record event 2 on the model's stream",
        "wait for event 1 on the transfer stream",
        "finish transfers",
    ]


def test_a_device_scatters_on_the_transfer_stream_and_waits_for_its_end():
    device = FakeDevice()
    cache, _ = cache_in_memory(8, 8)
    rows = torch.zeros((1, HEADER_BYTES + 8), dtype=torch.uint8)
    DeviceCopier(device, torch.device("cpu")).scatter(rows, (cache,), [1])
    assert device.log == ["finish transfers"]


class CopyLog(TorchDispatchMode):
    """Whether both ends of each copy are one range of memory."""

    def __init__(self):
        super().__init__()
        self.whole = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.copy_.default:
            self.whole.append(all(tensor.is_contiguous() for tensor in args[:2]))
        return operator(*args, **(kwargs or {}))


def test_between_host_and_device_each_object_goes_as_one_range_of_memory():
    caches = [cache_in_memory(24, 32)[0], cache_in_memory(16, 16)[0]]
    rows = torch.zeros((3, 128), dtype=torch.uint8)[:, : HEADER_BYTES + 40]
    with CopyLog() as log:
        on_device().gather(caches, [6, 1, 2], rows, None)
        on_device().scatter(rows, caches, [3, 0, 4])
    assert log.whole == [True] * 6


def test_a_thread_that_is_entered_has_the_device_for_its_current_one(monkeypatch):
    """Else torch makes the first device's context in it, whichever stream it is given."""
    chosen = []
    module = SimpleNamespace(set_device=chosen.append)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    DeviceCopier(FakeDevice(), torch.device("cuda", 3)).enter_thread()
    assert chosen == [torch.device("cuda", 3)]


def test_on_a_host_nothing_is_under_way_after_a_forward():
    assert HostCopier().mark() is None
