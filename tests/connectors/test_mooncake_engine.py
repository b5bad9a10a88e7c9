"""Mooncake's Ascend transport, as far as it is told before it starts; with a fake engine."""

import os
import sys
import types

import pytest

from kvpp_connect.connectors.mooncake_engine import MooncakeEngine, late_write_s, share_engine
from kvpp_connect.errors import ConfigError

TIMEOUT = "ASCEND_TRANSFER_TIMEOUT"


class FakeEngine:
    def initialize(self, host, metadata, protocol, device):
        self.started = (host, metadata, protocol, device, os.environ.get(TIMEOUT))
        return 0

    def get_rpc_port(self):
        return 7

    def register_memory(self, address, length_bytes):
        return 0


@pytest.fixture
def start(monkeypatch):
    """Start an engine; answer it and what mooncake was given."""
    made = []

    def make():
        made.append(FakeEngine())
        return made[-1]

    package, module = types.ModuleType("mooncake"), types.ModuleType("mooncake.engine")
    module.TransferEngine = package.engine = make
    package.engine = module
    monkeypatch.setitem(sys.modules, "mooncake", package)
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    for name in (TIMEOUT, "HCCL_RDMA_TIMEOUT", "HCCL_RDMA_RETRY_CNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(TIMEOUT, "1")  # so that it is put back after the test
    monkeypatch.delenv(TIMEOUT)

    def start(protocol="ascend", device_name=""):
        engine = MooncakeEngine("10.0.0.1", protocol, device_name)
        return engine, made[-1].started

    return start


def test_a_transfer_on_npus_is_given_up_later_than_the_network_tries(start, monkeypatch):
    assert start()[1] == ("10.0.0.1", "P2PHANDSHAKE", "ascend", "", "33065")
    monkeypatch.delenv(TIMEOUT)
    monkeypatch.setenv("HCCL_RDMA_TIMEOUT", "18")
    monkeypatch.setenv("HCCL_RDMA_RETRY_CNT", "3")
    assert start()[1][-1] == str(round(4.096e-3 * 2**18 * 3) + 3000)


def test_a_time_out_that_the_user_has_set_stays(start, monkeypatch):
    monkeypatch.setenv(TIMEOUT, "5000")
    assert start()[1][-1] == "5000"


def test_other_protocols_have_nothing_of_that(start):
    assert start("rdma")[1][-1] is None
    assert late_write_s("rdma") == 0


def test_a_number_that_is_none_is_refused_by_name(start, monkeypatch):
    monkeypatch.setenv("HCCL_RDMA_TIMEOUT", "long")
    with pytest.raises(ConfigError, match="HCCL_RDMA_TIMEOUT is 'long'"):
        start()


def test_one_region_more_than_an_npu_registers_is_refused(start):
    engine, _ = start()
    for number in range(256):
        engine.register(number, 1)
    with pytest.raises(ConfigError, match="more than 256 memory regions"):
        engine.register(256, 1)
    many, _ = start("rdma")
    for number in range(300):
        many.register(number, 1)


def test_mooncake_is_told_which_network_devices_to_use(start):
    engine, given = start("rdma", "mlx5_0,mlx5_1")
    assert given[:4] == ("10.0.0.1", "P2PHANDSHAKE", "rdma", "mlx5_0,mlx5_1")
    assert engine.device_name == "mlx5_0,mlx5_1"


def test_connectors_that_share_an_engine_have_to_name_the_same_devices(start):
    start("rdma")  # puts the fake in mooncake's place
    engine = share_engine("10.0.0.2", "rdma", "mlx5_0")
    assert share_engine("10.0.0.2", "rdma", "mlx5_0") is engine
    with pytest.raises(ConfigError, match=r"device_name is 'mlx5_1'.*uses 'mlx5_0'; set both"):
        share_engine("10.0.0.2", "rdma", "mlx5_1")
