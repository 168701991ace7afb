"""Adaptive replacement cache.

N. Megiddo, D. Modha: "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. T1 holds
blocks used once, T2 blocks used again, B1 and B2 remember what left them; `target` is the share of
T1 that a hit in B1 grows and a hit in B2 shrinks.

Where this differs from the paper: a block may be pinned or protected, so REPLACE takes the next
block of the preferred list that may leave, and of the other list if there is none; and a miss is
reported at insertion, since it is the manager that decides what is stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from ..base import SlotMask
from .log import RecencyLog
from .order import ArraySource, EvictionOrder, heap_arrays

_TARGET_SCALE = 1_000_000
"""`target` is kept in millionths of a slot, so that it fits a persistent integer array."""


class ArcOrder(EvictionOrder):
    """ARC over slots; ghosts are 64-bit tags. Ghosts are forgotten at a restart, lists are not."""

    wants_tags = True

    def __init__(self, capacity: int, arrays: ArraySource = heap_arrays) -> None:
        super().__init__(capacity, arrays)
        self._t1 = RecencyLog("arc_t1", capacity, arrays)
        self._t2 = RecencyLog("arc_t2", capacity, arrays)
        self._target = arrays("arc_target", 1, np.int64)
        self._b1: OrderedDict[int, None] = OrderedDict()
        self._b2: OrderedDict[int, None] = OrderedDict()

    @property
    def target(self) -> float:
        """Wanted size of T1 in slots (`p` in the paper)."""
        return float(self._target[0]) / _TARGET_SCALE

    def insert(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        once: list[int] = []
        again: list[int] = []
        for slot, tag in zip(slots, tags, strict=True):
            if tag in self._b1:
                self._adapt(+max(1.0, len(self._b2) / len(self._b1)))
                del self._b1[tag]
                again.append(slot)
            elif tag in self._b2:
                self._adapt(-max(1.0, len(self._b1) / len(self._b2)))
                del self._b2[tag]
                again.append(slot)
            else:
                once.append(slot)
        self._t1.append(once)
        self._t2.append(again)
        self._trim_ghosts()

    def touch(self, slots: Sequence[int]) -> None:
        self._t1.discard(slots)
        self._t2.append(slots)

    def remove(self, slots: Sequence[int]) -> None:
        self._t1.discard(slots)
        self._t2.discard(slots)

    def evicted(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        for slot, tag in zip(slots, tags, strict=True):
            ghosts = self._b1 if slot in self._t1 else self._b2
            ghosts[tag] = None
        self.remove(slots)
        self._trim_ghosts()

    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        t1 = filter(wanted, self._t1.coldest(mask, window))
        t2 = filter(wanted, self._t2.coldest(mask, window))
        next1, next2 = next(t1, None), next(t2, None)
        t1_size = len(self._t1)
        found: list[int] = []
        while len(found) < limit and (next1 is not None or next2 is not None):
            prefer_t1 = t1_size > 0 and t1_size >= self.target
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
        self._b1.clear()
        self._b2.clear()
        self._target[0] = 0

    def reconcile(self, present: np.ndarray) -> None:
        in_t2 = np.fromiter((int(s) in self._t2 for s in present), bool, len(present))
        self._t2.rebuild(present[in_t2])
        self._t1.rebuild(present[~in_t2])
        self._target[0] = min(max(int(self._target[0]), 0), self.capacity * _TARGET_SCALE)

    def __contains__(self, slot: object) -> bool:
        return slot in self._t1 or slot in self._t2

    def _adapt(self, delta: float) -> None:
        wanted = min(max(self.target + delta, 0.0), float(self.capacity))
        self._target[0] = round(wanted * _TARGET_SCALE)

    def _trim_ghosts(self) -> None:
        while len(self._t1) + len(self._b1) > self.capacity and self._b1:
            self._b1.popitem(last=False)
        total = len(self._t1) + len(self._t2)
        while total + len(self._b1) + len(self._b2) > 2 * self.capacity and self._b2:
            self._b2.popitem(last=False)
