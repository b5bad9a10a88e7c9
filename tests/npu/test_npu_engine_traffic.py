"""Engine, collective and allocation on NPUs, one for each rank: `make test-npu`.

The same traffic runs on a CPU, so that it is known to be right before it meets a device.
"""

from types import SimpleNamespace

import pytest
import torch
from npu_traffic import STAGE, run_all_owners_and_sizes, run_forwards

from kvpp_connect.layout import place_rank, plan_group
from kvpp_connect.platforms.base import select_platform

SIZES = (1, 4095, 4096, (1 << 20) + 7, 64 << 20)
FORWARDS = 40


def device(name, *marks):
    return pytest.param(name, marks=[pytest.mark.distributed, *marks], id=name)


CPU, NPUS = device("cpu"), device("npu", pytest.mark.npu(devices=2))


@pytest.mark.parametrize("mode", ["full", "compact"])
@pytest.mark.parametrize("name", [CPU, NPUS])
def test_every_rank_reads_what_the_owners_persisted(start_ranks, free_port, name, mode):
    forwards = FORWARDS if name == "npu" else 4
    assert start_ranks(run_forwards, 2, name, mode, 2, free_port, forwards) == [0, 0]


@pytest.mark.parametrize("name", [CPU, NPUS])
def test_all_owners_send_all_sizes_two_at_once_and_touch_nothing_else(start_ranks, free_port, name):
    sizes = SIZES if name == "npu" else SIZES[:-1]
    assert start_ranks(run_all_owners_and_sizes, 2, name, 2, free_port, sizes) == [True, True]


@pytest.mark.parametrize("name", ["cpu", pytest.param("npu", marks=pytest.mark.npu)])
def test_every_tensor_of_the_allocation_begins_at_two_mebibytes(name):
    pytest.importorskip("vllm")
    from kvpp_connect.seam.ascend_caches import PlacedCaches

    alignment = select_platform("npu").alignment_bytes
    placement = place_rank(plan_group(STAGE, 2, alignment, block_numbers="layer"), 0, 7)
    runner = SimpleNamespace(device=torch.device(name))
    caches = PlacedCaches(placement, alignment)
    caches.serve(runner)
    names = [c.layer_name for bundle in STAGE.targets for c in bundle.components]
    groups = [SimpleNamespace(layer_names=names)]
    config = SimpleNamespace(kv_cache_groups=groups)
    raw = runner._allocate_kv_cache_tensors(config)  # noqa: SLF001 - what the runner calls
    assert sorted(raw) == sorted(names)
    for parts in raw.values():
        assert [part.data_ptr() % alignment for part in parts] == [0] * len(parts)


@pytest.mark.npu
def test_events_order_the_transfer_stream_after_the_model_s_and_before_it():
    """Without the waits a copy of half a gibibyte is overtaken by what follows it."""
    engine_device = select_platform("npu").create_device()
    ready, arrived = engine_device.event(), engine_device.event()
    source = torch.zeros(512 << 20, dtype=torch.int8, device="npu")
    target = torch.zeros_like(source)
    for value in range(1, 20):
        source.fill_(value)
        ready.record()
        with engine_device.transfers():
            ready.wait()
            target.copy_(source)
            arrived.record()
        arrived.wait()
        found = target[-1].clone()
        assert int(found) == value
