"""Log lines cannot flood, and no kind of line keeps another one quiet."""

from __future__ import annotations

import logging

import pytest
from support.clock import ManualClock

from kvcascade.logs import LINES_PER_WINDOW, MAX_KINDS, WINDOW_S, RateLimit


class Lines(logging.Handler):
    """What came through."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def lines(clock: ManualClock) -> Lines:
    return Lines()


@pytest.fixture
def logger(clock: ManualClock, lines: Lines) -> logging.Logger:
    made = logging.Logger("limited")
    made.addFilter(RateLimit(clock))
    made.addHandler(lines)
    return made


def test_a_kind_comes_a_few_times_and_then_says_what_was_left_out(
    logger: logging.Logger, lines: Lines, clock: ManualClock
) -> None:
    def fails(number: int) -> None:
        logger.warning("block %d is damaged", number)

    for number in range(20):
        fails(number)
    assert lines.texts == [f"block {n} is damaged" for n in range(LINES_PER_WINDOW)]
    clock.advance(WINDOW_S)
    fails(20)
    left_out = 20 - LINES_PER_WINDOW
    assert lines.texts[-1] == f"block 20 is damaged (and {left_out} more like it before)"


def test_places_that_log_any_text_do_not_share_a_limit(
    logger: logging.Logger, lines: Lines
) -> None:
    for number in range(LINES_PER_WINDOW + 3):
        logger.warning("%s", f"the disk: {number}")
    logger.error("%s", "the mover does not start")
    assert lines.texts[-1] == "the mover does not start"
    assert len(lines.texts) == LINES_PER_WINDOW + 1


def test_what_is_remembered_is_bounded(logger: logging.Logger, lines: Lines) -> None:
    for number in range(MAX_KINDS + 50):
        logger.warning(f"kind {number}")  # noqa: G004 - as careless code would
    assert len(lines.texts) == MAX_KINDS + 50
