"""Formatting for people: sizes, times, shares, bars and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...config.sizes import human
from ...tiers.endurance import DAY_S

NOTHING = "–"
UNKNOWN = "n/a"
PLAIN_WIDTH = 120
"""Columns where the output is not a terminal."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_UNITS = (("d", float(DAY_S)), ("h", 3600.0), ("min", 60.0))


class _PlainConsole(Console):
    """A console that prints labels and paths without reading markup in them."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(plain(text), **options)


def plain(text: str) -> str:
    """Return text with "?" for control characters and lone surrogates."""
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in text)


def console() -> Console:
    """Return the console for tables; it reads no markup."""
    found = _PlainConsole(highlight=False, markup=False, emoji=False)
    if not found.is_terminal:
        found.width = PLAIN_WIDTH
    return found


def size(count: int | float | None) -> str:
    """Return a number of bytes, rounded, with its unit."""
    return UNKNOWN if count is None else human(int(count))


def duration(seconds: float | None) -> str:
    """Return a time span in its largest unit."""
    if seconds is None:
        return UNKNOWN
    for name, unit in _UNITS:
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def bar(part: float, width: int = 24) -> str:
    """Return a bar of block characters; `part` is its share of the width."""
    eighths = round(max(0.0, min(1.0, part)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def facts(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    """Return a table of names and values."""
    table = Table(box=SIMPLE_HEAD, show_header=False, title=title, title_justify="left")
    table.add_column("", style="dim", no_wrap=True)
    table.add_column("", overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def columns(title: str, *names: str, right: Sequence[str] = ()) -> Table:
    """Return an empty table; the columns in `right` hold numbers."""
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for name in names:
        is_number = name in right
        table.add_column(
            name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold"
        )
    return table
