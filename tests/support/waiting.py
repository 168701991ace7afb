"""The one place where tests wait for others without being told: bounded, and never for nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable


def wait_until(is_so: Callable[[], bool], rounds: int, pause_s: float) -> None:
    """Ask at most `rounds` times, with pauses of `pause_s` seconds; fails if it is never so."""
    pause = threading.Event()  # nobody sets it
    for _ in range(rounds):
        if is_so():
            return
        pause.wait(pause_s)
    raise AssertionError(f"not so after {rounds} rounds of {pause_s} s")
