"""Report the metrics of the cascade as vLLM's offloading metrics.

vLLM refuses a metric that was not declared beforehand. Declarations and values are both made from
the lists in `observe.metrics`. Metrics of vLLM's own CPU tier are reported under its names, with
its declarations, so dashboards made for that tier stay whole.
"""

from __future__ import annotations

from collections.abc import Callable
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

STATS_INTERVAL_S = 1.0
"""Shortest time between two reads of the metrics, so that steps stay cheap."""
STATS_AT_END_S = 0.1
"""Shortest time between two reads if a request has ended in between and others are running."""


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
    """Converts the manager's figures into vLLM's stats; counters as growth since the last call.

    The scheduler's thread calls it.
    """

    def __init__(
        self,
        manager: CascadingOffloadingManager,
        tokens_per_block: float,
        clock: Callable[[], float],
    ) -> None:
        """`tokens_per_block`: prompt tokens that one served block saves. `clock` returns monotonic
        seconds."""
        self._manager = manager
        self._tokens_per_block = tokens_per_block
        self._clock = clock
        self._read_s = 0.0
        """Time of the last read."""
        self.due_s = 0.0
        """Time at which the next read is due."""
        self._live_requests = 0
        theirs = cpu_tier_metrics()
        shared = [metric for metric in VLLM_METRICS if metric.full_name in theirs]
        self._metrics = (*METRICS, *shared)
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

    def note_begin(self) -> None:
        """Count a request that began."""
        self._live_requests += 1

    def note_end(self) -> None:
        """Count a request that ended, and make the next read due soon.

        After the last request it is due at once, because an idle engine asks for no stats.
        """
        self._live_requests -= 1
        soon_s = self._read_s + STATS_AT_END_S if self._live_requests > 0 else 0.0
        self.due_s = min(self.due_s, soon_s)

    def read_if_due(self) -> OffloadingConnectorStats | None:
        """Return the current stats; None if no read is due."""
        now_s = self._clock()
        if now_s < self.due_s:
            return None
        self._read_s, self.due_s = now_s, now_s + STATS_INTERVAL_S
        return self._read()

    def _read(self) -> OffloadingConnectorStats:
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
