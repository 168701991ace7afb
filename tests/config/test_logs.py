"""Log lines cannot flood, and no kind of line keeps another one quiet."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from datetime import datetime

import pytest
from support.clock import ManualClock
from support.project import ROOT

from kvcascade.config.environment import misspelt
from kvcascade.logs import (
    FORMAT_VARIABLE,
    LINES_PER_WINDOW,
    MAX_KINDS,
    WINDOW_S,
    RateLimit,
    json_handler,
    wants_json,
)


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
    logger.error("%s", "the node does not start")
    assert lines.texts[-1] == "the node does not start"
    assert len(lines.texts) == LINES_PER_WINDOW + 1


def test_what_is_remembered_is_bounded(logger: logging.Logger, lines: Lines) -> None:
    for number in range(MAX_KINDS + 50):
        logger.warning(f"kind {number}")  # noqa: G004 - as careless code would
    assert len(lines.texts) == MAX_KINDS + 50


def test_a_json_line_is_one_object_whatever_the_message_holds() -> None:
    stream = io.StringIO()
    logger = logging.Logger("kvcascade.json")
    logger.addHandler(json_handler(stream))
    try:
        raise OSError(5, "read failed")
    except OSError:
        logger.exception('disk "%s" failed\nat once', "/mnt/ä")
    logger.info("second")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == 'disk "/mnt/ä" failed\nat once'
    assert first["level"] == "ERROR" and first["logger"] == "kvcascade.json"
    assert first["exception"].endswith("OSError: [Errno 5] read failed")
    assert datetime.fromisoformat(first["time"]).utcoffset() is not None
    assert "exception" not in second and second["process"] > 0


@pytest.mark.parametrize(("value", "is_json"), [("json", True), ("JSON", True), ("text", False)])
def test_the_environment_chooses_the_format(
    monkeypatch: pytest.MonkeyPatch, value: str, is_json: bool
) -> None:
    monkeypatch.delenv(FORMAT_VARIABLE, raising=False)
    assert not wants_json()
    monkeypatch.setenv(FORMAT_VARIABLE, value)
    assert wants_json() is is_json


def test_an_unknown_format_is_text_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(FORMAT_VARIABLE, "yaml")
    assert not wants_json()
    assert FORMAT_VARIABLE in caplog.text and "yaml" in caplog.text


def test_a_child_process_writes_json_too(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import logging; from kvcascade.logs import log_to_stderr; "
        "log_to_stderr('kvcascade node'); logging.getLogger('x').warning('the disk %s', 'rests')"
    )
    monkeypatch.delenv(FORMAT_VARIABLE, raising=False)
    line = r"\(kvcascade node pid=\d+\) WARNING \d\d-\d\d \d\d:\d\d:\d\d the disk rests\n"
    assert re.fullmatch(line, child_stderr(code)), "like a line of vLLM"
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    assert json.loads(child_stderr(code))["message"] == "the disk rests"


def child_stderr(code: str) -> str:
    """Run Python code in a process of its own; returns its standard error."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_variable_is_not_taken_for_a_misspelt_option() -> None:
    assert not misspelt([FORMAT_VARIABLE])
