"""Sleep takes memory away and gives other memory back, which no registration survives."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig

from kvpp_connect.connectors import MooncakeConnectorV2
from kvpp_connect.errors import ConfigError


def check(*, sleeps):
    config = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=sleeps),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    transfer = KVTransferConfig(kv_connector="MooncakeConnectorV2", kv_role="kv_producer")
    MooncakeConnectorV2.check_settings(config, transfer)


def test_memory_that_peers_read_may_not_sleep():
    check(sleeps=False)
    with pytest.raises(ConfigError, match=r"--enable-sleep-mode takes the memory away.*Remove it"):
        check(sleeps=True)
