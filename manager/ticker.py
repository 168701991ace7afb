"""Background thread that maintains the cascade while the engine is idle.

vLLM makes no calls between requests. Due blocks and ended transfers must not wait for the next
request. The thread calls `maintain`, which returns at once if the scheduler holds the lock. So it
delays the scheduler by one `maintain` at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..logs import get_logger
from ..threads import start_thread

logger = get_logger(__name__)

TICK_S = 0.05
STOP_WAIT_S = 5.0


class Ticker:
    """Call `tick` every `interval_s` seconds on a daemon thread until `stop`."""

    def __init__(self, tick: Callable[[], None], interval_s: float = TICK_S) -> None:
        """Start the thread. Raises `TierIOError` if it cannot be started."""
        self._tick = tick
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = start_thread(self._run, "kvcascade-ticker")

    def stop(self) -> None:
        """End the thread; idempotent. Wait for a running tick, at most `STOP_WAIT_S` seconds."""
        self._stopped.set()
        self._thread.join(STOP_WAIT_S)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._tick()
            except Exception:
                logger.exception("background demotion stopped; blocks are still demoted on demand")
                return
