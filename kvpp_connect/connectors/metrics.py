"""A connector's counters and gauges in the words of vLLM's log line and Prometheus.

A report maps names of counters to what was added since the last one, and names of gauges to the
value at that moment. A counter with a cause is called ``name/cause``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from prometheus_client import Counter, Gauge

from kvpp_connect.seam.api import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    create_metric_per_engine,
)

if TYPE_CHECKING:
    from kvpp_connect.seam.api import VllmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricTable:
    """All metrics of one connector: name to description.

    ``causes`` are counters with the label ``cause``, and its values.
    """

    counters: Mapping[str, str]
    causes: Mapping[str, tuple[str, tuple[str, ...]]] = field(
        default_factory=dict[str, tuple[str, tuple[str, ...]]]
    )
    gauges: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass
class ConnectorStats(KVConnectorStats):
    """One report, or several in one: counters are added up, of gauges the greatest is kept."""

    table: ClassVar[MetricTable]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            present = self.data.get(name, 0)
            is_gauge = name in self.table.gauges
            self.data[name] = max(present, value) if is_gauge else present + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        # A gauge that fell to 0 is news.
        return not self.data


class ConnectorPrometheus(KVConnectorPromMetrics):
    """``vllm:kvpp_<name>_total`` for each counter, ``vllm:kvpp_<name>`` for each gauge."""

    table: ClassVar[MetricTable]

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
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
            name: per_engine(Counter, name, text) for name, text in self.table.counters.items()
        }
        self._gauges: dict[str, Any] = {
            name: per_engine(Gauge, name, text, multiprocess_mode="mostrecent")
            for name, text in self.table.gauges.items()
        }
        for name, (text, causes) in self.table.causes.items():
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


class CountingSide(Protocol):
    """A connector's scheduler or worker side."""

    def take_counts(self) -> Mapping[str, float]:
        """Counters since the last call, and gauges, by metric name."""
        ...

    def close(self) -> None:
        """Stop. Idempotent."""
        ...


class ReportsMetrics:
    """What vLLM asks of both sides of a connector alike. Goes in front of vLLM's base class."""

    stats_class: ClassVar[type[ConnectorStats]]
    prometheus_class: ClassVar[type[ConnectorPrometheus]]
    # One of them, by the process's role.
    _scheduler: CountingSide | None
    _worker: CountingSide | None

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        side = self._worker or self._scheduler
        assert side is not None, "a connector has one side"
        counts = side.take_counts()
        return self.stats_class(data=dict(counts)) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return cls.stats_class(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPrometheus:
        return cls.prometheus_class(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
