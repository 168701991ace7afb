"""How many threads are at the device at a time, and how one follows the other.

A disk serves the transfers that are under way in turns, so they end together. If every thread
transferred and then hashed and copied, all would do that at once, and the disk had nothing to do
meanwhile. With more threads than may transfer, one is ready whenever a transfer ends.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import BoundedSemaphore
from time import sleep

HANDOVER_S = 50e-6
"""For the next thread to get the interpreter lock and begin: who has just transferred would keep
the lock while it hashes. Far less than a transfer takes, which is milliseconds."""


class Turns:
    """A context for a transfer; entering waits as long as those before it take. Any thread."""

    def __init__(self, at_once: int, pause: Callable[[float], None] = sleep) -> None:
        """`at_once`: threads that may be inside. `pause` takes seconds."""
        self._free = BoundedSemaphore(at_once)
        self._pause = pause

    def __enter__(self) -> None:
        self._free.acquire()

    def __exit__(self, *error: object) -> None:
        self._free.release()
        self._pause(HANDOVER_S)
