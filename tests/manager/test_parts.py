"""The small parts of the manager: write budget, ticker, counters."""

from __future__ import annotations

import threading

import pytest

from kvcascade.manager.admission import (
    BUDGET_BUCKETS,
    DAY_S,
    AdmitAll,
    AdmitSecondTouch,
    WriteBudget,
)
from kvcascade.manager.counters import Counters
from kvcascade.manager.ticker import Ticker


class TestWriteBudget:
    def test_without_a_limit_everything_may_be_written(self) -> None:
        budget = WriteBudget(None, lambda: 0.0)
        budget.spend(1 << 40)
        assert budget.left_bytes() is None

    def test_what_was_spent_comes_back_after_a_day(self) -> None:
        now = [0.0]
        budget = WriteBudget(1000, lambda: now[0])
        budget.spend(600)
        now[0] = DAY_S / 2
        budget.spend(300)
        assert budget.left_bytes() == 100
        now[0] = DAY_S + DAY_S / BUDGET_BUCKETS
        assert budget.left_bytes() == 700
        now[0] = 2 * DAY_S
        assert budget.left_bytes() == 1000

    def test_never_more_than_the_limit_in_any_sliding_day(self) -> None:
        now = [0.0]
        budget = WriteBudget(100, lambda: now[0])
        spent: list[tuple[float, int]] = []
        for step in range(1000):
            now[0] = step * 731.0
            size = min(7, budget.left_bytes() or 0)
            budget.spend(size)
            spent.append((now[0], size))
            assert sum(s for at, s in spent if at > now[0] - DAY_S) <= 100


def test_admission() -> None:
    assert AdmitAll().admits(1)
    assert not AdmitSecondTouch().admits(1)
    assert AdmitSecondTouch().admits(2)


class TestTicker:
    def test_ticks_until_stopped(self) -> None:
        ticked = threading.Event()
        ticker = Ticker(ticked.set, interval_s=0.001)
        assert ticked.wait(10)
        ticker.stop()
        ticker.stop()
        ticked.clear()
        assert not ticked.wait(0.02)

    def test_an_error_ends_it_with_a_line_in_the_log(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        failed = threading.Event()

        def fail() -> None:
            failed.set()
            raise ValueError("boom")

        ticker = Ticker(fail, interval_s=0.001)
        assert failed.wait(10)
        ticker.stop()
        assert "background demotion stopped" in caplog.text


def test_counters_are_plain_data() -> None:
    counters = Counters.for_tiers(("cpu", "nvme"))
    counters.links[0].demoted_blocks += 3
    data = counters.as_dict()
    assert data["loaded_blocks"] == [0, 0]
    assert data["links"][0]["demoted_blocks"] == 3  # type: ignore[index]
