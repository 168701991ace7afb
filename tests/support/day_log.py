"""What was written and read over the last day, in memory: for tiers that keep no record."""

from __future__ import annotations

from collections.abc import Callable

from kvcascade.manager.admission import WriteBudget
from kvcascade.tiers.endurance import DayTotals, add, day_totals


class DayLog:
    """The record that a tier on disk has in its index."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._record = b""

    def add(self, written: int, read: int = 0) -> None:
        """So many bytes were written and read."""
        self._record = add(self._record, self._clock(), written, read)

    def totals(self) -> DayTotals:
        """The sums of the day that ends now."""
        return day_totals(self._record, self._clock())


class NotedBudget(WriteBudget):
    """A budget by such a record: every write that ends is in it, as if none failed."""

    def __init__(self, bytes_per_day: int, log: DayLog) -> None:
        super().__init__(bytes_per_day, log.totals)
        self._log = log

    def ended(self, size_bytes: int) -> None:
        super().ended(size_bytes)
        self._log.add(size_bytes)
