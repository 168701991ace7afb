"""The table of metrics and the dashboard name what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvcascade.manager.counters import Counters
from kvcascade.manager.state import TierState
from kvcascade.observe.metrics import (
    METRICS,
    PREFIX,
    VLLM_METRICS,
    Kind,
    MetricsSnapshot,
    table,
)

DOCS = Path(__file__).resolve().parent.parent / "docs"


def exported() -> set[str]:
    """Names as Prometheus shows them."""
    suffix = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_bucket"}
    return {PREFIX + metric.name + suffix[metric.kind] for metric in METRICS}


def test_the_documented_table_is_the_table() -> None:
    assert table() in (DOCS / "metrics.md").read_text()
    assert all(f"`{metric.full_name}" in table() for metric in (*METRICS, *VLLM_METRICS))


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert targets
    asked = {name for t in targets for name in re.findall(rf"{PREFIX}\w+", t["expr"])}
    assert asked and asked <= exported()


def test_names_follow_the_rules_of_prometheus() -> None:
    names = [metric.full_name.removeprefix("vllm:") for metric in (*METRICS, *VLLM_METRICS)]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", name)
        assert not name.endswith(("_total", "_s", "_ms", "_bucket", "_sum", "_count"))


def test_what_one_tier_serves_those_above_it_missed() -> None:
    counters = Counters.for_tiers(("cpu", "nvme", "slow"))
    counters.lookup_misses, counters.loaded_blocks = 7, [100, 20, 3]
    (metric,) = (metric for metric in METRICS if metric.name == "tier_misses")
    missed = {tier: value for (tier,), value in metric.values(MetricsSnapshot(counters, []))}
    assert missed == {"cpu": 30, "nvme": 10, "slow": 7}


def test_shares_of_the_first_tier_are_shares_of_its_slots() -> None:
    counters = Counters.for_tiers(("cpu", "nvme"))
    counters.links[0].demote_refused_blocks = 4
    counters.store_sizes.extend([3, 2])
    first = TierState("cpu", "CPU", 64, 10, 16, 0, writing_blocks=4, reading_blocks=8)
    found = {
        metric.name: [value for _, value in metric.values(MetricsSnapshot(counters, [first]))]
        for metric in VLLM_METRICS
    }
    assert found == {
        "cpu_cache_usage_perc": [0.75],
        "cpu_cache_write_usage_perc": [0.25],
        "cpu_cache_read_usage_perc": [0.5],
        "cpu_allocation_size": [3, 2],
        "stores_skipped": [4],
    }
    assert not counters.store_sizes, "each sample is reported once"
