"""Free slots as runs of adjacent slots, so that blocks transferred together lie together.

Used by the writer's thread only.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

Extent = tuple[int, int]
"""Run of slots: (first slot, number of slots)."""

_STALE_HEAP_FACTOR = 4
_STALE_HEAP_SLACK = 64


class ExtentPool:
    """A set of free slots. `take` and `free` cost O(log n) per run in the number of runs."""

    def __init__(self) -> None:
        self._length_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        """Entries (-length, start), including runs that no longer exist."""
        self._free = 0

    def __len__(self) -> int:
        """Return the number of free slots."""
        return self._free

    def take(self, n: int) -> list[Extent]:
        """Take `n` slots, from the longest runs first; at least that many must be free."""
        assert 0 <= n <= self._free, "more slots asked for than are free"
        taken: list[Extent] = []
        while n > 0:
            self._drop_stale()
            _, start = heapq.heappop(self._heap)
            length = self._remove(start)
            used = min(length, n)
            if used < length:
                self._add(start + used, length - used)
            taken.append((start, used))
            n -= used
        return taken

    def free(self, start: int, length: int = 1) -> None:
        """Free a run, which joins its neighbours. None of it may be free already."""
        end = start + length
        before = self._start_of_end.get(start)
        if before is not None:
            length += self._remove(before)
            start = before
        if end in self._length_at:
            length += self._remove(end)
        self._add(start, length)

    def carve(self, first: int, end: int) -> None:
        """Remove the slots `first .. end - 1` from the free ones."""
        for start, length in self.extents():
            stop = start + length
            if start < end and first < stop:
                self._remove(start)
                if start < first:
                    self._add(start, first - start)
                if end < stop:
                    self._add(end, stop - end)

    def extents(self) -> list[Extent]:
        """Return all runs, ascending."""
        return sorted(self._length_at.items())

    def _add(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_of_end[start + length] = start
        self._free += length
        heapq.heappush(self._heap, (-length, start))
        if len(self._heap) > _STALE_HEAP_FACTOR * len(self._length_at) + _STALE_HEAP_SLACK:
            self._heap = [(-length, start) for start, length in self._length_at.items()]
            heapq.heapify(self._heap)

    def _remove(self, start: int) -> int:
        length = self._length_at.pop(start)
        del self._start_of_end[start + length]
        self._free -= length
        return length

    def _drop_stale(self) -> None:
        heap = self._heap
        while heap and self._length_at.get(heap[0][1]) != -heap[0][0]:
            heapq.heappop(heap)


def runs(mask: npt.NDArray[np.bool_]) -> list[Extent]:
    """Return the runs of True in a mask, ascending."""
    padded = np.zeros(len(mask) + 2, dtype=np.bool_)
    padded[1:-1] = mask
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    starts, ends = edges[::2], edges[1::2]
    return list(zip(starts.tolist(), (ends - starts).tolist(), strict=True))
