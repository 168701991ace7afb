"""The one place where tests wait for others without being told: bounded, and never for nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

WAIT_LIMIT_S = 120.0
"""Time after which a test fails: far more than the slowest machine needs."""
PAUSE_S = 0.01


def wait_until(
    is_so: Callable[[], bool], limit_s: float = WAIT_LIMIT_S, pause_s: float = PAUSE_S
) -> None:
    """Ask until it is so, with pauses of `pause_s` seconds; fails if it is not within the limit."""
    pause, end_s = threading.Event(), monotonic() + limit_s  # nobody sets it
    while not is_so():
        assert monotonic() < end_s, f"not so within {limit_s} s"
        pause.wait(pause_s)
