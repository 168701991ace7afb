"""Column of a progress bar: how many there are so far, and how many per second."""

from __future__ import annotations

from rich.progress import ProgressColumn, Task
from rich.text import Text


class RateColumn(ProgressColumn):
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
