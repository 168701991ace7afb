"""Statistics of slots beside an eviction order: times of writing and last use, number of uses.

An order keeps no times. `SlotUsage` keeps three numbers a slot (10 bytes) in arrays that survive a
restart like those of the order. A lost array costs statistics, and the choice of the coldest
segments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from ..order import FEW, ArraySource, Column, heap_arrays

WRITTEN_AT, LAST_USE, TIMES_USED = "use_written", "use_last", "use_times"
"""Names of the arrays: two wall-clock times in seconds (uint32), and a count (uint16)."""
MAX_TIMES = 65535
MAX_TIME_S = (1 << 32) - 1
"""Latest time that is recorded, in the year 2106; a clock may be wrong by more."""


class SlotUsage:
    """Records every use of a slot. One thread."""

    def __init__(
        self,
        capacity: int,
        arrays: ArraySource = heap_arrays,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._now = wall_clock
        self._written = Column(arrays(WRITTEN_AT, capacity, np.uint32))
        self._last = Column(arrays(LAST_USE, capacity, np.uint32))
        self._times = Column(arrays(TIMES_USED, capacity, np.uint16))
        self.last_use = self._last.array
        """Wall-clock time of the last use by slot, in seconds since 1970."""

    def note_insert(self, slots: Sequence[int]) -> None:
        """Note that these slots were filled."""
        now = min(MAX_TIME_S, int(self._now()))
        self._written.fill(slots, now)
        self._last.fill(slots, now)
        self._times.fill(slots, 0)

    def note_use(self, slots: Sequence[int]) -> None:
        """Note a use of these slots."""
        self._last.fill(slots, min(MAX_TIME_S, int(self._now())))
        if len(slots) <= FEW:
            for slot in slots:
                self._times.of[slot] = min(MAX_TIMES, self._times.of[slot] + 1)
            return
        batch = np.asarray(slots)
        self._times.array[batch] = np.minimum(self._times.array[batch], MAX_TIMES - 1) + 1
