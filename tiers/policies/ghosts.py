"""Ghosts: bounded lists of what left, oldest first, found by tag; they survive a restart."""

from __future__ import annotations

import numpy as np

from .links import LinkedLists
from .order import ArraySource, heap_arrays, scalars
from .tags import NONE, TagTable

SLACK = 1024
"""Room beyond the limit, since ghosts are added when blocks leave, and old ones trimmed when the
next blocks have come: what comes may be the oldest ghost."""


class GhostLists:
    """Up to `limit` ghosts (and `SLACK`) in some lists. About 27 bytes a ghost."""

    def __init__(
        self, name: str, limit: int, lists: int = 1, arrays: ArraySource = heap_arrays
    ) -> None:
        entries = limit + SLACK
        self._table = TagTable(name, entries, arrays)
        self._order = LinkedLists(name, entries, lists, arrays)
        self._list = scalars(arrays(f"{name}_list", entries, np.uint8))
        self._lists = lists

    def __len__(self) -> int:
        return len(self._table)

    def size(self, list_: int) -> int:
        """Ghosts in a list."""
        return self._order.size(list_)

    def list_of(self, tag: int) -> int:
        """The list that a ghost is in, or `NONE` if there is no such ghost."""
        entry = self._table.find(tag)
        return NONE if entry == NONE else self._list[entry]

    def add(self, list_: int, tag: int) -> None:
        """Add a ghost as the newest of a list; where there is no room, the oldest one goes."""
        self.drop(tag)
        if len(self._table) == self._table.entries:
            self.drop_oldest(max(range(self._lists), key=self.size))
        entry = self._table.add(tag)
        self._list[entry] = list_
        self._order.append(list_, entry)

    def drop(self, tag: int) -> int:
        """Forget a ghost; returns the list that it was in, `NONE` if there is no such ghost."""
        entry = self._table.find(tag)
        if entry == NONE:
            return NONE
        list_ = self._list[entry]
        self._order.remove(list_, entry)
        self._table.drop(entry)
        return list_

    def drop_oldest(self, list_: int) -> None:
        """Forget the ghost that has been in this list for longest. There must be one."""
        entry = self._order.coldest(list_)
        self._order.remove(list_, entry)
        self._table.drop(entry)

    def clear(self) -> None:
        """Forget all; needs nothing of what the arrays hold."""
        self._table.clear()
        self._order.clear()
