"""How long a thread keeps the interpreter while another one copies."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from kvcascade.handlers.device.brief_turns import BRIEF_S, BriefTurns

USUAL_S = 0.005


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL_S)
    yield
    sys.setswitchinterval(before)


def test_the_last_to_end_has_it_as_it_was() -> None:
    turns = BriefTurns()
    turns.begin()
    turns.begin()
    assert sys.getswitchinterval() == pytest.approx(BRIEF_S)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(BRIEF_S)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(USUAL_S)


@pytest.mark.parametrize("theirs_s", [0.0002, 0.02])
def test_what_somebody_else_sets_meanwhile_stays(theirs_s: float) -> None:
    turns = BriefTurns()
    turns.begin()
    sys.setswitchinterval(theirs_s)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(theirs_s)


def test_shorter_ones_stay() -> None:
    sys.setswitchinterval(BRIEF_S / 4)
    turns = BriefTurns()
    turns.begin()
    assert sys.getswitchinterval() == pytest.approx(BRIEF_S / 4)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(BRIEF_S / 4)
