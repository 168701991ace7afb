"""What was written and read over the last day, in memory: for tiers that keep no record."""

from __future__ import annotations

from collections.abc import Callable

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


class NotedBudget:
    """A limit of bytes in any sliding day. Every write that ends is in the record, as if none
    failed."""

    def __init__(self, bytes_per_day: int, log: DayLog) -> None:
        self._bytes_per_day = bytes_per_day
        self._log = log
        self._in_flight_bytes = 0

    def left_bytes(self) -> int:
        """So many bytes may be written now."""
        return max(0, self._bytes_per_day - self._log.totals().written - self._in_flight_bytes)

    def started(self, size_bytes: int) -> None:
        """A write started."""
        self._in_flight_bytes += size_bytes

    def ended(self, size_bytes: int) -> None:
        """A write ended."""
        self._in_flight_bytes -= size_bytes
        self._log.add(size_bytes)
