"""How cases are run: repeated, in turns, and let go of."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.bench_scale import SMOKE

from kvcascade.tools.commands.bench.bench_report import render
from kvcascade.tools.commands.bench.bench_results import OURS, VLLM, Quantity, Row, Table
from kvcascade.tools.dev.bench.measurement import Case, Figures, Measurement, MeasurementSetup, run
from kvcascade.tools.dev.bench.scheduler.manager_cost import flatness

QUANTITIES = (Quantity("a", "s"), Quantity("b", "s"))


def setup(folder: Path, said: list[str], repeats: int) -> MeasurementSetup:
    """What a measurement is given."""
    return MeasurementSetup(folder, replace(SMOKE, repeats=repeats), said.append)


def test_contenders_take_turns(tmp_path: Path) -> None:
    order: list[str] = []
    ended: list[str] = []

    def contender(name: str) -> Figures:
        order.append(name)
        return {"a": float(len(order))}

    def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
        try:
            yield Case("one", {name: partial(contender, name) for name in (OURS, VLLM)})
        finally:
            ended.append("one")

    said: list[str] = []
    measurement = Measurement("m", "M", "", QUANTITIES, cases)
    table = run(measurement, setup(tmp_path, said, repeats=3))
    assert order == [OURS, VLLM, VLLM, OURS, OURS, VLLM]
    assert [row.quantity.name for row in table.rows] == ["a"], "nothing was measured of the other"
    assert table.rows[0].samples == {OURS: [1, 4, 5], VLLM: [2, 3, 6]}
    assert ended == ["one"] and said[0] == "one: ours, 1 of 3"


def test_what_could_not_be_measured_is_a_row_without_a_figure(tmp_path: Path) -> None:
    figures: Iterator[Figures] = iter([{"a": None}, {"a": 2.0}, {"b": None}, {"b": None}])

    def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
        yield Case("one", {OURS: lambda: next(figures)})
        yield Case("two", {OURS: lambda: next(figures)})

    rows = run(Measurement("m", "M", "", QUANTITIES, cases), setup(tmp_path, [], repeats=2)).rows
    assert [(row.quantity.name, dict(row.samples)) for row in rows] == [
        ("a", {OURS: [2.0]}),
        ("b", {}),
    ]
    assert "–" in [
        cell for column in render(Table("m", "M", "", rows)).columns for cell in column.cells
    ]


def test_a_case_is_let_go_of_when_a_contender_fails(tmp_path: Path) -> None:
    ended: list[str] = []

    def fail() -> Figures:
        raise RuntimeError("no disk")

    def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
        try:
            yield Case("one", {OURS: fail})
        finally:
            ended.append("one")

    with pytest.raises(RuntimeError, match="no disk"):
        run(Measurement("m", "M", "", QUANTITIES, cases), setup(tmp_path, [], repeats=1))
    assert ended == ["one"]


def test_rows_are_kept_before_the_next_case_may_fail(tmp_path: Path) -> None:
    kept: list[list[str]] = []

    def fail() -> Figures:
        raise RuntimeError("no GPU")

    def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
        yield Case("one", {OURS: lambda: {"a": 1.0}})
        yield Case("two", {OURS: fail})

    given = replace(
        setup(tmp_path, [], repeats=1), keep=lambda table: kept.append([r.case for r in table.rows])
    )
    with pytest.raises(RuntimeError, match="no GPU"):
        run(Measurement("m", "M", "", QUANTITIES, cases), given)
    assert kept == [["one"]]


def test_flatness_compares_the_smallest_and_the_largest() -> None:
    names = [row.quantity.name for row in flatness(_manager_rows(1.0, 1.2))]
    assert "lookup, hit" in names and "end of a step" not in names
    found = {row.quantity.name: row for row in flatness(_manager_rows(1.0, 1.2))}
    assert found["load"].median() == pytest.approx(1.2) and found["load"].median(VLLM) is None
    assert found["load"].case == "256 blocks / 128 blocks"
    assert flatness(_manager_rows(1.0)) == []


def _manager_rows(*figures: float) -> list[Row]:
    from kvcascade.tools.dev.bench.scheduler.manager_cost import MEASUREMENT, label_of

    return [
        Row(label_of(128 * (number + 1)), quantity, {OURS: [figure]})
        for number, figure in enumerate(figures)
        for quantity in MEASUREMENT.quantities
    ]


def test_nothing_begins_when_the_time_is_up(tmp_path: Path) -> None:
    """The case that has begun is measured once by everybody; what is left out is said."""
    has_time: Iterator[bool] = iter([True, False, False])
    measured: list[str] = []

    def contender(name: str) -> Figures:
        measured.append(name)
        return {"a": 1.0}

    def cases(setup: MeasurementSetup) -> Generator[Case, None, None]:
        yield Case("one", {name: partial(contender, name) for name in (OURS, VLLM)})
        yield Case("two", {OURS: partial(contender, "two")})
        raise AssertionError("nothing is made ready any more")

    notes: list[str] = []
    given = replace(
        setup(tmp_path, [], repeats=5), note=notes.append, has_time=lambda: next(has_time)
    )
    rows = run(Measurement("m", "M", "", QUANTITIES, cases), given).rows
    assert measured == [OURS, VLLM] and [row.case for row in rows] == ["one"]
    assert notes == [
        "one: measured 1 of 5 times, the time is up",
        "m: the time is up, so nothing is measured from 'two' on; --minutes gives more",
    ]
