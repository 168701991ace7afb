"""Rate-limited loggers, and lines as JSON.

Each kind of line is logged a few times a minute at most. Lines are of one kind if they come from
one place in the code with the same text before formatting. The first line after a pause states how
many were left out.

With the environment variable `KVCASCADE_LOG_FORMAT=json`, every line of every process is one JSON
object.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

FORMAT_VARIABLE = "KVCASCADE_LOG_FORMAT"
WINDOW_S = 60.0
LINES_PER_WINDOW = 5
VLLM_TIME_FORMAT = "%m-%d %H:%M:%S"
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


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, process, message, and any exception.

    Also for `logging.config` files, as those of `VLLM_LOGGING_CONFIG_PATH`: vLLM's own lines then
    have the same form.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        found: dict[str, str | int] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process or 0,
            "message": record.getMessage(),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False)


def wants_json() -> bool:
    """Return True if the environment asks for log lines as JSON; warn of an unknown format."""
    asked = os.environ.get(FORMAT_VARIABLE, "text").lower()
    if asked not in ("text", "json"):
        get_logger(__name__).warning(
            'kvcascade: %s is "%s"; it must be "text" or "json", so lines stay text',
            FORMAT_VARIABLE,
            asked,
        )
    return asked == "json"


def json_handler(stream: TextIO | None = None) -> logging.Handler:
    """Return a handler that writes JSON lines to a stream; None means standard error."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    return handler


def log_to_stderr(name: str, level: int = logging.WARNING) -> None:
    """Set up a process of ours: its log goes to standard error, as JSON or like vLLM's lines.

    `name` names the process in text lines.
    """
    handler = json_handler() if wants_json() else logging.StreamHandler()
    if not isinstance(handler.formatter, JsonFormatter):
        form = f"({name} pid=%(process)d) %(levelname)s %(asctime)s %(message)s"
        handler.setFormatter(logging.Formatter(form, VLLM_TIME_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])


_limit = RateLimit()


def get_logger(name: str) -> logging.Logger:
    """Return the rate-limited logger of a module."""
    logger = logging.getLogger(name)
    logger.addFilter(_limit)  # adding it twice does nothing
    return logger
