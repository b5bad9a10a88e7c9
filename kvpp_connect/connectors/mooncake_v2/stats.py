"""The connector's counters in the words of vLLM's log line and Prometheus."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter

from kvpp_connect.seam.api import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    create_metric_per_engine,
)

if TYPE_CHECKING:
    from kvpp_connect.seam.api import VllmConfig

METRICS: dict[str, str] = {
    "pulls": "Pulls of a request's KV that succeeded, over all decode ranks.",
    "pull_bytes": "KV bytes read from prefill nodes, over all decode ranks.",
    "pull_peer_bytes": "KV bytes that decode ranks read from each other.",
    "pull_tokens": "Prompt tokens whose KV was pulled.",
    "pull_pieces": "Contiguous pieces read, over all decode ranks.",
    "pull_seconds": "Seconds spent in pulls, over all decode ranks.",
    "pull_failures": "Pulls of a request's KV that failed, over all decode ranks.",
    "leases_granted": "Requests handed over by a prefill node.",
    "leases_released": "Hand-overs that their reader gave back.",
    "leases_expired": "Hand-overs whose reader never came back.",
}


@dataclass
class MooncakeV2Stats(KVConnectorStats):
    """Sums since the last report; ``data`` maps names of ``METRICS`` to numbers."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        shown = {name: round(value, 3) for name, value in self.data.items()}
        seconds = self.data.get("pull_seconds", 0)
        if seconds > 0:
            shown["MB/s per pull"] = round(self.data.get("pull_bytes", 0) / seconds / 1e6, 1)
        return shown

    def is_empty(self) -> bool:
        return not any(self.data.values())


class MooncakeV2Prometheus(KVConnectorPromMetrics):
    """``vllm:kvpp_<name>_total`` for each of ``METRICS``."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, Any] = {
            name: create_metric_per_engine(
                metric_types[Counter](
                    name=f"vllm:kvpp_{name}", documentation=text, labelnames=labelnames
                ),
                per_engine_labelvalues,
            )
            for name, text in METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
