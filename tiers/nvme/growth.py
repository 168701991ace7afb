"""Making segments ahead of need, on an I/O thread.

The manager's thread calls `poll` and `want_more`; the work runs in the executor. A segment that
cannot be made lowers what is available for a while: it is counted and logged once, never raised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

from ...errors import KVCascadeError
from ...logs import get_logger
from .capacity import SpaceBudget
from .segments import SegmentSet

RETRY_AFTER_S = 30.0

_log = get_logger(__name__)


class SegmentGrowth:
    """Creates the missing segments of a tier, a few at a time."""

    def __init__(
        self,
        segments: SegmentSet,
        budget: SpaceBudget,
        total: int,
        paths: int,
        executor: Executor,
        clock: Callable[[], float],
    ) -> None:
        """`total` segments over `paths` paths; `clock` gives monotonic seconds."""
        self.failures = 0
        self._segments = segments
        self._budget = budget
        self._total = total
        self._paths = paths
        self._executor = executor
        self._clock = clock
        self._arrived: deque[int] = deque()
        self._is_running = False
        self._retry_at_s = 0.0

    def poll(self) -> list[int]:
        """Numbers of the segments made since the last call."""
        arrived: list[int] = []
        while self._arrived:
            arrived.append(self._arrived.popleft())
        return arrived

    def want_more(self) -> None:
        """Start making one segment per path, unless that is under way, done or just failed."""
        if self._is_running or self._clock() < self._retry_at_s or not self.missing():
            return
        self._is_running = True
        try:
            self._executor.submit(self._run)
        except RuntimeError:  # the executor is shutting down
            self._is_running = False

    def missing(self) -> list[int]:
        """Numbers of the segments that do not exist yet, ascending."""
        segments = self._segments
        there = segments.unusable.union(segments.numbers)
        return [number for number in range(self._total) if number not in there]

    def make(self, limit: int) -> int:
        """Make up to `limit` segments on this thread; returns how many."""
        made = 0
        for number in self.missing()[: max(0, limit)]:
            try:
                self._make_one(number)
            except KVCascadeError as error:
                if self.failures == 0:
                    _log.warning("the NVMe tier does not grow for now: %s", error)
                self.failures += 1
                self._retry_at_s = self._clock() + RETRY_AFTER_S
                break
            self._arrived.append(number)
            made += 1
        return made

    def _run(self) -> None:
        try:
            self.make(self._paths)
        finally:
            self._is_running = False

    def _make_one(self, number: int) -> None:
        part = number % self._paths
        own = sum(1 for other in self._segments.numbers if other % self._paths == part)
        size = self._segments.layout.file_bytes
        self._budget.claim(part, own * size, size)
        self._segments.create(number)
