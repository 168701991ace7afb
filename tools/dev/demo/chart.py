"""The demo's results as a picture: sources of the prompt tokens, and time to the first token.

Each row is one server, and the rows of a group answer the same requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...commands.picture import DARK, DIM, INK, MIDDLE, PALE, head, new_figure, save, tidy
from .demo_results import DemoTimes, Phase, Sources

SOURCES = (
    ("gpu", "device cache", DARK),
    ("cpu", "CPU tier", "#4f86b0"),
    ("nvme", "disk", "#b5d3e7"),
    ("remote", "remote tier", "#dbe9d3"),
    ("recomputed", "recomputed", MIDDLE),
)
DARK_FILLS = ("gpu", "cpu", "recomputed")
WITHOUT, TIERING, OURS = "no offloading", "vLLM's tiering", "kvcascade"
GAP = 0.6
"""Space between two groups, in rows."""
LABELLED_SHARE = 0.045
"""Smallest share of a bar that is wide enough for a number."""
HEIGHT = 0.78
HATCH = "////"
"""Marks recomputed tokens on grey paper, too."""


@dataclass(frozen=True, slots=True)
class ChartRow:
    """One bar: a server, and how it answered the requests of a phase."""

    at: float
    """Place from the top, in rows."""
    name: str
    sources: Sources
    ttft: DemoTimes


def draw(phases: Sequence[Phase], subtitle: str, facts: str, path: Path) -> None:
    """Write the picture as a PNG file; `facts` is the small line at its bottom."""
    shown = [phase for phase in phases if phase.needs]
    groups = list(_groups(shown))
    rows = [row for group in groups for row in group]
    figure = new_figure(12, 1.95 + 0.27 * (rows[-1].at + 1 if rows else 1))
    left, right = figure.subplots(1, 2, width_ratios=(1.55, 1), sharey=True)
    _draw_sources(left, rows)
    _draw_times(right, rows)
    for phase, group in zip(shown, groups, strict=True):
        middle = (group[0].at + group[-1].at) / 2
        left.annotate(
            f"({phase.key}) {phase.title}\n{phase.prompt_tokens:,} tokens", (0, middle),
            xycoords=("axes fraction", "data"), xytext=(-205, 0), textcoords="offset points",
            va="center", fontsize=9.5, color=INK, annotation_clip=False, parse_math=False,
        )  # fmt: skip
    left.set_yticks([row.at for row in rows], [row.name for row in rows], fontsize=9.5)
    for row, text in zip(rows, left.get_yticklabels(), strict=True):
        text.set_fontweight("bold" if row.name == OURS else "normal")
    left.invert_yaxis()
    head(figure, "kvcascade: prompt tokens from the cache instead of computed again", subtitle)
    inches = figure.get_size_inches()[1]
    figure.subplots_adjust(
        left=0.25, right=0.985, top=1 - 1.4 / inches, bottom=0.4 / inches, wspace=0.06
    )
    figure.text(0.015, 0.13 / inches, facts, fontsize=7.5, color=DIM, parse_math=False)
    save(figure, path)


def _groups(phases: Sequence[Phase]) -> Iterator[Sequence[ChartRow]]:
    """Yield the rows of each phase, the reference first."""
    at = 0.0
    for phase in phases:
        servers = [(WITHOUT, phase.reference.sources, phase.reference.ttft)]
        if phase.tiering is not None:
            servers.append((TIERING, phase.tiering.sources, phase.tiering.ttft))
        servers.append((OURS, phase.sources, phase.ttft))
        yield [ChartRow(at + number, *server) for number, server in enumerate(servers)]
        at += len(servers) + GAP


def _draw_sources(axes: Any, rows: Sequence[ChartRow]) -> None:
    """Draw stacked bars, one per server, as shares of its prompt tokens."""
    places = [row.at for row in rows]
    totals = [sum(getattr(row.sources, field) for field, _, _ in SOURCES) for row in rows]
    starts = [0.0] * len(rows)
    for field, label, colour in SOURCES:
        counts = [getattr(row.sources, field) for row in rows]
        shares = [count / max(1, total) for count, total in zip(counts, totals, strict=True)]
        axes.barh(
            places, shares, left=starts, height=HEIGHT, color=colour, label=label,
            edgecolor="white", linewidth=0, hatch=HATCH if field == "recomputed" else None,
        )  # fmt: skip
        for place, share, start in zip(places, shares, starts, strict=True):
            if share >= LABELLED_SHARE:
                axes.text(
                    start + share / 2, place, f"{share:.0%}", ha="center", va="center",
                    fontsize=9, color="white" if field in DARK_FILLS else INK,
                    bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.2},
                )  # fmt: skip
        starts = [start + share for start, share in zip(starts, shares, strict=True)]
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    tidy(axes, "Where prompt tokens came from", pad=27)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 0.985), ncols=5, frameon=False, fontsize=9.5,
        handlelength=0.9, handleheight=0.9, columnspacing=1.1, handletextpad=0.5,
        borderaxespad=0.2,
    )  # fmt: skip


def _draw_times(axes: Any, rows: Sequence[ChartRow]) -> None:
    """Draw the median of each server as a bar, and its 95th percentile as a line."""
    for row in rows:
        p50_ms, p95_ms = row.ttft.p50_s * 1000, row.ttft.p95_s * 1000
        axes.barh(row.at, p50_ms, height=HEIGHT, color=DARK if row.name == OURS else PALE)
        axes.plot((p50_ms, p95_ms), (row.at, row.at), color=DIM, linewidth=1.2)
        axes.plot(p95_ms, row.at, color=DIM, marker="|", markersize=7)
        axes.annotate(
            f"{p50_ms:.0f} / {p95_ms:.0f}", (p95_ms, row.at), xytext=(6, 0),
            textcoords="offset points", va="center", fontsize=9, color=INK,
        )  # fmt: skip
    axes.set_xticks([])
    axes.set_xlim(0, 1.32 * max((row.ttft.p95_s * 1000 for row in rows), default=1.0))
    axes.text(
        0, 1.025, "bar: p50, line: p95", transform=axes.transAxes, va="bottom", fontsize=9.5,
        color=DIM,
    )  # fmt: skip
    tidy(axes, "Time to first token, ms", pad=27)
