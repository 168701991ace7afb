"""The dashboard and the alerts, on a real Prometheus with the history of a real engine."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.checkers import checker, passes
from support.project import ROOT
from support.waiting import wait_until

from kvcascade.observe.metrics import METRICS, PREFIX, VLLM_METRICS, Kind
from kvcascade.tools.dev.server import free_port

DASHBOARD = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
ALERTS = ROOT / "docs" / "deploy" / "prometheus" / "alerts.yml"
HISTORY = ROOT / "tests" / "data" / "metrics-run.txt.gz"
"""Made by `python -m kvcascade.tools.dev.record_metrics`."""
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    (panel["title"], target["expr"]) for panel in PANELS for target in panel.get("targets", ())
]
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
FIRST_ROW = ("Working?", "Worth it?", "Full?", "Wear?", "Hurting?")
FIRST_ROW_TITLE_CHARACTERS = 26
"""A longer title is cut in a window of 1,520 pixels."""
QUIET = {f"{PREFIX}turn_wait_seconds_bucket"}
"""Metrics without a sample in a short run: no request had to wait for its turn."""
OF_THE_VARIABLES, OWN_LABELS = '{job=~"$job",model_name=~"$model",engine=~"$engine"', r"(,[^}]+)?\}"
"""Begin of every selector, and the rest: labels of one panel, such as a tier."""
VARIABLES = {"$job": ".*", "$model": ".*", "$engine": ".*", "$__rate_interval": "1m"}


def plain(expression: str) -> str:
    """Return a query with its variables replaced."""
    for name, value in {**VARIABLES, "$__range": "2m"}.items():
        expression = expression.replace(name, value)
    assert "$" not in expression.replace('"$1"', ""), expression
    return expression


def exported() -> set[str]:
    """Return the names of our metrics as Prometheus shows them."""
    suffix = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_bucket"}
    return {metric.full_name + suffix[metric.kind] for metric in (*METRICS, *VLLM_METRICS)}


class Prometheus:
    """A running Prometheus."""

    def __init__(self, address: str, at_s: float) -> None:
        """`at_s`: time of the queries, in seconds since the epoch."""
        self._address = address
        self._at_s = at_s

    def is_ready(self) -> bool:
        """Return True once it answers queries."""
        try:
            with urllib.request.urlopen(f"{self._address}/-/ready") as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def query(self, expression: str) -> list[Any]:
        """Return the series that a query finds at the end of the history."""
        asked = urllib.parse.urlencode({"query": expression, "time": self._at_s})
        with urllib.request.urlopen(f"{self._address}/api/v1/query?{asked}") as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        result: list[Any] = found["data"]["result"]
        return result


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that holds the history."""
    program, promtool = checker("prometheus"), checker("promtool")
    folder = tmp_path_factory.mktemp("prometheus")
    text = gzip.decompress(HISTORY.read_bytes()).decode()
    (folder / "history.txt").write_text(text)
    times = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"]
    create = ("tsdb", "create-blocks-from", "openmetrics", "history.txt", "data")
    subprocess.run([promtool, *create], cwd=folder, check=True, capture_output=True)
    (folder / "prometheus.yml").write_text("{}\n")
    port = free_port()
    options = {
        "config.file": "prometheus.yml",
        "storage.tsdb.path": "data",
        "storage.tsdb.retention.time": "100y",
        "web.listen-address": f"127.0.0.1:{port}",
    }
    command = [program, *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        found = Prometheus(f"http://127.0.0.1:{port}", max(times))
        wait_until(lambda: process.poll() is not None or found.is_ready())
        assert process.poll() is None, (folder / "log").read_text()
        yield found
    finally:
        process.kill()
        process.wait()


def test_every_query_finds_what_it_asks_for(prometheus: Prometheus) -> None:
    assert len(QUERIES) > 30
    empty = [
        f"{title}: {expression}"
        for title, expression in QUERIES
        if not QUIET.intersection(re.findall(r"vllm:\w+", expression))
        and not prometheus.query(plain(expression))
    ]
    assert not empty


def test_figures_of_the_first_row_are_those_of_the_run(prometheus: Prometheus) -> None:
    """12 prompts in random order, of which the device holds 4, the CPU tier 3, and the disk 10.

    The remote tier holds those that were used twice.
    """
    by_title = {panel["title"]: panel["targets"] for panel in PANELS}

    def value(title: str, target: int = 0) -> dict[str, float]:
        found = prometheus.query(plain(by_title[title][target]["expr"]))
        return {series["metric"].get("tier", ""): float(series["value"][1]) for series in found}

    hits = value("Working? Hit ratio by tier")
    assert set(hits) == {"cpu", "nvme", "remote"} and all(0 < share < 1 for share in hits.values())
    assert 0.1 < value("Worth it? Tokens saved")[""] < 1
    first_token = value("Worth it? First token", 1)[""]
    assert 0.001 < first_token < 60
    assert all(0.9 <= share <= 1 for share in value("Full? Fill by tier").values())
    assert value("Wear? Rewrites per day")["nvme"] > 1
    assert value("Hurting? Errors, losses", 0) == {"": 0}, "zero is told, and not left out"


def test_wear_is_that_of_all_models_of_a_host(tmp_path: Path) -> None:
    """Two models share a disk of 500 bytes; the second engine of one is no reporter, and the last
    server's second process keeps an older value."""
    engines = {("a:1", ""): ("one", 600, 500), ("a:2", ""): ("one", 0, 0),
               ("a:3", ""): ("two", 400, 500),
               ("b:1", "7"): ("one", 700, 500), ("b:1", "8"): ("one", 600, 500)}  # fmt: skip
    series = [
        {
            "series": f'{PREFIX}{metric}{{job="vllm",instance="{at}",model_name="{model}",'
            f'engine="0",tier="nvme",pid="{pid}"}}',
            "values": f"{value}x9",
        }
        for (at, pid), (model, written, capacity) in engines.items()
        for metric, value in (
            ("day_written_bytes", written),
            ("day_read_bytes", written),
            ("tier_capacity_bytes", capacity),
        )
    ]
    expected = {"Wear? Rewrites per day": [2.0], "Written and read in 24 hours": [1700.0, 1700.0]}
    queries = [
        {
            "expr": plain(target["expr"]),
            "eval_time": "5m",
            "exp_samples": [{"labels": '{tier="nvme"}', "value": value}],
        }
        for panel in PANELS
        for target, value in zip(panel["targets"], expected.get(panel["title"], ()), strict=False)
    ]
    assert len(queries) == 3
    case = {"interval": "1m", "input_series": series, "promql_expr_test": queries}
    (tmp_path / "wear.yml").write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}))
    passes("promtool", "test", "rules", "wear.yml", cwd=tmp_path)


