"""Write budget of a path: bytes that may be written in a day, over all its namespaces.

The totals of the day lie in the block tables and change with each commit, so they survive every
crash. What is granted and not committed yet counts as written. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ....endurance import DAY_S
from .namespace_writer import NamespaceWriter

UNLIMITED_SLOTS = 1 << 31
"""Number of slots that may be granted without a budget."""


class WriteBudget:
    """Bytes that may still be written today."""

    def __init__(
        self,
        limit_bytes: int | None,
        idle_written: Callable[[], int],
        wall_clock: Callable[[], float],
    ) -> None:
        """`idle_written` returns the bytes written in a day to namespaces that are not open."""
        self.limit_bytes = limit_bytes
        self._idle_written = idle_written
        self._wall_clock = wall_clock
        self._removed: list[tuple[float, int]] = []
        """Time of each removal of a namespace in the last day, and the bytes written to it in the
        day before."""

    def note_removed(self, written_bytes: int) -> None:
        """Count what was written in a day to a namespace that is removed now."""
        self._removed.append((self._wall_clock(), written_bytes))

    def left_bytes(self, namespaces: Iterable[NamespaceWriter]) -> int | None:
        """Return the bytes that may still be granted; None without a budget."""
        if self.limit_bytes is None:
            return None
        since_s = self._wall_clock() - DAY_S
        self._removed = [each for each in self._removed if each[0] > since_s]
        spent = self._idle_written() + sum(written for _, written in self._removed)
        for namespace in namespaces:
            spent += namespace.table.day_totals().written
            spent += namespace.space.granted * namespace.home.block_bytes
        return max(0, self.limit_bytes - spent)

    def allowed(self, namespaces: Iterable[NamespaceWriter], block_bytes: int) -> int:
        """Return how many more slots of a namespace may be granted."""
        left = self.left_bytes(namespaces)
        return UNLIMITED_SLOTS if left is None else left // block_bytes
