"""Draw the pictures of the documentation from the data in it: `make figures`.

    python -m kvcascade.tools.dev.site.figures

The picture of the README is made of `docs/benchmarks/first-token.json`, the charts of policies of
the tables in `docs/policies.md`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...commands.picture import draw_ratios, head, new_figure, save
from ..bench.first_token_plot import draw as draw_first_token
from .site_pages import BENCHMARKS, DOCS, ROOT

FIRST_TOKEN = "first-token"
TRACES: Mapping[str, str] = {
    "mooncake_conversation": "Chat service, one hour",
    "cc_agentic_global": "Coding agents, 3,865 requests",
    "tau_airline_toolagent": "Tool agents, 200 runs",
}
"""Traces with a chart, and their titles."""
SHOWN = ("prefix", "lru", "arc", "s3fifo", "optimum, late")
"""Rows of the tables that the charts show, in the order of `LINES`."""


@dataclass(frozen=True, slots=True)
class PolicyTable:
    """A table of hit ratios: one row for each policy, one column for each size."""

    sizes: Sequence[str]
    rows: Mapping[str, Sequence[float]]


def policy_table(page: str, trace: str) -> PolicyTable:
    """Return the first table of a trace in a page. Raises `ValueError` if there is none."""
    found = re.search(rf"^\| {trace} \|(.*)\n\|[-|]+\n((?:\|.*\n)+)", page, re.M)
    if found is None:
        raise ValueError(f"the page has no table of {trace}")
    rows: dict[str, list[float]] = {}
    for line in found[2].splitlines():
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = [float(cell.strip("*")) for cell in cells]
    return PolicyTable([cell.strip() for cell in found[1].strip("|").split("|")], rows)


def draw_policies(table: PolicyTable, title: str, path: Path) -> None:
    """Draw the share of input tokens that each policy finds, over the size of the tier."""
    figure = new_figure(7.6, 4.2)
    places = range(len(table.sizes))
    lines = {
        name.partition(",")[0]: (places, table.rows[name]) for name in SHOWN if name in table.rows
    }
    axes = draw_ratios(figure, lines, "size of the tier, as a share of the distinct blocks")
    axes.set_xticks(places, table.sizes)
    head(figure, title, "input tokens that the tier had when their request came")
    save(figure, path)


def main() -> None:
    """Draw every picture."""
    run = json.loads((ROOT / BENCHMARKS / f"{FIRST_TOKEN}.json").read_text())
    draw_first_token(run, ROOT / BENCHMARKS / f"{FIRST_TOKEN}.svg")
    page = (ROOT / DOCS / "policies.md").read_text()
    for trace, title in TRACES.items():
        draw_policies(policy_table(page, trace), title, ROOT / DOCS / f"policies-{trace}.svg")


if __name__ == "__main__":
    main()
