"""The small parts of the manager: write budget, admission, ticker."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict

import pytest
from support.cascade import key
from support.day_log import DayLog, NotedBudget

from kvcascade.assembly.named import admission_rule
from kvcascade.errors import ConfigError
from kvcascade.manager import admission
from kvcascade.manager.admission import (
    AdmitBy,
    EnduranceWatch,
    PastUses,
    admission_by_path,
    admit_second_touch,
)
from kvcascade.manager.ticker import Ticker
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.endurance import BUCKET_S, DAY_S


class TestWriteBudget:
    """The record of a day, by which every budget is kept."""

    def test_what_was_written_comes_back_after_a_day(self) -> None:
        now = [0.0]
        log = DayLog(lambda: now[0])
        budget = NotedBudget(1000, log)
        write(budget, 600)
        now[0] = DAY_S / 2
        write(budget, 300)
        assert budget.left_bytes() == 100
        now[0] = DAY_S + BUCKET_S
        assert budget.left_bytes() == 700
        now[0] = 2 * DAY_S
        assert budget.left_bytes() == 1000

    def test_never_more_than_the_limit_in_any_sliding_day(self) -> None:
        now = [0.0]
        log = DayLog(lambda: now[0])
        budget = NotedBudget(100, log)
        spent: list[tuple[float, int]] = []
        for step in range(1000):
            now[0] = step * 731.0
            size = min(7, budget.left_bytes())
            write(budget, size)
            spent.append((now[0], size))
            assert sum(s for at, s in spent if at > now[0] - DAY_S) <= 100


def write(budget: NotedBudget, size_bytes: int) -> None:
    budget.started(size_bytes)
    budget.ended(size_bytes)


class TestAdmission:
    def test_rules(self) -> None:
        assert admission_rule("all") is None
        assert admission_rule("second_touch") is admit_second_touch
        assert not admit_second_touch(key(1), 1)
        assert admit_second_touch(key(1), 2)

    def test_a_function_of_the_user_decides(self) -> None:
        rule = admission_by_path(f"{__name__}:only_even")
        assert rule(key(2), 1)
        assert not rule(key(3), 1)

    def test_one_that_fails_is_left_out(self, caplog: pytest.LogCaptureFixture) -> None:
        rule = AdmitBy(lambda block_hash, uses: 1 // 0 == uses, "broken")
        assert rule(key(1), 1) and rule(key(1), 1)
        assert caplog.text.count("admission broken failed") == 1

    @pytest.mark.parametrize("path", ["no.such:thing", "json:nothing", f"{__name__}:DAY_S"])
    def test_a_path_that_leads_nowhere_is_named(self, path: str) -> None:
        with pytest.raises(ConfigError, match="admission"):
            admission_by_path(path)


class TestPastUses:
    def test_it_equals_an_ordered_dict(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(admission, "PAST_MIN", 1)
        past, expected = PastUses(50), OrderedDict[int, int]()
        rng = random.Random(1)
        for _ in range(5000):
            number, uses = rng.randrange(120), rng.randrange(1, 300)
            past.note(key(number), uses)
            expected[number] = min(255, uses)
            if len(expected) > 50:
                expected.popitem(last=False)
            number = rng.randrange(120)
            assert past.of(key(number)) == expected.get(number, 0)

    def test_a_small_tier_remembers_more_than_it_holds(self) -> None:
        past = PastUses(1)
        for number in range(1000):
            past.note(key(number), 1)
        assert all(past.of(key(number)) == 1 for number in range(1000))


def only_even(block_hash: BlockHash, uses: int) -> bool:
    return block_hash == key(2)


class TestEnduranceWatch:
    def test_a_day_of_writes_that_nobody_read_is_told_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        now = [0.0]
        log = DayLog(lambda: now[0])
        watch = EnduranceWatch("nvme", log.totals, lambda: now[0])
        for _ in range(200):
            log.add(4096)
            now[0] += BUCKET_S
            if now[0] >= watch.due_s:
                watch.check()
        assert caplog.text.count("none was read back") == 1

    def test_one_read_in_a_day_is_enough(self, caplog: pytest.LogCaptureFixture) -> None:
        now = [0.0]
        log = DayLog(lambda: now[0])
        watch = EnduranceWatch("nvme", log.totals, lambda: now[0])
        for step in range(400):
            log.add(4096, 4096 if step % 90 == 0 else 0)
            now[0] += BUCKET_S
            if now[0] >= watch.due_s:
                watch.check()
        assert not caplog.text


class TestTicker:
    def test_ticks_until_stopped(self) -> None:
        ticked = threading.Event()
        ticker = Ticker(ticked.set, interval_s=0.001)
        assert ticked.wait(10)
        ticker.stop()
        ticker.stop()
        assert not ticker._thread.is_alive()

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
