"""Least recently used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..base import SlotMask
from .order import ArraySource, EvictionOrder, heap_arrays
from .parts.log import RecencyLog


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
        return self._recency.find(limit, wanted, mask, window)

    def clear(self) -> None:
        self._recency.clear()

    def reconcile(self, present: np.ndarray) -> None:
        self._recency.rebuild(present)

    def __contains__(self, slot: object) -> bool:
        return slot in self._recency
