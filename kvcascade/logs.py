"""Loggers whose lines cannot flood: a line of one kind comes a few times a minute at most.

Lines are of one kind if they come from one place in the code and their texts are equal before the
values are filled in. The first line after a pause says how many were left out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

WINDOW_S = 60.0
LINES_PER_WINDOW = 5
MAX_KINDS = 1000
"""Kinds that are told apart; there are fewer texts than that in the code."""


class RateLimit(logging.Filter):
    """Lets `LINES_PER_WINDOW` lines of a kind pass per window. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives monotonic seconds."""
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}
        """File, line and text to the start of the window and the lines since then."""

    def filter(self, record: logging.LogRecord) -> bool:
        """True if the line may pass; adds the number of those left out."""
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
    """The logger of a module, with the limit on it."""
    logger = logging.getLogger(name)
    logger.addFilter(_limit)  # adding it twice does nothing
    return logger
