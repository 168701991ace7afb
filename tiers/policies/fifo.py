"""First in, first out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..base import SlotMask
from .log import RecencyLog
from .order import ArraySource, EvictionOrder, heap_arrays


class FifoOrder(EvictionOrder):
    """FIFO: evicts the slot that was filled longest ago; uses change nothing. 20 bytes a slot."""

    def __init__(self, capacity: int, arrays: ArraySource = heap_arrays) -> None:
        super().__init__(capacity, arrays)
        self._queue = RecencyLog("fifo", capacity, arrays)

    def insert(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        self._queue.append(slots)

    def touch(self, slots: Sequence[int]) -> None:
        pass

    def settle(self, slots: Sequence[int]) -> None:
        self._queue.append(slots)

    def remove(self, slots: Sequence[int]) -> None:
        self._queue.discard(slots)

    def evicted(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        self._queue.discard(slots)

    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        return self._queue.find(limit, wanted, mask, window)

    def clear(self) -> None:
        self._queue.clear()

    def reconcile(self, present: np.ndarray) -> None:
        self._queue.rebuild(present)

    def __contains__(self, slot: object) -> bool:
        return slot in self._queue
