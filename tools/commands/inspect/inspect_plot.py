"""`kvcascade inspect --plot`: draw one namespace as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import FormatError
from ....tiers.nvme.disk.filesystem import RealFileSystem
from .. import show
from ..path_folders import NamespaceFolder
from ..picture import DARK, INK, MAP_COLOURS, head, new_figure, save, tidy
from .namespace_report import NamespaceReport, slots_in_use

MAP_COLUMNS = 256
"""Cells per segment in the occupancy map; each shows the share of its slots in use."""
MAX_MAP_ROWS = 256


def plot_namespace(one: NamespaceFolder, found: NamespaceReport, path: Path) -> None:
    """Draw ages, idle times, reuse and the used slots of each segment to a PNG file.

    Raises a `KVCascadeError`, or `CommandError` without matplotlib.
    """
    if found.blocks is None:
        raise FormatError(found.problem or one.reason)
    figure = new_figure(12, 7.2)
    slots = slots_in_use(RealFileSystem(), one.folders[0])
    maps = slots.by_segment(one.layout.slots, list(one.segment_files()))
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
    head(figure, show.plain(found.label or found.name), _subtitle(found))
    save(figure, path)


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

    colours = LinearSegmentedColormap.from_list("use", MAP_COLOURS)
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
