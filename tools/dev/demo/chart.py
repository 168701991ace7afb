"""The demo's results as a picture: sources of the prompt tokens, and time to the first token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...commands.picture import DARK, INK, MIDDLE, PALE, head, new_figure, save, tidy
from .demo_results import Phase

SOURCES = (
    ("gpu", "device cache", DARK),
    ("cpu", "CPU tier", "#4f86b0"),
    ("nvme", "NVMe tier", "#b5d3e7"),
    ("remote", "remote tier", "#dbe9d3"),
    ("recomputed", "recomputed", MIDDLE),
)
WITH, WITHOUT = DARK, PALE
LABELLED_SHARE = 0.045
"""Smallest share of a bar that is wide enough for a number."""


def draw(phases: Sequence[Phase], subtitle: str, path: Path) -> None:
    """Write the picture as a PNG file."""
    figure = new_figure(12, 5.4)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _draw_sources(left, phases)
    _draw_times(right, phases)
    head(figure, "kvcascade: prompt tokens from the cache instead of computed again", subtitle)
    figure.subplots_adjust(left=0.155, right=0.985, top=0.76, bottom=0.085, wspace=0.14)
    save(figure, path)


def _draw_sources(axes: Any, phases: Sequence[Phase]) -> None:
    """Draw stacked bars, one per phase, as shares of its prompt tokens."""
    rows = range(len(phases))
    starts = [0.0] * len(phases)
    for field, label, colour in SOURCES:
        shares = [getattr(p.sources, field) / max(1, p.prompt_tokens) for p in phases]
        axes.barh(rows, shares, left=starts, height=0.62, color=colour, label=label)
        for row, (share, start) in enumerate(zip(shares, starts, strict=True)):
            if share >= LABELLED_SHARE:
                ink = INK if field in ("nvme", "remote") else "white"
                axes.text(
                    start + share / 2, row, f"{share:.0%}", ha="center", va="center",
                    fontsize=9.5, color=ink,
                )  # fmt: skip
        starts = [start + share for start, share in zip(starts, shares, strict=True)]
    names = [f"({p.key}) {p.title}\n{p.prompt_tokens:,} tokens" for p in phases]
    axes.set_yticks(rows, names, fontsize=9.5)
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.invert_yaxis()
    tidy(axes, "Where prompt tokens came from", pad=27)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 0.985), ncols=5, frameon=False, fontsize=9.5,
        handlelength=0.9, handleheight=0.9, columnspacing=1.1, handletextpad=0.5,
    )  # fmt: skip


def _draw_times(axes: Any, phases: Sequence[Phase]) -> None:
    """Draw percentiles of each phase beside those of the same requests without the cascade."""
    shown = [phase for phase in phases if phase.needs]
    groups = [
        (f"({phase.key})\n{name}", getattr(phase.ttft, field), getattr(phase.reference_ttft, field))
        for phase in shown
        for field, name in (("p50_s", "p50"), ("p95_s", "p95"))
    ]
    for offset, index, label, colour in (
        (-0.2, 2, "without offloading", WITHOUT),
        (0.2, 1, "with the cascade", WITH),
    ):
        heights = [float(group[index]) * 1000 for group in groups]
        places = [place + offset for place in range(len(groups))]
        bars = axes.bar(places, heights, width=0.38, color=colour, label=label)
        axes.bar_label(bars, fmt="%.0f", fontsize=9, color=INK, padding=2)
    axes.set_xticks(range(len(groups)), [group[0] for group in groups], fontsize=9.5)
    axes.set_yticks([])
    axes.margins(y=0.12)
    tidy(axes, "Time to first token, ms, same requests", pad=27)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 0.985), ncols=2, frameon=False, fontsize=9.5,
        handlelength=0.9, handleheight=0.9, columnspacing=1.4, handletextpad=0.5,
    )  # fmt: skip
