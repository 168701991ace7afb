"""The table of metrics and the dashboard name what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvcascade.handlers.node.remote.remote_wire import RemoteNote
from kvcascade.manager.counters import Counters
from kvcascade.manager.state import TierState
from kvcascade.observe.metrics import (
    METRICS,
    PREFIX,
    VLLM_METRICS,
    Kind,
    Metric,
    MetricsSnapshot,
)
from kvcascade.tools.dev.site import site_pages
from kvcascade.tools.dev.site.config_reference import UndescribedError
from kvcascade.tools.dev.site.site_pages import metric_table

DOCS = Path(__file__).resolve().parent.parent / "docs"


def exported() -> set[str]:
    """Names as Prometheus shows them."""
    suffix = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_bucket"}
    return {PREFIX + metric.name + suffix[metric.kind] for metric in METRICS}


def test_the_table_of_the_docs_has_every_metric() -> None:
    shown = re.findall(r"^\| `([^`]+?)(?:_total)?` \|", metric_table(), re.M)
    assert shown == [metric.full_name for metric in (*METRICS, *VLLM_METRICS)]


def test_a_metric_without_a_description_is_not_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = (*METRICS, Metric(Kind.GAUGE, "new", " ", (), lambda snapshot: iter(())))
    monkeypatch.setattr(site_pages, "METRICS", bare)
    with pytest.raises(UndescribedError, match="new"):
        metric_table()


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


def test_usual_reasons_of_dropped_uploads_are_reported_before_the_first_one() -> None:
    counters, remote = Counters.for_tiers(("cpu", "remote")), RemoteNote(None)
    (metric,) = (metric for metric in METRICS if metric.name == "remote_dropped_blocks")

    def dropped() -> dict[tuple[str, ...], float]:
        tier = TierState("remote", "STORAGE", 64, 0, 16, 0, remote=remote)
        return dict(metric.values(MetricsSnapshot(counters, [tier])))

    assert dropped() == {("remote", "full"): 0, ("remote", "resting"): 0}
    remote.unsent.update(full=3, dropped=2)
    assert dropped() == {
        ("remote", "full"): 3,
        ("remote", "resting"): 0,
        ("remote", "dropped"): 2,
    }


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
