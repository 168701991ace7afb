"""Statistics of blocks beside any eviction order: times of writing and last use, number of uses.

A policy keeps an order, not times. `UsageOrder` keeps three numbers a slot (10 bytes) in arrays
that survive a restart like those of the order. They are for people and tools: no running engine
decides anything by them, and a lost array costs statistics only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base import SlotMask
from .log import FEW
from .order import ArraySource, EvictionOrder, heap_arrays, scalars

WRITTEN_AT, LAST_USE, TIMES_USED = "use_written", "use_last", "use_times"
"""Names of the arrays: two wall-clock times in seconds (uint32), and a count (uint16)."""
MAX_TIMES = 65535
MAX_TIME_S = (1 << 32) - 1
"""Latest time that is recorded, in the year 2106; a clock may be wrong by more."""


class UsageOrder(EvictionOrder):
    """Eviction order that also records every use; it runs on the inner order's threads."""

    def __init__(
        self,
        order: EvictionOrder,
        arrays: ArraySource = heap_arrays,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(order.capacity, arrays)
        self._order = order
        self._now = wall_clock
        self._written = arrays(WRITTEN_AT, order.capacity, np.uint32)
        self._last = arrays(LAST_USE, order.capacity, np.uint32)
        self._times = arrays(TIMES_USED, order.capacity, np.uint16)
        self._written_of = scalars(self._written)
        self._last_of = scalars(self._last)
        self._times_of = scalars(self._times)
        # The class says it for all instances of an order; here it is the inner one's to say.
        setattr(self, "wants_tags", order.wants_tags)  # noqa: B010
        setattr(self, "wants_chains", order.wants_chains)  # noqa: B010

    @property
    def last_use(self) -> npt.NDArray[np.uint32]:
        """Wall-clock time of the last use by slot, in seconds since 1970."""
        return self._last

    def expect(self, tags: Sequence[int]) -> None:
        self._order.expect(tags)

    def insert(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        self._order.insert(slots, tags)
        now = min(MAX_TIME_S, int(self._now()))
        if len(slots) <= FEW:
            for slot in slots:
                self._written_of[slot] = self._last_of[slot] = now
                self._times_of[slot] = 0
            return
        batch = np.asarray(slots, dtype=np.intp)
        self._written[batch] = self._last[batch] = now
        self._times[batch] = 0

    def touch(self, slots: Sequence[int]) -> None:
        self._order.touch(slots)
        now = min(MAX_TIME_S, int(self._now()))
        if len(slots) <= FEW:
            for slot in slots:
                self._last_of[slot] = now
                self._times_of[slot] = min(MAX_TIMES, self._times_of[slot] + 1)
            return
        batch = np.asarray(slots, dtype=np.intp)
        self._last[batch] = now
        self._times[batch] = np.minimum(self._times[batch], MAX_TIMES - 1) + 1

    def settle(self, slots: Sequence[int]) -> None:
        self._order.settle(slots)

    def chain(self, slots: Sequence[int], blocks: int) -> None:
        self._order.chain(slots, blocks)

    def remove(self, slots: Sequence[int]) -> None:
        self._order.remove(slots)

    def evicted(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        self._order.evicted(slots, tags)

    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        return self._order.victims(limit, wanted, mask, window)

    def clear(self) -> None:
        self._order.clear()

    def reconcile(self, present: npt.NDArray[Any]) -> None:
        self._order.reconcile(present)

    def __contains__(self, slot: object) -> bool:
        return slot in self._order
