"""Ghosts: bounded lists of evicted blocks by tag, oldest first, which survive a restart."""

from __future__ import annotations

import numpy as np

from ..order import ArraySource, heap_arrays, scalars
from .links import LinkedLists
from .tags import NONE, TagTable

SLACK = 1024
"""Number of ghosts beyond the limit. Ghosts are added at evictions and trimmed after the next
insert, since an inserted block may be the oldest ghost."""


class GhostLists:
    """Up to `limit + SLACK` ghosts in several lists; about 27 bytes a ghost."""

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
        """Return the number of ghosts in a list."""
        return self._order.size(list_)

    def list_of(self, tag: int) -> int:
        """Return the list of a ghost, or `NONE` if there is no such ghost."""
        entry = self._table.find(tag)
        return NONE if entry == NONE else self._list[entry]

    def add(self, list_: int, tag: int) -> None:
        """Add a ghost as the newest of a list; without room, the oldest ghost is removed."""
        self.drop(tag)
        if len(self._table) == self._table.entries:
            self.drop_oldest(max(range(self._lists), key=self.size))
        entry = self._table.add(tag)
        self._list[entry] = list_
        self._order.append(list_, entry)

    def drop(self, tag: int) -> int:
        """Remove a ghost and return its list, or `NONE` if there is no such ghost."""
        entry = self._table.find(tag)
        if entry == NONE:
            return NONE
        list_ = self._list[entry]
        self._order.remove(list_, entry)
        self._table.drop(entry)
        return list_

    def drop_oldest(self, list_: int) -> None:
        """Remove the oldest ghost of a list, which must not be empty.

        Raises `IndexError` for an empty list: its size is wrong, because an array was damaged.
        """
        entry = self._order.coldest(list_)
        if entry == NONE:
            raise IndexError(f"list {list_} of ghosts is empty, but has a size")
        self._order.remove(list_, entry)
        self._table.drop(entry)

    def clear(self) -> None:
        """Remove all ghosts, whatever the arrays hold."""
        self._table.clear()
        self._order.clear()
