"""Report the metrics of the cascade as vLLM's offloading metrics.

vLLM refuses a metric that was not declared beforehand. Declarations and values are both made from
the lists in `observe.metrics`. Metrics of vLLM's own CPU tier are reported under its names, with
its declarations, so dashboards made for that tier stay whole.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
)

from ..manager.cascading import CascadingOffloadingManager
from ..observe.metrics import (
    LATENCY_BUCKETS_S,
    METRICS,
    VLLM_METRICS,
    Kind,
    Metric,
    MetricsSnapshot,
)
from .generation import cpu_tier_metrics


def definitions() -> dict[str, Any]:
    """Return the declarations for `OffloadingSpec.build_metric_definitions`."""
    theirs = cpu_tier_metrics()
    shared = {metric.full_name for metric in VLLM_METRICS} & theirs.keys()
    ours = {metric.full_name: _declared(metric) for metric in METRICS}
    return ours | {name: theirs[name] for name in sorted(shared)}


def _declared(metric: Metric) -> Any:
    if metric.kind is Kind.COUNTER:
        return OffloadingCounterMetadata(metric.documentation, metric.labels)
    if metric.kind is Kind.GAUGE:
        return OffloadingGaugeMetadata(metric.documentation, metric.labels)
    return OffloadingHistogramMetadata(metric.documentation, metric.labels, LATENCY_BUCKETS_S)


class MetricsReader:
    """Converts the manager's figures into vLLM's stats; counters as growth since the last call."""

    def __init__(self, manager: CascadingOffloadingManager, tokens_per_block: float) -> None:
        """`tokens_per_block`: prompt tokens that one served block saves."""
        self._manager = manager
        self._tokens_per_block = tokens_per_block
        theirs = cpu_tier_metrics()
        shared = [metric for metric in VLLM_METRICS if metric.full_name in theirs]
        self._metrics = (*METRICS, *shared)
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

    def read(self) -> OffloadingConnectorStats:
        """Return the current stats. Scheduler thread; cheap enough for once a second."""
        stats = OffloadingConnectorStats()
        manager = self._manager
        snapshot = MetricsSnapshot(
            manager.counters,
            manager.tier_states(),
            self._tokens_per_block,
            manager.waiting_requests,
        )
        for metric in self._metrics:
            for labels, value in metric.values(snapshot):
                self._send(stats, metric, labels, value)
        return stats

    def _send(
        self,
        stats: OffloadingConnectorStats,
        metric: Metric,
        labels: tuple[str, ...],
        value: float,
    ) -> None:
        name = metric.full_name
        if metric.kind is Kind.GAUGE:
            stats.set_gauge(name, value, labels)
        elif metric.kind is Kind.HISTOGRAM:
            stats.observe_histogram(name, value, labels)
        else:
            last = self._last.get((name, labels))
            if last is None or value > last:
                # A zero is sent, too: a series that begins with its first error has no increase.
                stats.increase_counter(name, value - (last or 0.0), labels)
                self._last[name, labels] = value
