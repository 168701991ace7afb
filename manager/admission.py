"""Which blocks are worth writing to a lower tier: admission and the write budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

DAY_S = 86_400.0
BUDGET_BUCKETS = 96
"""The sliding day is kept in this many buckets (15 minutes each)."""


class Admission(ABC):
    """Asked for every dirty block before it is written down."""

    @abstractmethod
    def admits(self, uses: int) -> bool:
        """`uses`: how often the block was used since it came, its first store included."""


class AdmitAll(Admission):
    """Every block."""

    def admits(self, uses: int) -> bool:
        return True


class AdmitSecondTouch(Admission):
    """Only blocks that were used again."""

    def admits(self, uses: int) -> bool:
        return uses >= 2


class WriteBudget:
    """At most `bytes_per_day` over any sliding day. The clock is in seconds, any origin."""

    def __init__(self, bytes_per_day: int | None, clock: Callable[[], float]) -> None:
        self._bytes_per_day = bytes_per_day
        self._clock = clock
        self._buckets: deque[tuple[int, int]] = deque()
        self._spent_bytes = 0

    def left_bytes(self) -> int | None:
        """What may be written now; None means without limit."""
        if self._bytes_per_day is None:
            return None
        self._expire()
        return max(0, self._bytes_per_day - self._spent_bytes)

    def spend(self, size_bytes: int) -> None:
        """Count a write."""
        if self._bytes_per_day is None:
            return
        bucket = self._bucket()
        if self._buckets and self._buckets[-1][0] == bucket:
            size_before = self._buckets.pop()[1]
        else:
            size_before = 0
        self._buckets.append((bucket, size_before + size_bytes))
        self._spent_bytes += size_bytes

    def _bucket(self) -> int:
        return int(self._clock() // (DAY_S / BUDGET_BUCKETS))

    def _expire(self) -> None:
        oldest = self._bucket() - BUDGET_BUCKETS
        while self._buckets and self._buckets[0][0] < oldest:
            self._spent_bytes -= self._buckets.popleft()[1]
