"""The table of metrics and the dashboard name what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvcascade.metrics import METRICS, PREFIX, Kind, table

DOCS = Path(__file__).resolve().parent.parent / "docs"


def exported() -> set[str]:
    """Names as Prometheus shows them."""
    suffix = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_bucket"}
    return {PREFIX + metric.name + suffix[metric.kind] for metric in METRICS}


def test_the_documented_table_is_the_table() -> None:
    assert table() in (DOCS / "metrics.md").read_text()


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert targets
    asked = {name for t in targets for name in re.findall(rf"{PREFIX}\w+", t["expr"])}
    assert asked <= exported()


def test_names_follow_the_rules_of_prometheus() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", name)
        assert not name.endswith(("_total", "_s", "_ms", "_bucket", "_sum", "_count"))
