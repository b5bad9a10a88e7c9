"""The metrics of AscendStoreConnector."""

from dataclasses import dataclass

from kvpp_connect.connectors.ascend_store.counters import PoolFailure
from kvpp_connect.connectors.metrics import ConnectorPrometheus, ConnectorStats, MetricTable

TABLE = MetricTable(
    counters={
        "pool_lookups": "Prompts looked up in the pool.",
        "pool_lookup_seconds": "Seconds that look-ups took.",
        "pool_hit_tokens": "Prompt tokens found in the pool and ordered from there.",
        "pool_stored_blocks": "Blocks of which all objects are in the pool after a put.",
        "pool_unstored_blocks": "Blocks of which some object could not be put.",
        "pool_put_objects": "Objects written, over all ranks.",
        "pool_put_bytes": "KV bytes written, over all ranks.",
        "pool_put_seconds": "Seconds in the store's put calls, over all ranks.",
        "pool_present_objects": "Objects not written since the pool has them, over all ranks.",
        "pool_load_objects": "Objects loaded, over all ranks.",
        "pool_load_bytes": "KV bytes loaded, over all ranks.",
        "pool_load_seconds": "Seconds in the store's get calls, over all ranks.",
    },
    causes={
        "pool_failures": (
            "Objects, or batches of them, that did not get into or out of the pool, by cause.",
            tuple(cause.value for cause in PoolFailure),
        ),
    },
    gauges={
        "pool_pinned_blocks": "Blocks held since the pool's ranks still copy from them.",
    },
)


@dataclass
class PoolStats(ConnectorStats):
    """One report, or several in one."""

    table = TABLE

    def reduce(self) -> dict[str, int | float]:
        shown = super().reduce()
        for way in ("put", "load"):
            seconds = self.data.get(f"pool_{way}_seconds", 0)
            if seconds > 0:
                moved = self.data.get(f"pool_{way}_bytes", 0)
                shown[f"{way} MB/s per call"] = round(moved / seconds / 1e6, 1)
        return shown


class PoolPrometheus(ConnectorPrometheus):
    """The same for Prometheus."""

    table = TABLE
