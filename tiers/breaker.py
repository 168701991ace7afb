"""Circuit breaker: no transfer is started on a tier that fails or stalls, so no request waits.

Each tier below the first has one breaker for each direction. Only the breaker decides this:
handlers accept every transfer and report its outcome.

The breaker opens after consecutive failures, or if transfers are in flight and none has ended for
too long. While it is open, no transfer is started. After a rest the next transfer is the probe. Its
end closes the breaker or opens it again. If transfers stall, the breaker stays open until one ends.

Not thread-safe: its owner guards it with a lock of its own.
"""

from __future__ import annotations

from collections.abc import Callable

FAILURES_TO_OPEN = 3
"""Consecutive failed reads that open the breaker. One bad place of a disk must not make the rest
unreadable. A failed write opens the breaker at once, because delaying a write costs nothing."""
REST_S = 5.0


class Breaker:
    """Circuit breaker for the transfers of one tier in one direction."""

    def __init__(
        self,
        clock: Callable[[], float],
        stall_s: float,
        failures_to_open: int = FAILURES_TO_OPEN,
    ) -> None:
        """`clock` returns monotonic seconds. Transfers stall if none ends for `stall_s` seconds."""
        self.openings = 0
        """Number of times the breaker opened, including failed probes."""
        self._clock = clock
        self.stall_s = stall_s
        """See the constructor."""
        self._limit = failures_to_open
        self._failures = 0
        self._rest_until_s = clock()
        self._progress_s = 0.0
        self._under_way = 0
        self._is_stall_seen = False

    @property
    def is_open(self) -> bool:
        """True while no transfer may be started."""
        if self._failures < self._limit:
            return False
        return self._under_way > 0 or self._clock() < self._rest_until_s

    @property
    def is_resting(self) -> bool:
        """True while no probe may be started: requests need not wait for the tier."""
        return self._failures >= self._limit and self._clock() < self._rest_until_s

    @property
    def rest_left_s(self) -> float:
        """Seconds until a probe may be started; 0 if the breaker does not rest."""
        return max(0.0, self._rest_until_s - self._clock()) if self.is_resting else 0.0

    @property
    def is_stalled(self) -> bool:
        """True if transfers are in flight and none has ended for `stall_s`."""
        return self._under_way > 0 and self._clock() - self._progress_s >= self.stall_s

    def started(self) -> None:
        """Count a transfer that started."""
        if self._under_way == 0:
            self._progress_s = self._clock()
        self._under_way += 1

    def ended(self, is_failure: bool) -> None:
        """Count a transfer that ended."""
        self._under_way -= 1
        self._progress_s = self._clock()
        self._is_stall_seen = False
        if not is_failure:
            self._failures = 0
            self._rest_until_s = self._progress_s
            return
        self._failures += 1
        if self._failures >= self._limit:
            self._open()

    def withdrawn(self) -> None:
        """Count a transfer that ended and says nothing about the tier. As a probe it failed."""
        if self._failures >= self._limit:
            self.ended(is_failure=True)
        else:
            self._under_way -= 1

    def trip(self) -> None:
        """Open the breaker at once, because a transfer was refused."""
        self._failures = max(self._failures, self._limit)
        self._open()

    def look_at_clock(self) -> bool:
        """Open the breaker if transfers are in flight and none has ended for `stall_s`.

        Return True once in each stall.
        """
        if not self.is_stalled:
            return False
        self.trip()
        is_new, self._is_stall_seen = not self._is_stall_seen, True
        return is_new

    def _open(self) -> None:
        now_s = self._clock()
        self.openings += now_s >= self._rest_until_s
        self._rest_until_s = now_s + REST_S
