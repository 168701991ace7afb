"""Rate limit and measured round-trip time of a remote tier."""

from __future__ import annotations

import threading
from collections.abc import Callable

BURST_S = 1.0
"""A bucket holds as many bytes as may pass in this time."""
NEW_SHARE = 0.25
"""Weight of a new observation in the moving average."""


class TokenBucket:
    """Limit on the bytes per second of one direction. Its owner guards it with a lock."""

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


class RoundTripTime:
    """Time of one request that moves no payload, measured. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.average_s: float | None = None
        """Moving average; None before the first request."""

    def took(self, took_s: float) -> None:
        """Note the time of a request that was answered."""
        with self._lock:
            old_s = took_s if self.average_s is None else self.average_s
            self.average_s = old_s + NEW_SHARE * (took_s - old_s)
