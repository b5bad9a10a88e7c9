"""What operators see: vLLM's log line, and Prometheus."""

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from kvpp_connect.connectors.mooncake_v2.counters import FailureCause
from kvpp_connect.connectors.mooncake_v2.stats import (
    MooncakeV2Prometheus,
    MooncakeV2Stats,
)
from kvpp_connect.connectors.mooncake_v2.wire import BadMessage


class NoConfig:
    kv_transfer_config = None


@pytest.fixture(scope="module")
def prometheus():
    """Metrics of two engines behind one server, as vLLM makes them."""
    types = {kind: kind for kind in (Counter, Gauge, Histogram)}
    labels = ["model_name", "engine"]
    return MooncakeV2Prometheus(NoConfig(), types, labels, {0: ["m", "0"], 1: ["m", "1"]})


def value(name, engine="0", **labels):
    return REGISTRY.get_sample_value(
        f"vllm:kvpp_{name}", {"model_name": "m", "engine": engine, **labels}
    )


def test_counters_add_up_per_engine(prometheus):
    prometheus.observe({"pulls": 2, "pull_bytes": 100})
    prometheus.observe({"pulls": 1}, engine_idx=1)
    prometheus.observe({"pulls": 1})
    assert (value("pulls_total"), value("pulls_total", "1")) == (3, 1)
    assert value("pull_bytes_total") == 100


def test_causes_are_a_label_and_stand_there_from_the_start(prometheus):
    for cause in FailureCause:
        assert value("pull_failures_total", cause=cause.value) == 0
    for cause in BadMessage:
        assert value("bad_control_messages_total", "1", cause=cause.value) == 0
    prometheus.observe({"pull_failures/lease_lost": 2, "bad_control_messages/version": 1})
    assert value("pull_failures_total", cause="lease_lost") == 2
    assert value("pull_failures_total", cause="read") == 0
    assert value("bad_control_messages_total", cause="version") == 1


def test_gauges_are_set_and_fall(prometheus):
    prometheus.observe({"leases_live": 3})
    assert value("leases_live") == 3
    prometheus.observe({"leases_live": 0})
    assert value("leases_live") == 0


def test_a_name_of_another_version_is_left_out(prometheus):
    prometheus.observe({"unheard_of": 1, "pull_failures/unheard_of": 1})


def test_reports_of_ranks_and_steps_join_counters_added_and_gauges_by_the_greatest():
    stats = MooncakeV2Stats(data={"pulls": 1, "pulls_queued": 2})
    stats = stats.aggregate(MooncakeV2Stats(data={"pulls": 2, "pulls_queued": 1, "leases_live": 0}))
    assert stats.data == {"pulls": 3, "pulls_queued": 2, "leases_live": 0}


def test_a_gauge_that_fell_to_nothing_is_a_report():
    assert MooncakeV2Stats().is_empty()
    assert not MooncakeV2Stats(data={"leases_live": 0}).is_empty()


def test_the_log_line_says_the_speed():
    shown = MooncakeV2Stats(data={"pull_bytes": 3_000_000, "pull_seconds": 2.0}).reduce()
    assert shown["MB/s per pull"] == 1.5
