"""The picture of the README, drawn from the JSON of `kvcascade bench --only first_token`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from ...commands.bench.bench_results import LMCACHE, NONE, OURS, VLLM
from ...commands.bench.machine_facts import headline
from ...commands.picture import DARK, DIM, INK, LIGHT, MIDDLE, PALE, head, new_figure, save, tidy
from .bench_page import samples_of
from .engine.first_token import MOMENTS, NAME, TTFT

BARS = (
    (NONE, "vLLM without offloading", PALE),
    (VLLM, "vLLM's own tiering (CPU, fs)", MIDDLE),
    (LMCACHE, "LMCache (CPU, fs_native)", LIGHT),
    (OURS, "kvcascade", DARK),
)
"""Contenders, their names, and their colours; those without figures are left out."""
_SHOWN = frozenset(f"{moment}: {TTFT}" for moment in MOMENTS)
GROUP_WIDTH, GAP = 0.87, 0.02
"""Width of the bars of one moment with their gaps, and of a gap."""
FACTS_COLUMNS = 180
"""Longest line of facts that fits into the width."""
TITLE = "Time to the first token of a long prompt, in milliseconds"


def medians(document: Mapping[str, Any]) -> tuple[str, dict[str, Mapping[str, float]]]:
    """Return the case, and the median of each contender by moment.

    Raises `ValueError` if the document is of another measurement.
    """
    for measurement in document["measurements"]:
        if measurement["name"] == NAME:
            rows = {row["quantity"]: row for row in measurement["rows"]}
            found = {moment: rows[f"{moment}: {TTFT}"]["median"] for moment in MOMENTS}
            return str(measurement["rows"][0]["case"]), found
    raise ValueError(f"the file has no measurement {NAME}")


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Draw one group of bars for each moment. Raises `ValueError`, and the form of an `OSError`."""
    case, found = medians(document)
    figure = new_figure(9.6, 4.0)
    axes = figure.add_axes((0.015, 0.155, 0.97, 0.58))
    there = [bar for bar in BARS if any(bar[0] in found[moment] for moment in MOMENTS)]
    step = GROUP_WIDTH / len(there)
    for place, (who, name, colour) in enumerate(there):
        at = [group + (place - (len(there) - 1) / 2) * step for group in range(len(MOMENTS))]
        heights = [found[moment].get(who, 0.0) for moment in MOMENTS]
        bars = axes.bar(at, heights, width=step - GAP, color=colour, label=name)
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=9.5, color=INK, padding=2)
    axes.set_xticks(range(len(MOMENTS)), MOMENTS)
    axes.set_yticks([])
    axes.margins(x=0.02, y=0.1)
    tidy(axes)
    axes.tick_params(axis="x", labelsize=11)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.008, 1.0), ncols=len(there), frameon=False,
        fontsize=10, handlelength=0.9, handleheight=0.9, columnspacing=1.6, handletextpad=0.5,
    )  # fmt: skip
    rows = [row for each in document["measurements"] for row in each["rows"]]
    shown = samples_of([row for row in rows if row["quantity"] in _SHOWN])
    head(figure, TITLE, f"{case}; the device's cache holds a third of them. {shown}")
    load = document["machine"]["load_average"][0]
    facts = f"{document['command']}: load {load:.1f} at the start; {headline(dict(document))}"
    facts = fill(facts, FACTS_COLUMNS)
    figure.text(0.015, 0.03, facts, fontsize=7.5, color=DIM, parse_math=False)
    save(figure, path)
