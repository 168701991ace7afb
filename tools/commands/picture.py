"""One style for all pictures: colours that stay apart when printed grey, titles, lines, labels.

Functions import matplotlib when they are called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from ...errors import os_errors
from .command_line import CommandError, ExitCode

INK, DIM, FAINT = "#222222", "#666666", "#dddddd"
DARK, MIDDLE, LIGHT, PALE = "#12395b", "#d07a35", "#8db9d9", "#cccccc"
"""Fills from dark to light: their greys differ by a fifth or more."""
MAP_COLOURS = ("#eef3f6", LIGHT, DARK)
"""From empty to full."""
DPI = 160
TITLE_POINTS, TEXT_POINTS, SMALL_POINTS = 14, 9.5, 8.5
MISSING = "matplotlib is not installed; pip install 'kvcascade[plot]'"


@dataclass(frozen=True, slots=True)
class LineStyle:
    """Look of one line; lines differ by dash and marker too, for grey paper."""

    colour: str
    width: float = 1.4
    dash: str = "-"
    marker: str = "o"

    @property
    def options(self) -> Mapping[str, Any]:
        """Return the arguments of `Axes.plot`."""
        return {
            "color": self.colour,
            "linewidth": self.width,
            "linestyle": self.dash,
            "marker": self.marker,
            "markersize": 4.5,
        }


LINES = (
    LineStyle(DARK, 2.6),
    LineStyle(MIDDLE, 1.6, "-", "s"),
    LineStyle("#4f86b0", 1.6, "--", "^"),
    LineStyle("#777777", 1.4, "-.", "D"),
    LineStyle(INK, 1.2, ":", "."),
    LineStyle("#9a5b2a", 1.4, "--", "v"),
    LineStyle("#5a7d5a", 1.4, "-.", "x"),
    LineStyle("#999999", 1.2, "-", "."),
)
"""Styles of the first lines of a chart; more lines begin again."""


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure that needs no display. Raises `CommandError` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise CommandError(MISSING, ExitCode.MISSING) from None
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def head(figure: Any, title: str, subtitle: str) -> None:
    """Write a title and a line below it at the top left; any text is shown as it is."""
    inches = figure.get_size_inches()[1]
    texts = ((title, 0.28, TITLE_POINTS, "bold", INK), (subtitle, 0.56, TEXT_POINTS, "normal", DIM))
    for text, top, points, weight, colour in texts:
        figure.text(
            0.015, 1 - top / inches, text, ha="left", va="center", fontsize=points,
            fontweight=weight, color=colour, parse_math=False,
        )  # fmt: skip


def tidy(axes: Any, title: str = "", pad: float = 9) -> None:
    """Give axes a title on the left, `pad` points above, and no frame but the line below."""
    if title:
        axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=pad)
    axes.tick_params(length=0, colors=INK, labelsize=SMALL_POINTS)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def draw_ratios(
    figure: Any, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], label: str
) -> Any:
    """Draw a line for each sequence of places and ratios; return the axes.

    Names are on the right, in the order of the last ratios.
    """
    axes = figure.add_axes((0.075, 0.135, 0.745, 0.66))
    for (name, (places, ratios)), style in zip(lines.items(), cycle(LINES), strict=False):
        axes.plot(places, ratios, label=name, **style.options)
    axes.set_ylim(0, 1.06 * max(max(ratios) for _, ratios in lines.values()) or 1)
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:.0%}")
    axes.set_xlabel(label, parse_math=False, color=INK, fontsize=9)
    axes.grid(axis="y", alpha=0.25)
    tidy(axes)
    names = axes.legend(
        handles=sorted(axes.lines, key=lambda line: line.get_ydata()[-1], reverse=True),
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
        handlelength=3,
        fontsize=TEXT_POINTS,
        labelcolor="linecolor",
    )
    for text in names.get_texts():
        text.set_parse_math(False)
    return axes


def save(figure: Any, path: Path) -> None:
    """Write a figure as SVG if the name ends so, else as PNG. Raises the form of an `OSError`.

    The same figure always gives the same bytes.
    """
    import matplotlib

    is_svg = path.suffix == ".svg"
    with os_errors(f"writing {path}"), matplotlib.rc_context({"svg.hashsalt": "kvcascade"}):
        if is_svg:
            figure.savefig(path, format="svg", metadata={"Date": None})
        else:
            figure.savefig(path, format="png")
