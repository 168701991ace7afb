"""Limit the number of concurrent device transfers so that hashing and copying overlap with I/O.

A disk interleaves the transfers in flight, so they end at about the same time. Without a limit
every thread transfers at once, then every thread hashes and copies at once. The disk is idle during
that second phase. If fewer threads may transfer than exist, another thread is ready whenever a
transfer ends.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import BoundedSemaphore
from time import sleep

HANDOVER_S = 50e-6
"""Pause after a transfer, in seconds, so that the next thread gets the interpreter lock and starts
its transfer. Without it, the thread that has just transferred keeps the lock while it hashes. The
pause is far shorter than a transfer, which takes milliseconds."""


class TransferLimit:
    """Context manager around a transfer. Entering waits until a place is free. Any thread."""

    def __init__(self, at_once: int, pause: Callable[[float], None] = sleep) -> None:
        """`at_once` is the number of threads that may be inside. `pause` takes seconds."""
        self._free = BoundedSemaphore(at_once)
        self._pause = pause

    def __enter__(self) -> None:
        self._free.acquire()

    def __exit__(self, *error: object) -> None:
        self._free.release()
        self._pause(HANDOVER_S)
