"""Write budget of a path: bytes that may be written in a day, over all its namespaces.

The totals of the day lie in the block tables and change with each commit, so they survive every
crash. Those of namespaces that were removed lie in the record of the path. What is granted and not
committed yet counts as written. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .namespace.namespace_writer import NamespaceWriter

UNLIMITED_SLOTS = 1 << 31
"""Number of slots that may be granted without a budget."""


class WriteBudget:
    """Bytes that may still be written today."""

    def __init__(
        self,
        limit_bytes: int | None,
        written_elsewhere: Callable[[], int],
    ) -> None:
        """`written_elsewhere` returns the bytes written in a day to namespaces that are not open,
        or were removed."""
        self.limit_bytes = limit_bytes
        self._written_elsewhere = written_elsewhere

    def left_bytes(self, namespaces: Iterable[NamespaceWriter]) -> int | None:
        """Return the bytes that may still be granted; None without a budget."""
        if self.limit_bytes is None:
            return None
        spent = self._written_elsewhere()
        for namespace in namespaces:
            spent += namespace.table.day_totals().written
            spent += namespace.space.granted * namespace.home.block_bytes
        return max(0, self.limit_bytes - spent)

    def allowed(self, namespaces: Iterable[NamespaceWriter], block_bytes: int) -> int:
        """Return how many more slots of a namespace may be granted."""
        left = self.left_bytes(namespaces)
        return UNLIMITED_SLOTS if left is None else left // block_bytes
