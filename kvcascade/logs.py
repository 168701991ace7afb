"""Rate-limited loggers: each kind of line is logged a few times a minute at most.

Lines are of one kind if they come from one place in the code with the same text before formatting.
The first line after a pause states how many were left out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

WINDOW_S = 60.0
LINES_PER_WINDOW = 5
MAX_KINDS = 1000
"""Limit on the kinds that are counted; the code has fewer texts than that."""


class RateLimit(logging.Filter):
    """Passes `LINES_PER_WINDOW` lines of a kind per window. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives monotonic seconds."""
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}
        """File, line and text of a kind, to the start of its window and its lines since then."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the line may pass; add the number of omitted lines to it."""
        now_s, kind = self._clock(), (record.pathname, record.lineno, str(record.msg))
        with self._lock:
            begun_s, lines = self._kinds.get(kind, (now_s, 0))
            left_out = 0
            if now_s - begun_s >= WINDOW_S:
                begun_s, left_out, lines = now_s, max(0, lines - LINES_PER_WINDOW), 0
            if kind in self._kinds or len(self._kinds) < MAX_KINDS:
                self._kinds[kind] = (begun_s, lines + 1)
        if left_out:
            record.msg = f"{record.msg} (and {left_out} more like it before)"
        return lines < LINES_PER_WINDOW


_limit = RateLimit()


def get_logger(name: str) -> logging.Logger:
    """Return the rate-limited logger of a module."""
    logger = logging.getLogger(name)
    logger.addFilter(_limit)  # adding it twice does nothing
    return logger
