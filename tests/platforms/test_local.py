"""Local processes and the devices of one machine, with a module of the shape of torch.cuda."""

from types import SimpleNamespace

import pytest
import torch

from kvpp_connect.errors import ConfigError
from kvpp_connect.platforms.base import PLATFORMS
from kvpp_connect.platforms.local import local_device


@pytest.fixture
def machine(monkeypatch):
    """A machine with so many GPUs; gives those that were made current."""

    def make(count):
        current = []
        module = SimpleNamespace(
            is_available=lambda: count > 0,
            device_count=lambda: count,
            set_device=current.append,
            get_device_name=lambda index: f"GPU {index}",
            synchronize=lambda: None,
        )
        monkeypatch.setattr(torch, "get_device_module", lambda name: module)
        return current

    return make


def test_every_rank_has_a_gpu_of_its_own_and_nccl_between_them(machine):
    current = machine(4)
    places = [local_device("cuda", rank, 4) for rank in range(4)]
    assert current == [0, 1, 2, 3]
    assert [place.memory for place in places] == [torch.device("cuda", i) for i in range(4)]
    assert {place.platform for place in places} == {PLATFORMS["cuda"]}


def test_ranks_that_share_a_gpu_take_gloo_all_of_them(machine):
    current = machine(2)
    places = [local_device("cuda", rank, 3) for rank in range(3)]
    assert current == [0, 1, 0]
    for place in places:
        assert (place.platform.collective_backend, place.platform.group_options) == ("gloo", "")
        assert place.platform.device_cls == PLATFORMS["cuda"].device_cls


def test_a_machine_without_gpus_is_refused(machine):
    machine(0)
    with pytest.raises(ConfigError, match="sees no cuda device here; use --device cpu"):
        local_device("cuda", 0, 2)


def test_a_device_whose_package_is_missing_is_refused():
    with pytest.raises(ConfigError, match=r"--device npu: torch cannot use it \("):
        local_device("npu", 0, 2)


def test_the_cpu_needs_nothing():
    place = local_device("cpu", 1, 2)
    place.finish()
    assert (place.platform, place.memory.type, place.name) == (PLATFORMS["cpu"], "cpu", "cpu")
