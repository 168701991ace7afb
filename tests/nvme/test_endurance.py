"""What the index remembers of the last day's writes and reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.keys import key

from kvcascade.handlers.node.remote.remote_wire import RemoteNote
from kvcascade.manager.counters import Counters
from kvcascade.manager.state import TierState
from kvcascade.observe.metrics import METRICS, MetricsSnapshot
from kvcascade.tiers import endurance
from kvcascade.tiers.endurance import BUCKET_S, BUCKETS, DAY_S, RECORD_BYTES, DayTotals
from kvcascade.tiers.nvme.path.block_table import Changes
from kvcascade.tiers.nvme.path.lmdb_block_table import LmdbBlockTable, open_block_table

NOW_S = 1_800_000_000.0
INLINE_LIMIT_BYTES = 2000
"""LMDB keeps what is smaller inside its page."""


def opened(path: Path, now: list[float]) -> LmdbBlockTable:
    return open_block_table(
        path, 1 << 24, b"namespace", is_durable=False, wall_clock=lambda: now[0]
    )


def put(table: LmdbBlockTable, number: int, read_bytes: int = 0) -> None:
    puts = [(key(number), number, 1)]
    table.apply(Changes(0, puts, written_bytes=4096, read_bytes=read_bytes))


def test_the_window_survives_a_crash_and_slides(tmp_path: Path) -> None:
    now = [NOW_S]
    table = opened(tmp_path, now)
    put(table, 1)
    put(table, 2, read_bytes=100)
    table.abandon()  # as after kill -9
    now[0] += DAY_S - BUCKET_S
    table = opened(tmp_path, now)
    put(table, 3)
    assert table.day_totals() == DayTotals(3 * 4096, 100)
    now[0] += 3 * BUCKET_S
    assert table.day_totals() == DayTotals(4096, 0)
    now[0] += 2 * DAY_S
    assert table.day_totals() == DayTotals()
    table.abandon()


def test_a_clock_that_goes_back_forgets_nothing() -> None:
    record = endurance.add(b"", NOW_S, 10, 1)
    record = endurance.add(record, NOW_S - 5 * DAY_S, 20, 2)
    assert endurance.day_totals(record, NOW_S - 9 * DAY_S) == DayTotals(30, 3)
    assert endurance.day_totals(record, NOW_S - 4 * DAY_S - BUCKET_S) == DayTotals(30, 3)


def test_a_clock_that_is_corrected_by_seconds_changes_nothing() -> None:
    record = endurance.add(b"", NOW_S, 10, 0)
    record = endurance.add(record, NOW_S + DAY_S / 2, 5, 0)
    record = endurance.add(record, NOW_S + DAY_S / 2 - 1, 5, 0)
    assert endurance.day_totals(record, NOW_S + DAY_S + BUCKET_S).written == 10


def test_a_clock_that_was_ahead_counts_for_a_day() -> None:
    record = endurance.add(b"", NOW_S + 3650 * DAY_S, 10, 1)
    for day in range(3):
        record = endurance.add(record, NOW_S + day * DAY_S, 5, 0)
    assert endurance.day_totals(record, NOW_S + 2 * DAY_S).written == 10
    assert endurance.day_totals(record, NOW_S + 4 * DAY_S) == DayTotals()


def test_a_clock_that_is_not_set_yet_forgets_nothing() -> None:
    record = endurance.add(b"", 30.0, 3, 1)
    assert endurance.day_totals(record, 60.0 + 2 * DAY_S) == DayTotals()
    record = endurance.add(record, NOW_S, 100, 0)
    record = endurance.add(record, 60.0, 1, 0)
    assert endurance.day_totals(record, 90.0) == DayTotals(104, 1)
    assert endurance.day_totals(record, NOW_S + DAY_S / 2) == DayTotals(104, 1)
    assert endurance.day_totals(record, NOW_S + DAY_S + BUCKET_S) == DayTotals()


def test_merged_records_have_the_bytes_of_both_by_their_time() -> None:
    old = endurance.add(b"", NOW_S, 10, 1)
    new = endurance.add(endurance.add(b"", NOW_S + BUCKET_S, 3, 0), NOW_S + DAY_S / 2, 5, 2)
    for first, second in ((old, new), (new, old)):
        record = endurance.merged(first, second, NOW_S + DAY_S / 2)
        assert endurance.day_totals(record, NOW_S + DAY_S / 2) == DayTotals(18, 3)
        assert endurance.day_totals(record, NOW_S + DAY_S + BUCKET_S).written == 8
        assert endurance.day_totals(record, NOW_S + DAY_S * 1.2).written == 5
    assert endurance.day_totals(endurance.merged(b"", old, NOW_S), NOW_S) == DayTotals(10, 1)
    ahead = endurance.merged(old, new, NOW_S + DAY_S / 2 - BUCKET_S)
    assert endurance.day_totals(ahead, NOW_S + DAY_S / 2).written == 18


@pytest.mark.parametrize("damaged", [b"", b"x", b"y" * (RECORD_BYTES + 1)])
def test_a_damaged_record_begins_anew(damaged: bytes) -> None:
    assert endurance.day_totals(endurance.add(damaged, NOW_S, 5, 6), NOW_S) == DayTotals(5, 6)


def test_a_day_is_whole_once_its_oldest_bucket_was_written() -> None:
    record = b""
    for bucket in range(BUCKETS - 1):
        now_s = NOW_S + bucket * BUCKET_S
        assert not endurance.day_totals(record, now_s).is_whole_day
        record = endurance.add(record, now_s, 1, 0)
    assert endurance.day_totals(record, NOW_S + (BUCKETS - 1) * BUCKET_S).is_whole_day


def test_the_record_fits_into_a_page_of_the_index() -> None:
    assert len(endurance.add(b"", NOW_S, 1, 1)) == RECORD_BYTES < INLINE_LIMIT_BYTES


def gauge(name: str, snapshot: MetricsSnapshot) -> list[tuple[tuple[str, ...], float]]:
    """The values of a metric."""
    (metric,) = (metric for metric in METRICS if metric.name == name)
    return list(metric.values(snapshot))


def test_wear_as_metrics() -> None:
    """Bytes written per byte stored, and per byte read back; nothing where there is no ratio."""
    counters = Counters.for_tiers(("cpu", "nvme", "slow"))
    top = TierState("cpu", "CPU", block_bytes=100, blocks=0, capacity_blocks=8, dirty_blocks=0)

    def below(name: str, day: DayTotals) -> TierState:
        return TierState(name, "NVME", 100, 0, 8, 0, day=day)

    tiers = [top, below("nvme", DayTotals(600, 200)), below("slow", DayTotals(600, 0))]
    snapshot = MetricsSnapshot(counters, tiers)
    assert gauge("write_amplification", snapshot) == []
    assert gauge("written_per_read", snapshot) == [(("nvme",), 3.0)]
    counters.stored_blocks = 10
    counters.links[0].demoted_bytes = 500
    assert gauge("write_amplification", snapshot) == [(("nvme",), 0.5), (("slow",), 0.0)]
    assert gauge("day_written_bytes", snapshot) == [(("nvme",), 600), (("slow",), 600)]


def test_engines_that_do_not_report_a_tier_add_nothing_to_its_gauges() -> None:
    """Sums over the engines of a tier are those of the tier."""
    day = DayTotals(600, 200)
    one = TierState("nvme", "NVME", 100, 4, 8, 0, waiting_blocks=3, budget_left_bytes=7, day=day)
    two = dataclasses.replace(one, is_reporter=False, waiting_blocks=2)
    counters = Counters.for_tiers(("cpu", "nvme"))
    snapshots = [MetricsSnapshot(counters, [state]) for state in (one, two)]
    for name, whole in {
        "tier_blocks": 4, "tier_used_ratio": 0.5, "tier_used_bytes": 400,
        "tier_capacity_bytes": 800, "day_written_bytes": 600, "day_read_bytes": 200,
        "write_budget_left_bytes": 7, "written_per_read": 3.0, "pending_blocks": 5,
    }.items():  # fmt: skip
        values = [gauge(name, snapshot) for snapshot in snapshots]
        assert sum(found[0][1] for found in values) == whole, name
    other_model = dataclasses.replace(one, is_path_reporter=False)
    assert gauge("write_budget_left_bytes", MetricsSnapshot(counters, [other_model]))[0][1] == 0
    assert gauge("write_budget_left_bytes", MetricsSnapshot(counters, [
        dataclasses.replace(two, budget_left_bytes=None)
    ])) == []  # fmt: skip
    server = MetricsSnapshot(counters, [dataclasses.replace(one, remote=RemoteNote(None))])
    assert gauge("tier_blocks", server) == gauge("tier_used_ratio", server) == []
