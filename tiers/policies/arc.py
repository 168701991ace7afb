"""Adaptive replacement cache.

N. Megiddo, D. Modha: "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. T1 holds
blocks used once, T2 blocks used again. B1 and B2 hold the ghosts of blocks evicted from T1 and T2.
`target` is the wanted size of T1. A hit in B1 raises it, a hit in B2 lowers it.

Differences from the paper: a block may be pinned or protected. REPLACE then takes the next
evictable block of the preferred list, or of the other list if there is none. A miss is seen when
`expect` announces it, at the latest when the block is inserted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ..base import SlotMask
from .order import ArraySource, EvictionOrder, heap_arrays, scalars
from .parts.ghosts import GhostLists
from .parts.log import RecencyLog, Search
from .parts.tags import NONE

_B1, _B2, _COMING = 0, 1, 2
_TARGET_SCALE = 1_000_000
"""Units of `target` per slot: it is stored in millionths, in a persistent integer array."""


class ArcOrder(EvictionOrder):
    """ARC over slots: about 70 bytes a slot, ghosts included. Ghosts are 64-bit tags."""

    wants_tags = True

    def __init__(self, capacity: int, arrays: ArraySource = heap_arrays) -> None:
        super().__init__(capacity, arrays)
        self._t1 = RecencyLog("arc_t1", capacity, arrays)
        self._t2 = RecencyLog("arc_t2", capacity, arrays)
        self._ghosts = GhostLists("arc_ghost", capacity, 3, arrays)
        self._target = scalars(arrays("arc_target", 1, np.int64))
        self._comes_from_b2 = False

    @property
    def target(self) -> float:
        """Wanted size of T1 in slots (`p` in the paper)."""
        return float(self._target[0]) / _TARGET_SCALE

    def expect(self, tags: Sequence[int]) -> None:
        ghosts = self._ghosts
        for tag in tags:
            was_in = ghosts.list_of(tag)
            if was_in in (NONE, _COMING):
                continue
            b1, b2 = ghosts.size(_B1), ghosts.size(_B2)
            self._adapt(max(1.0, b2 / b1) if was_in == _B1 else -max(1.0, b1 / b2))
            ghosts.add(_COMING, tag)
            self._comes_from_b2 = was_in == _B2

    def insert(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        once: list[int] = []
        again: list[int] = []
        self.expect(tags)
        for slot, tag in zip(slots, tags, strict=True):
            (once if self._ghosts.drop(tag) == NONE else again).append(slot)
        self._comes_from_b2 = False
        self._t1.append(once)
        self._t2.append(again)
        self._trim_ghosts()

    def touch(self, slots: Sequence[int]) -> None:
        self._t1.discard(slots)
        self._t2.append(slots)

    def settle(self, slots: Sequence[int]) -> None:
        self._t1.append([slot for slot in slots if slot in self._t1])

    def remove(self, slots: Sequence[int]) -> None:
        self._t1.discard(slots)
        self._t2.discard(slots)

    def evicted(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        for slot, tag in zip(slots, tags, strict=True):
            self._ghosts.add(_B1 if slot in self._t1 else _B2, tag)
        self.remove(slots)

    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        t1 = self._t1.scan(Search(wanted, mask, window))
        t2 = self._t2.scan(Search(wanted, mask, window))
        next1, next2 = next(t1, None), next(t2, None)
        t1_size, target = len(self._t1), self.target
        found: list[int] = []
        while len(found) < limit and (next1 is not None or next2 is not None):
            prefer_t1 = t1_size > target or (t1_size == target and self._comes_from_b2)
            if next1 is not None and (prefer_t1 or next2 is None):
                found.append(next1)
                next1 = next(t1, None)
                t1_size -= 1
            elif next2 is not None:
                found.append(next2)
                next2 = next(t2, None)
        return found

    def clear(self) -> None:
        self._t1.clear()
        self._t2.clear()
        self._ghosts.clear()
        self._target[0] = 0

    def reconcile(self, present: npt.NDArray[np.integer]) -> None:
        in_t2 = self._t2.holds(present)
        self._t2.rebuild(present[in_t2])
        self._t1.rebuild(present[~in_t2])
        self._ghosts.clear()
        self._target[0] = min(max(int(self._target[0]), 0), self.capacity * _TARGET_SCALE)

    def __contains__(self, slot: object) -> bool:
        return slot in self._t1 or slot in self._t2

    def _adapt(self, delta: float) -> None:
        wanted = min(max(self.target + delta, 0.0), float(self.capacity))
        self._target[0] = round(wanted * _TARGET_SCALE)

    def _trim_ghosts(self) -> None:
        ghosts = self._ghosts
        while ghosts.size(_B1) and len(self._t1) + ghosts.size(_B1) > self.capacity:
            ghosts.drop_oldest(_B1)
        total = len(self._t1) + len(self._t2)
        while ghosts.size(_B2) and total + len(ghosts) > 2 * self.capacity:
            ghosts.drop_oldest(_B2)
        while len(ghosts) > self.capacity:
            ghosts.drop_oldest(max((_B1, _B2, _COMING), key=ghosts.size))
