"""The metrics of MooncakeConnectorV2."""

from dataclasses import dataclass

from kvpp_connect.connectors.metrics import ConnectorPrometheus, ConnectorStats, MetricTable
from kvpp_connect.connectors.mooncake_v2.counters import FailureCause
from kvpp_connect.connectors.mooncake_v2.wire import BadMessage

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


TABLE = MetricTable(counters=COUNTERS, causes=CAUSES, gauges=GAUGES)


@dataclass
class MooncakeV2Stats(ConnectorStats):
    """One report, or several in one."""

    table = TABLE

    def reduce(self) -> dict[str, int | float]:
        shown = super().reduce()
        seconds = self.data.get("pull_seconds", 0)
        if seconds > 0:
            shown["MB/s per pull"] = round(self.data.get("pull_bytes", 0) / seconds / 1e6, 1)
        return shown


class MooncakeV2Prometheus(ConnectorPrometheus):
    """The same for Prometheus."""

    table = TABLE
