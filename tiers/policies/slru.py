"""Segmented LRU.

R. Karedla, J. S. Love, B. G. Wherry: "Caching Strategies to Improve Disk System Performance", IEEE
Computer 27(3), 1994, with four segments instead of two (as Q. Huang et al.: "An Analysis of
Facebook Photo Caching", SOSP 2013). A use moves a block to the next higher segment. If a segment is
too long, its coldest block falls to the segment below. The victim is the coldest block of the
lowest segment.

Differences from the papers: while the tier is not full, new blocks enter the lowest segment with a
free place. A block may be pinned or protected; the next one is then evicted instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from ..base import SlotMask
from .order import ArraySource, EvictionOrder, heap_arrays, scalars
from .parts.links import StampedLists
from .parts.log import NO_PLACE, Search

SEGMENTS = 4
_SEGMENT_SHIFT = 56


class SlruOrder(EvictionOrder):
    """SLRU over slots: 17 bytes a slot."""

    def __init__(self, capacity: int, arrays: ArraySource = heap_arrays) -> None:
        super().__init__(capacity, arrays)
        self._segments = StampedLists("slru", capacity, SEGMENTS, arrays)
        self._segment_array = arrays("slru_segment", capacity, np.uint8)
        self._segment_of = scalars(self._segment_array)
        self._limits = [(capacity + i) // SEGMENTS for i in range(SEGMENTS)]

    def insert(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        segments = self._segments
        for slot in slots:
            roomy = (i for i in range(SEGMENTS) if segments.size(i) < self._limits[i])
            self._append(next(roomy, 0), slot)

    def touch(self, slots: Sequence[int]) -> None:
        segments, segment_of = self._segments, self._segment_of
        for slot in slots:
            old = segment_of[slot]
            new = min(old + 1, SEGMENTS - 1)
            segments.remove(old, slot)
            self._append(new, slot)
            for above in range(new, 0, -1):
                if segments.size(above) <= self._limits[above]:
                    break
                falling = segments.coldest(above)
                segments.remove(above, falling)
                self._append(above - 1, falling)

    def settle(self, slots: Sequence[int]) -> None:
        # Each segment keeps its number of these slots; the least recent ones go to the lowest.
        segments = sorted(self._segment_of[slot] for slot in slots)
        self.remove(slots)
        for segment, slot in zip(segments, slots, strict=True):
            self._append(segment, slot)

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._segments.remove(self._segment_of[slot], slot)

    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        coldest_first = chain.from_iterable(map(self._segments.iterate, range(SEGMENTS)))
        return Search(wanted, mask, window).pick(coldest_first, limit, self._places)

    def clear(self) -> None:
        self._segments.clear()

    def reconcile(self, present: npt.NDArray[np.integer]) -> None:
        expected = np.zeros(self.capacity, np.bool_)
        expected[present] = True
        contents: list[npt.NDArray[np.int64]] = []
        for segment in range(SEGMENTS):
            known = np.asarray(self._segments.walk(segment), np.int64)
            kept = known[expected[known]]
            expected[kept] = False
            contents.append(kept)
        contents[0] = np.concatenate((np.flatnonzero(expected), contents[0]))
        self._segments.rebuild(contents)
        for segment, slots in enumerate(contents):
            self._segment_array[slots] = segment

    def __contains__(self, slot: object) -> bool:
        return slot in self._segments

    def _places(self) -> npt.NDArray[np.int64]:
        """Return numbers of the slots that grow in the order of eviction."""
        place = (self._segment_array.astype(np.int64) << _SEGMENT_SHIFT) + self._segments.stamps
        return np.where(self._segments.is_listed(), place, NO_PLACE)

    def _append(self, segment: int, slot: int) -> None:
        self._segments.append(segment, slot)
        self._segment_of[slot] = segment
