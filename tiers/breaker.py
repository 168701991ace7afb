"""Leaving a tier alone that fails or stalls, so that no request waits for it: a circuit breaker.

One for each link and direction, and the only place that decides it: handlers take whatever they are
given and say what became of it.

It opens after failures in a row, or when transfers are under way and none has ended for too long.
While it is open nothing is started. After a rest whatever is asked for next is the probe, and its
end closes the breaker or opens it again; until a stalled transfer ends, it stays open.

Not thread-safe: its owner guards it with a lock of its own.
"""

from __future__ import annotations

from collections.abc import Callable

FAILURES_TO_OPEN = 3
"""Of reads: one bad place of a disk must not close the rest of it. A failed write opens at once:
blocks that are written later cost nothing, and those that cannot be are dropped sooner."""
REST_S = 5.0


class Breaker:
    """For the transfers of one link in one direction."""

    def __init__(
        self,
        clock: Callable[[], float],
        stall_s: float,
        failures_to_open: int = FAILURES_TO_OPEN,
    ) -> None:
        """`clock` gives monotonic seconds; `stall_s`: so long without an end is a failure."""
        self.openings = 0
        """How often it opened, failed probes included."""
        self._clock = clock
        self._stall_s = stall_s
        self._limit = failures_to_open
        self._failures = 0
        self._rest_until_s = clock()
        self._progress_s = 0.0
        self._under_way = 0

    @property
    def is_open(self) -> bool:
        """True while nothing may be started."""
        if self._failures < self._limit:
            return False
        return self._under_way > 0 or self._clock() < self._rest_until_s

    @property
    def is_resting(self) -> bool:
        """True while the tier is not even probed: nobody need wait for it."""
        return self._failures >= self._limit and self._clock() < self._rest_until_s

    @property
    def rest_left_s(self) -> float:
        """Seconds until it may be probed; 0 if it is closed."""
        return max(0.0, self._rest_until_s - self._clock()) if self.is_resting else 0.0

    @property
    def is_stalled(self) -> bool:
        """True if transfers are under way and none has ended for `stall_s`."""
        return self._under_way > 0 and self._clock() - self._progress_s >= self._stall_s

    def started(self) -> None:
        """A transfer was started."""
        if self._under_way == 0:
            self._progress_s = self._clock()
        self._under_way += 1

    def ended(self, is_failure: bool) -> None:
        """A transfer ended."""
        self._under_way -= 1
        self._progress_s = self._clock()
        if not is_failure:
            self._failures = 0
            self._rest_until_s = self._progress_s
            return
        self._failures += 1
        if self._failures >= self._limit:
            self._open()

    def trip(self) -> None:
        """Open at once: a transfer was refused."""
        self._failures = max(self._failures, self._limit)
        self._open()

    def look_at_clock(self) -> None:
        """Open if transfers are under way and none has ended for `stall_s`."""
        if self.is_stalled:
            self.trip()

    def _open(self) -> None:
        now_s = self._clock()
        self.openings += now_s >= self._rest_until_s
        self._rest_until_s = now_s + REST_S
