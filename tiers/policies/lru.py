"""Least recently used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from ..base import SlotMask
from .order import FEW, ArraySource, EvictionOrder, heap_arrays
from .parts.log import SCAN_FEW, RecencyLog, Search


class LruOrder(EvictionOrder):
    """Exact LRU: evicts the slot whose last use is longest ago. 20 bytes a slot."""

    _name = "lru"

    def __init__(self, capacity: int, arrays: ArraySource = heap_arrays) -> None:
        super().__init__(capacity, arrays)
        self._recency = RecencyLog(self._name, capacity, arrays)

    def insert(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        self._recency.append(slots)

    def touch(self, slots: Sequence[int]) -> None:
        self._recency.append(slots)

    def settle(self, slots: Sequence[int]) -> None:
        self._recency.append(slots)

    def remove(self, slots: Sequence[int]) -> None:
        self._recency.discard(slots)

    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        few = SCAN_FEW if limit <= FEW else 0
        found = self._recency.scan(Search(wanted, mask, window), few=few)
        return list(islice(found, max(limit, 0)))

    def clear(self) -> None:
        self._recency.clear()

    def reconcile(self, present: np.ndarray) -> None:
        self._recency.rebuild(present)

    def __contains__(self, slot: object) -> bool:
        return slot in self._recency
