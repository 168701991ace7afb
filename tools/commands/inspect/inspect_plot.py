"""`kvcascade inspect --plot`: draw one namespace as a picture."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import os_errors
from ....tiers.nvme.offline.reader import Location
from .. import show
from ..cache_access import opened
from ..command_line import CommandError, ExitCode
from .namespace_report import NamespaceReport, occupancy, report

INK, FAINT, DARK, LIGHT = "#222222", "#dddddd", "#1b4965", "#8ecae6"
DPI = 160
MAP_COLUMNS = 256
"""Cells per segment in the occupancy map; each shows the share of its slots in use."""
MAX_MAP_ROWS = 256
MISSING = "matplotlib is not installed; pip install 'kvcascade[plot]'"


def figure_of(width: float, height: float) -> Any:
    """Return an empty figure that needs no display. Raises `CommandError` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise CommandError(MISSING, ExitCode.MISSING) from None
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def plot_namespace(location: Location, path: Path) -> None:
    """Draw ages, idle times, reuse and the used slots of each segment to a PNG file.

    Raises a `KVCascadeError`, or `CommandError` without matplotlib.
    """
    figure = figure_of(12, 7.2)
    found = report(location, time.time())
    with opened(location, is_trusted=True) as cache:  # the report has just read the index
        maps = occupancy(cache, cache.index.snapshot())
    grid = figure.add_gridspec(
        2, 3, height_ratios=(1, 1.15), left=0.055, right=0.95, top=0.83, bottom=0.085,
        hspace=0.42, wspace=0.16,
    )  # fmt: skip
    for column, (title, counts) in enumerate(
        (
            ("Time since a block was written", found.age),
            ("Time since its last use", found.idle),
            ("Used again", found.reuse),
        )
    ):
        _draw_histogram(figure.add_subplot(grid[0, column]), title, counts)
    _draw_map(figure, figure.add_subplot(grid[1, :]), maps)
    figure.suptitle(
        show.plain(found.label or found.name), x=0.015, y=0.975, ha="left", fontsize=15,
        fontweight="bold", color=INK, parse_math=False,
    )  # fmt: skip
    figure.text(0.015, 0.91, _subtitle(found), ha="left", va="center", fontsize=9.5, color="#666")
    with os_errors(f"writing {path}"):
        figure.savefig(path, format="png")


def tidy(axes: Any, title: str) -> None:
    """Give axes a title on the left and no frame."""
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=9)
    axes.tick_params(length=0, colors=INK, labelsize=8.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def _subtitle(found: NamespaceReport) -> str:
    parts = [
        f"{found.name}: {found.blocks:,} blocks of {show.size(found.block_bytes)}, "
        f"{found.used_share:.0%} of {found.room:,} slots",
        f"{show.size(found.written_bytes)} written, {show.size(found.read_bytes)} read",
        found.state,
    ]
    return "; ".join(parts)


def _draw_histogram(axes: Any, title: str, counts: Mapping[str, int]) -> None:
    names, values = list(counts), list(counts.values())
    bars = axes.bar(range(len(values)), values, width=0.78, color=DARK)
    shown = [f"{value:,}" if value else "" for value in values]
    axes.bar_label(bars, labels=shown, fontsize=7.5, color=INK, padding=2)
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_yticks([])
    axes.margins(y=0.15)
    tidy(axes, f"{title}, blocks")


def _draw_map(figure: Any, axes: Any, maps: Mapping[int, Any]) -> None:
    """Draw the occupancy: rows are segments (or groups of them), columns are slots; darker is
    fuller."""
    rows = [_shares(used) for _, used in sorted(maps.items())] or [np.zeros(1)]
    table = np.array(rows)
    if len(table) > MAX_MAP_ROWS:
        pieces = np.array_split(table, MAX_MAP_ROWS)
        table = np.array([piece.mean(axis=0) for piece in pieces])
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("use", ["#eef3f6", LIGHT, DARK])
    image = axes.imshow(
        table, aspect="auto", cmap=colours, vmin=0, vmax=1, interpolation="nearest",
        extent=(0, 1, len(maps) or 1, 0),
    )  # fmt: skip
    axes.set_xticks([0, 0.5, 1], ["first slot", "middle", "last slot"])
    axes.set_ylabel("segment file", fontsize=9, color=INK)
    axes.yaxis.get_major_locator().set_params(integer=True)
    tidy(axes, "Occupancy of the segment files")
    axes.spines["bottom"].set_visible(False)
    bar = figure.colorbar(image, ax=axes, fraction=0.018, pad=0.012, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["free", "50 %", "in use"], fontsize=8.5)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)


def _shares(used: Any) -> Any:
    """Reduce the slots of a segment to at most `MAP_COLUMNS` shares of used slots."""
    if len(used) <= MAP_COLUMNS:
        return used.astype(float)
    return np.array([piece.mean() for piece in np.array_split(used, MAP_COLUMNS)])
