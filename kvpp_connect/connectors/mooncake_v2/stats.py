"""The connector's counters and gauges in the words of vLLM's log line and Prometheus.

A report maps names of ``COUNTERS`` to what was added since the last one, and names of ``GAUGES`` to
the value at that moment. A counter with a cause is called ``name/cause``.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge

from kvpp_connect.connectors.mooncake_v2.counters import FailureCause
from kvpp_connect.connectors.mooncake_v2.wire import BadMessage
from kvpp_connect.seam.api import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    create_metric_per_engine,
)

if TYPE_CHECKING:
    from kvpp_connect.seam.api import VllmConfig

COUNTERS: dict[str, str] = {
    "pulls": "Pulls of a request's KV that succeeded, over all decode ranks.",
    "pull_bytes": "KV bytes read from prefill nodes, over all decode ranks.",
    "pull_peer_bytes": "KV bytes that decode ranks read from each other.",
    "pull_tokens": "Prompt tokens whose KV was pulled.",
    "pull_pieces": "Descriptors: contiguous pieces read, over all decode ranks.",
    "pull_seconds": "Seconds spent in pulls, over all decode ranks.",
    "leases_granted": "Requests handed over by a prefill node.",
    "leases_renewed": "Renewals of hand-overs that a prefill node granted.",
    "leases_released": "Hand-overs that their reader gave back.",
    "leases_expired": "Hand-overs whose reader never came back.",
    "leases_lost": "Hand-overs that a decode node still wanted when it learned of their end.",
    "leases_unreleased": "Hand-overs that a decode node could not give back: they expire.",
}

CAUSES: dict[str, tuple[str, tuple[str, ...]]] = {
    "pull_failures": (
        "Pulls of a request's KV that failed, over all decode ranks, by cause.",
        tuple(cause.value for cause in FailureCause),
    ),
    "bad_control_messages": (
        "Messages to a prefill node's control channel that were not taken up, by cause.",
        tuple(cause.value for cause in BadMessage),
    ),
}
"""Counters with the label ``cause``, and its values."""

GAUGES: dict[str, str] = {
    "leases_live": "Hand-overs whose blocks a prefill node keeps.",
    "pulls_queued": "Pulls ordered and not ended, on the decode rank that has most of them.",
}


@dataclass
class MooncakeV2Stats(KVConnectorStats):
    """One report, or several in one: counters are added up, of gauges the greatest is kept."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            present = self.data.get(name, 0)
            self.data[name] = max(present, value) if name in GAUGES else present + value
        return self

    def reduce(self) -> dict[str, int | float]:
        shown = {name: round(value, 3) for name, value in self.data.items()}
        seconds = self.data.get("pull_seconds", 0)
        if seconds > 0:
            shown["MB/s per pull"] = round(self.data.get("pull_bytes", 0) / seconds / 1e6, 1)
        return shown

    def is_empty(self) -> bool:
        # A gauge that fell to 0 is news.
        return not self.data


class MooncakeV2Prometheus(KVConnectorPromMetrics):
    """``vllm:kvpp_<name>_total`` for each counter, ``vllm:kvpp_<name>`` for each gauge."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def per_engine(kind: Any, name: str, text: str, **how: Any) -> Any:  # noqa: ANN401 - untyped
            metric = metric_types[kind](
                name=f"vllm:kvpp_{name}", documentation=text, labelnames=labelnames, **how
            )
            return create_metric_per_engine(metric, per_engine_labelvalues)

        self._counters: dict[str, Any] = {
            name: per_engine(Counter, name, text) for name, text in COUNTERS.items()
        }
        self._gauges: dict[str, Any] = {
            name: per_engine(Gauge, name, text, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        for name, (text, causes) in CAUSES.items():
            metric = metric_types[Counter](
                name=f"vllm:kvpp_{name}", documentation=text, labelnames=[*labelnames, "cause"]
            )
            for cause in causes:
                labelled = {engine: [*v, cause] for engine, v in per_engine_labelvalues.items()}
                self._counters[f"{name}/{cause}"] = create_metric_per_engine(metric, labelled)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
            elif name in self._gauges:
                self._gauges[name][engine_idx].set(value)
