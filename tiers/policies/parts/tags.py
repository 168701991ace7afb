"""Hash table of 64-bit tags of evicted blocks, in flat arrays.

Entries with equal hashes are linked by their numbers. A free list gives out the numbers. So other
arrays can hold facts about an entry under the same number, such as its place in a list.
"""

from __future__ import annotations

import numpy as np

from ..order import ArraySource, heap_arrays, scalars

NONE = -1
"""Number that stands for no entry."""

_FREE, _UNUSED, _COUNT = 0, 1, 2


class TagTable:
    """Table of up to `entries` tags, 16 to 20 bytes each; all operations take constant time.

    Links are entry numbers plus one, so that arrays of zeros are an empty table.
    """

    def __init__(self, name: str, entries: int, arrays: ArraySource = heap_arrays) -> None:
        self.entries = entries
        buckets = 1 << max(entries - 1, 1).bit_length()
        self._mask = buckets - 1
        self._heads = arrays(f"{name}_heads", buckets, np.int32)
        self._head = scalars(self._heads)
        self._next = scalars(arrays(f"{name}_chain", entries, np.int32))
        self._tag = scalars(arrays(f"{name}_tags", entries, np.uint64))
        self._state = scalars(arrays(f"{name}_state", 3, np.int64))

    def __len__(self) -> int:
        return self._state[_COUNT]

    def find(self, tag: int) -> int:
        """Return the entry with this tag, or `NONE`."""
        link = self._head[tag & self._mask]
        for _ in range(self.entries):
            if not link or self._tag[link - 1] == tag:
                break
            link = self._next[link - 1]
        return link - 1

    def add(self, tag: int) -> int:
        """Add an entry with a new tag and return it; there must be room."""
        state = self._state
        link = state[_FREE]
        if link:
            state[_FREE] = self._next[link - 1]
        else:
            assert state[_UNUSED] < self.entries, "a table of tags may not overflow"
            link = state[_UNUSED] = state[_UNUSED] + 1
        bucket = tag & self._mask
        self._tag[link - 1] = tag
        self._next[link - 1] = self._head[bucket]
        self._head[bucket] = link
        state[_COUNT] += 1
        return link - 1

    def drop(self, entry: int) -> None:
        """Remove an entry; its number may be given out again."""
        bucket = self._tag[entry] & self._mask
        link = self._head[bucket]
        if link == entry + 1:
            self._head[bucket] = self._next[entry]
        else:
            for _ in range(self.entries):
                after = self._next[link - 1]
                if after == entry + 1:
                    break
                link = after
            self._next[link - 1] = self._next[entry]
        self._next[entry] = self._state[_FREE]
        self._state[_FREE] = entry + 1
        self._state[_COUNT] -= 1

    def clear(self) -> None:
        """Remove all entries, whatever the arrays hold."""
        self._heads[:] = 0
        for i in range(len(self._state)):
            self._state[i] = 0
