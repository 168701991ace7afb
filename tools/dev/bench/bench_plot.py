"""`kvcascade bench --plot`: draw the results as a picture.

Draws a `bench.json`, of this run or an older one, with one panel per measurement. A row's bars show
each contender relative to kvcascade, since rows have different units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...commands.bench.bench_results import LIMIT, LMCACHE, NONE, OURS, PAGES, VLLM
from ...commands.picture import DARK, INK, LIGHT, MIDDLE, PALE, head, new_figure, save, tidy

COLOURS = {
    OURS: DARK,
    VLLM: MIDDLE,
    LMCACHE: "#5a7d5a",
    PAGES: "#e9b98f",
    LIMIT: PALE,
    NONE: LIGHT,
}
NAMES = {
    OURS: "kvcascade",
    VLLM: "vLLM's own",
    LMCACHE: "LMCache",
    PAGES: "copy per page",
    LIMIT: "limit of the machine",
    NONE: "without offloading",
}
ROW_INCHES = 0.34
PANEL_INCHES = 0.95
MAX_RATIO = 4.0
"""Longest bar; longer bars are cut and marked."""


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Write the picture as a PNG file.

    Raises `CommandError` without matplotlib, and the mapped form of an `OSError`.
    """
    panels = [(table, _rows(table)) for table in document["measurements"]]
    panels = [(table, rows) for table, rows in panels if rows]
    heights = [len(rows) * ROW_INCHES + PANEL_INCHES for _, rows in panels] or [1.0]
    total = sum(heights) + 1.3
    figure = new_figure(11, total)
    grid = figure.add_gridspec(
        len(heights), 1, height_ratios=heights, left=0.36, right=0.975,
        top=1 - 1.3 / total, bottom=0.35 / total, hspace=0.62 / (sum(heights) / len(heights)),
    )  # fmt: skip
    for number, (table, rows) in enumerate(panels):
        _draw(figure.add_subplot(grid[number]), str(table["title"]), rows)
    head(figure, "kvcascade bench: each figure relative to kvcascade's own", _subtitle(document))
    if panels:
        handles = [
            figure.axes[0].barh(0, 0, color=COLOURS[name], label=NAMES[name]) for name in NAMES
        ]
        figure.legend(
            handles=handles, loc="upper right", bbox_to_anchor=(0.985, 1 - 0.62 / total),
            ncols=len(NAMES), frameon=False, fontsize=9,
        )  # fmt: skip
    save(figure, path)


def _rows(table: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the rows with a figure of kvcascade and of another contender."""
    return [row for row in table["rows"] if row["median"].get(OURS) and len(row["median"]) > 1]


def _draw(axes: Any, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    labels: list[str] = []
    for number, row in enumerate(rows):
        labels.append(f"{row['case']}: {row['quantity']}, {_unit(row)}")
        there = [name for name in NAMES if row["median"].get(name) is not None]
        height = 0.84 / len(there)
        for place, name in enumerate(there):
            value = float(row["median"][name])
            ratio = value / float(row["median"][OURS])
            shown = min(ratio, MAX_RATIO)
            y = number + (place - (len(there) - 1) / 2) * height
            axes.barh(y, shown, height=height * 0.9, color=COLOURS[name])
            cut = f" ({ratio:.0f}×, cut)" if ratio > MAX_RATIO else ""
            axes.text(
                shown + 0.015, y, f"{_number(value)}{cut}", va="center", fontsize=7, color=INK
            )
    axes.axvline(1, color=INK, linewidth=0.6, zorder=0)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.set_xlim(0, MAX_RATIO * 1.12)
    axes.set_xticks([0, 1, 2, 3, 4], ["0", "1×", "2×", "3×", "4×"])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    tidy(axes, title)


def _unit(row: Mapping[str, Any]) -> str:
    """Return the unit, with an arrow for the better direction."""
    unit = str(row["unit"])
    is_more_better = row.get("is_more_better", unit.endswith("/s"))  # missing in older files
    return f"{unit} {'↑' if is_more_better else '↓'}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _subtitle(document: Mapping[str, Any]) -> str:
    machine, versions = document.get("machine", {}), document.get("versions", {})
    parts = [f"{machine.get('cores', '?')} cores", str(machine.get("file_system", ""))]
    parts.append(str(machine.get("gpu", {}).get("name", "")))
    parts += [f"{name} {version}" for name, version in versions.items() if version][:4]
    parts.append(f"medians of {document.get('repeats', '?')} repeats")
    parts.append("↑ more is better, ↓ less is better")
    return ", ".join(filter(None, parts))
