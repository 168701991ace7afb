"""How long a thread keeps the interpreter while another one copies."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from kvcascade.handlers.device.switch_interval import SHORT_S, SwitchInterval

USUAL_S = 0.005


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL_S)
    yield
    sys.setswitchinterval(before)


def test_the_last_to_end_has_it_as_it_was() -> None:
    interval = SwitchInterval()
    interval.shorten()
    interval.shorten()
    assert sys.getswitchinterval() == pytest.approx(SHORT_S)
    interval.restore()
    assert sys.getswitchinterval() == pytest.approx(SHORT_S)
    interval.restore()
    assert sys.getswitchinterval() == pytest.approx(USUAL_S)


@pytest.mark.parametrize("theirs_s", [0.0002, 0.02])
def test_what_somebody_else_sets_meanwhile_stays(theirs_s: float) -> None:
    interval = SwitchInterval()
    interval.shorten()
    sys.setswitchinterval(theirs_s)
    interval.restore()
    assert sys.getswitchinterval() == pytest.approx(theirs_s)


def test_shorter_ones_stay() -> None:
    sys.setswitchinterval(SHORT_S / 4)
    interval = SwitchInterval()
    interval.shorten()
    assert sys.getswitchinterval() == pytest.approx(SHORT_S / 4)
    interval.restore()
    assert sys.getswitchinterval() == pytest.approx(SHORT_S / 4)
