"""Prometheus metrics of the cascade, through vLLM's offloading metrics.

vLLM refuses a metric that was not declared beforehand, so the table below is the one list of what
there is; the same table makes the declarations and the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from .manager.cascading import CascadingOffloadingManager
from .manager.counters import Counters, LinkCounters

PREFIX = "vllm:kvcascade_"
Labelled = Iterator[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: name without prefix, help text, label names, and how its values are read."""

    name: str
    documentation: str
    labels: tuple[str, ...]
    values: Callable[[Counters], Labelled]


def _total(field: str) -> Callable[[Counters], Labelled]:
    def read(counters: Counters) -> Labelled:
        yield (), float(getattr(counters, field))

    return read


def _by_tier(field: str) -> Callable[[Counters], Labelled]:
    def read(counters: Counters) -> Labelled:
        for name, value in zip(counters.tier_names, getattr(counters, field), strict=True):
            yield (name,), float(value)

    return read


def _by_link(field: str) -> Callable[[Counters], Labelled]:
    def read(counters: Counters) -> Labelled:
        for name, link in zip(counters.tier_names[1:], counters.links, strict=True):
            yield (name,), float(getattr(link, field))

    return read


_LINK_FIELDS: dict[str, str] = {
    "demoted_blocks": "Blocks written to a tier.",
    "demoted_bytes": "Bytes written to a tier.",
    "demote_s": "Seconds of transfers to a tier.",
    "demote_failed_blocks": "Blocks that could not be written to a tier.",
    "demote_refused_blocks": "Blocks that admission or the write budget kept out of a tier.",
    "promoted_blocks": "Blocks read from a tier and verified.",
    "promoted_bytes": "Bytes read from a tier and verified.",
    "promote_s": "Seconds of transfers from a tier.",
    "promote_gone_blocks": "Blocks that had left a tier when they were read.",
    "promote_corrupt_blocks": "Blocks of a tier that failed verification: dropped, never served.",
    "promote_failed_blocks": "Blocks of a tier that could not be read.",
}
_TOTAL_FIELDS: dict[str, str] = {
    "lookup_misses": "Lookups that no tier could answer.",
    "stored_blocks": "Blocks that workers stored in the first tier.",
    "store_refused_busy": "Stores that were put off because slots were busy.",
    "store_truncated_blocks": "Blocks that were not stored because they could not fit.",
    "dropped_dirty_blocks": "Blocks that left the last tier that held them, unwritten.",
    "deadline_misses": "Pending reads that became misses by the deadline.",
    "budget_misses": "Lookups cut short by the promotion budget.",
    "resets": "Cache resets.",
}


def _counter_name(field: str) -> str:
    if field.endswith("_s"):
        return field[:-2] + "_seconds"
    return field


COUNTERS: tuple[Metric, ...] = (
    Metric("loaded_blocks", "Blocks that requests loaded, by the tier they came from.", ("tier",),
           _by_tier("loaded_blocks")),
    Metric("evicted_blocks", "Blocks that left a tier to make room.", ("tier",),
           _by_tier("evicted_blocks")),
    *(Metric(_counter_name(field), text, ("tier",), _by_link(field))
      for field, text in _LINK_FIELDS.items()),
    *(Metric(field, text, (), _total(field)) for field, text in _TOTAL_FIELDS.items()),
)  # fmt: skip
"""Every counter. A counter is a plain integer of `Counters`; what is sent is its growth."""

_USAGE = PREFIX + "tier_used_ratio"
_DIRTY = PREFIX + "tier_dirty_ratio"
assert set(_LINK_FIELDS) == set(LinkCounters.__dataclass_fields__)


def definitions() -> dict[str, Any]:
    """What `OffloadingSpec.build_metric_definitions` declares."""
    declared: dict[str, Any] = {
        PREFIX + metric.name: OffloadingCounterMetadata(metric.documentation, metric.labels)
        for metric in COUNTERS
    }
    declared[_USAGE] = OffloadingGaugeMetadata("Share of a tier's slots in use.", ("tier",))
    declared[_DIRTY] = OffloadingGaugeMetadata(
        "Share of a tier's slots whose block is in no tier below.", ("tier",)
    )
    return declared


class MetricsReader:
    """Turns the manager's counters into vLLM's stats: growth since the last call."""

    def __init__(self, manager: CascadingOffloadingManager) -> None:
        self._manager = manager
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

    def read(self) -> OffloadingConnectorStats:
        """Called by the scheduler thread; cheap enough for every few steps."""
        stats = OffloadingConnectorStats()
        for metric in COUNTERS:
            for labels, value in metric.values(self._manager.counters):
                grown = value - self._last.get((metric.name, labels), 0.0)
                if grown > 0:
                    stats.increase_counter(PREFIX + metric.name, grown, labels)
                    self._last[metric.name, labels] = value
        for name, blocks, capacity, dirty in self._manager.usage():
            stats.set_gauge(_USAGE, blocks / capacity, (name,))
            stats.set_gauge(_DIRTY, dirty / capacity, (name,))
        return stats
