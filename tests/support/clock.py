"""A clock that goes when the test says so."""

from __future__ import annotations


class ManualClock:
    """Monotonic seconds; call it like `time.monotonic`."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time go by."""
        self.now_s += seconds