def test_a_healthy_engine_raises_no_alert_about_its_disk(prometheus: Prometheus) -> None:
    for rule in RULES:
        if rule["labels"]["severity"] == "warning":
            assert prometheus.query(rule["expr"]) == [], rule["alert"]


def test_alerts_are_right() -> None:
    assert f"{len(RULES)} rules found" in passes("promtool", "check", "rules", ALERTS)
    passes("promtool", "test", "rules", "alerts-test.yml", cwd=ALERTS.parent)
    passes("promtool", "check", "config", "prometheus.yml", cwd=ALERTS.parent)


def test_every_alert_is_tested_and_asks_for_metrics_that_exist() -> None:
    tests = (ALERTS.parent / "alerts-test.yml").read_text()
    for rule in RULES:
        assert rule["alert"] in tests
        assert set(re.findall(r"vllm:\w+", rule["expr"])) <= exported(), rule["alert"]
        assert {"summary", "description"} == set(rule["annotations"])


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    recorded = set(re.findall(r"^(vllm:\w+)", gzip.decompress(HISTORY.read_bytes()).decode(), re.M))
    asked = {name for _, expression in QUERIES for name in re.findall(r"vllm:\w+", expression)}
    assert asked and asked <= exported() | recorded
    assert {name for name in asked if name.startswith(PREFIX)} <= exported()


def test_the_first_row_answers_the_first_questions() -> None:
    row, *first = DASHBOARD["panels"][:7]
    assert row["type"] == "row" and [panel["gridPos"]["y"] for panel in first] == [1] * 6
    for panel in first:
        assert panel["title"].startswith(FIRST_ROW)
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert len(panel["title"]) <= FIRST_ROW_TITLE_CHARACTERS
        if len(panel["targets"]) > 2:
            assert panel["options"]["orientation"] == "horizontal", "a line for each name"


def test_every_panel_is_described_and_follows_the_variables() -> None:
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "job", "model", "engine"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in PANELS:
        assert len(panel["description"]) > 10, panel["title"]
    for title, expression in QUERIES:
        selectors = re.findall(r"vllm:\w+(\{[^}]*\})?", expression)
        assert all(
            re.fullmatch(re.escape(OF_THE_VARIABLES) + OWN_LABELS, selector)
            for selector in selectors
        ), title


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        cells = {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and max(columns) < 24, panel["title"]
        taken |= cells


def test_nothing_in_the_dashboard_is_unknown_to_grafana() -> None:
    """Read into Grafana's own types and written again, it says the same."""
    models = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard", reason="pip install 'kvcascade[checks]'"
    )
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins")
    plugins.register_default_plugins()
    read = models.Dashboard.from_json(DASHBOARD)
    again = json.loads(encoder.JSONEncoder().encode(read))
    assert sorted(lost(DASHBOARD, again)) == []


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield the places of values that are gone or changed."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            if key in after:
                yield from lost(value, after[key], f"{path}.{key}")
            elif value not in (None, "", [], {}):
                yield f"{path}.{key}"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{path}[{number}]")
    elif before != after:
        yield f"{path}: {before!r} became {after!r}"


def test_the_history_is_one_that_the_recorder_makes() -> None:
    from kvcascade.tools.dev.record_metrics import SCRAPES, history

    text = gzip.decompress(HISTORY.read_bytes()).decode()
    assert text.endswith("# EOF\n")
    ratio = re.findall(r'^vllm:kvcascade_tier_used_ratio\{.*tier="nvme".*$', text, re.M)
    assert len(ratio) == SCRAPES
    scrape = '# HELP vllm:a_total A.\n# TYPE vllm:a_total counter\nvllm:a_total{b="c"} 2.0\n'
    assert history([(5.0, scrape), (6.5, scrape + "# TYPE python_x gauge\npython_x 1.0\n")]) == (
        "# TYPE vllm:a counter\n"
        'vllm:a_total{b="c",job="vllm",instance="localhost:8000"} 2.0 5.000\n'
        'vllm:a_total{b="c",job="vllm",instance="localhost:8000"} 2.0 6.500\n'
        "# EOF\n"
    )
