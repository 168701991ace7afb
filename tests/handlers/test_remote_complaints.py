"""What the node of a remote tier says in the log about a server that is of no use."""

from __future__ import annotations

import logging

import pytest
from support.clock import ManualClock
from support.executors import SteppingExecutor

from kvcascade.handlers.node.remote.remote_loop import (
    COMPLAINT_INTERVAL_S,
    FIRST_QUESTION_S,
    Complaints,
)
from kvcascade.tiers.remote.remote_probe import ServerFinding

NAME = "tiers[1].url"
SAID = f"{NAME}: the server has no such bucket; create it."
HINT = f"{NAME}: the server removes no old blocks; set maxmemory."


class Asked:
    """A server, as far as somebody asks why it is of no use."""

    def __init__(self) -> None:
        self.found: ServerFinding | None = ServerFinding(SAID)
        self.times = 0
        self.fails = False

    def __call__(self) -> ServerFinding | None:
        self.times += 1
        if self.fails:
            raise OSError("stale file handle")
        return self.found


def test_after_the_start_and_when_a_breaker_opens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    asked, threads, clock = Asked(), SteppingExecutor(), ManualClock()
    complaints = Complaints(asked, threads, NAME, clock)
    complaints.note(0)
    assert not threads.step(), "the first lookups come before it"
    clock.advance(FIRST_QUESTION_S)
    complaints.note(0)
    assert asked.times == 0, "the thread of the node asks nobody"
    assert threads.step() and asked.times == 1 and SAID in caplog.text
    complaints.note(0)
    assert not threads.step()
    for openings in range(1, 20):
        complaints.note(openings)
    assert not threads.step(), "it was asked a moment ago"
    clock.advance(COMPLAINT_INTERVAL_S)
    complaints.note(20)
    complaints.note(21)
    asked.found = None
    assert threads.step() and asked.times == 2 and caplog.text.count(SAID) == 1
    assert caplog.text.count("answers again") == 1, "a failure that was short"
    clock.advance(COMPLAINT_INTERVAL_S)
    complaints.note(21)
    assert threads.step(), "one breaker opened while the server was asked"
    clock.advance(COMPLAINT_INTERVAL_S)
    complaints.note(21)
    assert not threads.step(), "no breaker has opened since"


def test_a_first_question_without_a_problem_delays_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An outage of 40 s that began after it had no line in the log."""
    asked, threads, clock = Asked(), SteppingExecutor(), ManualClock()
    asked.found = None
    complaints = Complaints(asked, threads, NAME, clock)
    clock.advance(FIRST_QUESTION_S)
    complaints.note(0)
    assert threads.step() and not caplog.records
    asked.found = ServerFinding(SAID)
    complaints.note(1)
    assert threads.step() and caplog.text.count(SAID) == 1


def test_a_hint_takes_neither_the_place_nor_the_minute_of_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a server that evicts nothing, outages of 20 s had no line, and their end had none."""
    asked, threads, clock = Asked(), SteppingExecutor(), ManualClock()
    asked.found = ServerFinding(HINT, is_hint=True)
    complaints = Complaints(asked, threads, NAME, clock)
    clock.advance(FIRST_QUESTION_S)
    complaints.note(0)
    assert threads.step() and caplog.messages == [HINT]
    asked.found = ServerFinding(SAID)
    complaints.note(1)
    assert threads.step() and caplog.messages == [HINT, SAID], "in the same minute"
    asked.found = ServerFinding(HINT, is_hint=True)
    clock.advance(COMPLAINT_INTERVAL_S)
    complaints.note(2)
    assert threads.step() and "answers again" in caplog.messages[2]
    assert len(caplog.messages) == 3, "the hint is not repeated"
    complaints.note(3)
    assert not threads.step(), "a minute begins with each line about a failure"


def test_a_server_that_answers_again_may_need_a_hint(caplog: pytest.LogCaptureFixture) -> None:
    asked, threads = Asked(), SteppingExecutor()
    asked.found = ServerFinding(HINT, is_hint=True)
    complaints = Complaints(asked, threads, NAME, ManualClock())
    complaints.note(1)
    assert threads.step() and caplog.messages[1:] == [HINT]
    assert "answers again" in caplog.messages[0]


def test_a_breaker_that_opens_at_the_start_is_told_of_at_once() -> None:
    threads, clock = SteppingExecutor(), ManualClock()
    complaints = Complaints(Asked(), threads, NAME, clock)
    complaints.note(1)
    assert threads.step()
    clock.advance(FIRST_QUESTION_S)
    complaints.note(1)
    assert not threads.step(), "once is enough"


def test_nothing_is_said_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    threads = SteppingExecutor()
    complaints = Complaints(Asked(), threads, NAME, ManualClock())
    complaints.note(1)
    complaints.close()
    assert threads.step() and SAID not in caplog.text


def test_a_folder_that_cannot_be_asked_is_told_of_and_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked, threads, clock = Asked(), SteppingExecutor(), ManualClock()
    asked.fails = True
    complaints = Complaints(asked, threads, NAME, clock)
    for openings in (1, 2):
        complaints.note(openings)
        assert threads.step() and caplog.text.count("stale file handle") == openings
        clock.advance(COMPLAINT_INTERVAL_S)
