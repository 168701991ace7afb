"""Output of a benchmark: progress while it runs, then tables with ratios and goals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table as RichTable
from rich.text import Text

from .bench_results import (
    CLIENT,
    CONTENDERS,
    LIMIT,
    LMCACHE,
    NONE,
    OURS,
    PAGES,
    VLLM,
    Table,
    row_facts,
)

PLAIN_WIDTH = 150
"""Width in columns if the output is not a terminal."""
PLAIN_EVERY_S = 5.0
"""Shortest time between two progress lines if the output is not a terminal."""
TITLES = {
    OURS: "ours",
    VLLM: "vLLM",
    LMCACHE: "LMCache",
    CLIENT: CLIENT,
    PAGES: "per page",
    LIMIT: "limit",
    NONE: "none",
}
NOTHING = "–"


class Reporter:
    """Prints progress: a live line on a terminal, periodic lines elsewhere."""

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        plain = Console()
        self.console = console or (plain if plain.is_terminal else Console(width=PLAIN_WIDTH))
        self._clock = clock
        self._status: Status | None = None
        self._next_s = 0.0

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """Report progress under the name of a measurement."""
        self._next_s = 0.0
        if not self.console.is_terminal:
            self.print(f"{name} ...")
            yield
            return
        with self.console.status(name) as status:
            self._status = status
            try:
                yield
            finally:
                self._status = None

    def progress(self, text: str) -> None:
        """Report the current step."""
        if self._status is not None:
            self._status.update(text)
        elif self._clock() >= self._next_s:
            self._next_s = self._clock() + PLAIN_EVERY_S
            self.print(f"    {text}")

    def print(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, highlight=False, markup=False)

    def table(self, table: Table) -> None:
        """Print the table of one measurement."""
        self.console.print(render(table))
        self.console.print(Text(table.note, style="dim"))
        self.console.print()


def render(table: Table) -> RichTable:
    """Return a table with a row per quantity and case, and a column per contender with figures."""
    rows = [row_facts(row) for row in table.rows]
    made = RichTable(box=SIMPLE_HEAD, pad_edge=False, title=table.title, title_justify="left")
    (_, *titles, unit, goal), lines = table_cells(rows)
    made.add_column("", no_wrap=True)
    for title in titles:
        made.add_column(title, justify="right", no_wrap=True)
    made.add_column(unit, no_wrap=True)
    made.add_column(goal, no_wrap=True)
    before = ""
    for row, (name, *cells, goals) in zip(rows, lines, strict=True):
        if row["case"] != before:
            before = row["case"]
            made.add_row(Text(before, style="bold"))
        shown = Text(goals)
        shown.highlight_regex(r"[^,]+✓", "green")
        shown.highlight_regex(r"[^,]+✗", "red")
        made.add_row(f"  {name}", *cells, shown)
    return made


def table_cells(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heading and the cells of rows of the JSON document.

    A contender without any figure has no column.
    """
    there = [who for who in CONTENDERS if any(who in row["median"] for row in rows)]
    others = [who for who in there if who != OURS]
    ratios = (f"ours / {TITLES[who]}" for who in others)
    head = ["quantity", *(TITLES[who] for who in there), *ratios, "unit", "goal"]
    lines = [
        [
            row["quantity"],
            *(_figure(row, who) for who in there),
            *(_ratio(row, who) for who in others),
            row["unit"],
            ", ".join(f"{each['goal']} {'✓' if each['met'] else '✗'}" for each in row["goals"]),
        ]
        for row in rows
    ]
    return head, lines


def number(value: float) -> str:
    """Return a number with three significant digits."""
    if value == 0:
        return "0"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def _figure(row: Mapping[str, Any], who: str) -> str:
    if who not in row["median"]:
        return NOTHING
    middle, spread = row["median"][who], row["spread"][who]
    return f"{number(middle)} ±{spread:.0%}" if spread else number(middle)


def _ratio(row: Mapping[str, Any], who: str) -> str:
    ratio = row["ratio"].get(who)
    return NOTHING if ratio is None else f"{number(ratio)}×"
