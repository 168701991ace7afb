"""Allowed and measured speed of a remote tier: token bucket and speed estimate.

Neither is thread-safe: their owner guards them with a lock of its own.
"""

from __future__ import annotations

from collections.abc import Callable

BURST_S = 1.0
"""A bucket holds as many bytes as may pass in this time."""
NEW_SHARE = 0.25
"""Weight of a new observation in the moving averages."""


class TokenBucket:
    """Limit on the bytes per second of one direction."""

    def __init__(self, bytes_per_s: float | None, clock: Callable[[], float]) -> None:
        """None: no limit. `clock` returns monotonic seconds."""
        self._rate = bytes_per_s
        self._clock = clock
        self._tokens = 0.0 if bytes_per_s is None else bytes_per_s * BURST_S
        self._at_s = clock()

    def take(self, n_bytes: int) -> bool:
        """Take the bytes if the bucket is not empty; it may go below zero by one transfer."""
        if self._rate is None:
            return True
        now_s = self._clock()
        gained = (now_s - self._at_s) * self._rate
        self._tokens = min(self._tokens + gained, self._rate * BURST_S)
        self._at_s = now_s
        if self._tokens <= 0:
            return False
        self._tokens -= n_bytes
        return True


class LinkSpeed:
    """Latency and rate of reads, measured while they run: `t0 + bytes / rate`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self.latency_s: float | None = None
        """Moving average of the time of a lookup; None before the first one."""
        self.bytes_per_s: float | None = None
        """Moving average over all concurrent reads; None before the first one."""
        self._under_way = 0
        self._busy_since_s = 0.0

    def asked(self, took_s: float) -> None:
        """Note the time that a lookup took."""
        self.latency_s = _averaged(self.latency_s, took_s)

    def began(self) -> None:
        """Note that a read began."""
        if self._under_way == 0:
            self._busy_since_s = self._clock()
        self._under_way += 1

    def ended(self, n_bytes: int) -> None:
        """Note that a read ended with so many bytes; 0 if it failed."""
        self._under_way -= 1
        now_s = self._clock()
        took_s, self._busy_since_s = now_s - self._busy_since_s, now_s
        if n_bytes and took_s > 0:
            self.bytes_per_s = _averaged(self.bytes_per_s, n_bytes / took_s)

    def expected_s(self, n_bytes: int) -> float | None:
        """Return the expected seconds to read so many bytes; None if nothing was read yet."""
        if self.bytes_per_s is None:
            return None
        return (self.latency_s or 0.0) + n_bytes / self.bytes_per_s


def _averaged(old: float | None, new: float) -> float:
    return new if old is None else old + NEW_SHARE * (new - old)
