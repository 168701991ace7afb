"""Output of a benchmark: progress while it runs, then tables with ratios and goals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table as RichTable
from rich.text import Text

from .bench_results import CLIENT, CONTENDERS, LIMIT, LMCACHE, NONE, OURS, PAGES, VLLM, Row, Table

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
    there = [c for c in CONTENDERS if any(row.samples.get(c) for row in table.rows)]
    made = RichTable(box=SIMPLE_HEAD, pad_edge=False, title=table.title, title_justify="left")
    made.add_column("", no_wrap=True)
    for contender in there:
        made.add_column(TITLES[contender], justify="right", no_wrap=True)
    for contender in there[1:]:
        made.add_column(f"ours / {TITLES[contender]}", justify="right", no_wrap=True)
    made.add_column("unit", no_wrap=True)
    made.add_column("goal", no_wrap=True)
    before = ""
    for row in table.rows:
        if row.case != before:
            made.add_row(Text(row.case, style="bold"))
            before = row.case
        cells = [_figure(row, contender) for contender in there]
        cells += [_ratio(row, contender) for contender in there[1:]]
        made.add_row(f"  {row.quantity.name}", *cells, row.quantity.unit, _goals(row))
    return made


def number(value: float) -> str:
    """Return a number with three significant digits."""
    if value == 0:
        return "0"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def _figure(row: Row, contender: str) -> str:
    middle, spread = row.median(contender), row.spread(contender)
    if middle is None:
        return NOTHING
    return number(middle) if not spread else f"{number(middle)} ±{spread:.0%}"


def _ratio(row: Row, contender: str) -> str:
    ratio = row.ratio(contender)
    return NOTHING if ratio is None else f"{number(ratio)}×"


def _goals(row: Row) -> Text:
    text = Text()
    for goal, _, is_met in row.verdicts():
        text.append(", " if text else "")
        text.append(f"{goal.text} {'✓' if is_met else '✗'}", style="green" if is_met else "red")
    return text
