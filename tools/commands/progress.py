"""Progress with a rate on standard error; none is shown for JSON or a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

Advance = Callable[[int], None]
"""Callback with the progress since the last call: a number of blocks, bytes or objects."""


class _RateColumn(ProgressColumn):
    """Number of things so far, and per second."""

    def __init__(self, things: str) -> None:
        """`things`: what is counted, in the plural."""
        super().__init__()
        self._things = things

    def render(self, task: Task) -> Text:
        """Return the number of things, with their rate once it is known."""
        rate = task.finished_speed or task.speed
        shown = "" if rate is None else f", {rate:,.0f}/s"
        return Text(f"{task.completed:,.0f} {self._things}{shown}")


def progress_of(
    name: str, blocks: int | None, block_bytes: int, is_quiet: bool
) -> AbstractContextManager[Advance]:
    """Show bytes and their rate; the function advances by numbers of blocks."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    total = None if blocks is None else blocks * block_bytes
    return _shown(name, columns, total, is_quiet, step=block_bytes)


def counting(
    name: str,
    things: str,
    is_quiet: bool = False,
    *,
    total: int | None = None,
    console: Console | None = None,
) -> AbstractContextManager[Advance]:
    """Show a number of things and its rate, and a bar if the total is known."""
    unknown = (SpinnerColumn(), TextColumn("{task.description}"))
    columns = unknown if total is None else Progress.get_default_columns()
    return _shown(name, (*columns, _RateColumn(things)), total, is_quiet, console=console)


@contextmanager
def _shown(
    name: str,
    columns: tuple[ProgressColumn, ...],
    total: int | None,
    is_quiet: bool,
    *,
    step: int = 1,
    console: Console | None = None,
) -> Iterator[Advance]:
    console = console or Console(stderr=True)
    if is_quiet or not console.is_terminal:
        yield lambda count: None
        return
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=total)
        yield lambda count: bar.advance(task, count * step)
