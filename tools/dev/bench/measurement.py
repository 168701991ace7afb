"""Definition of a measurement, and the loop that runs it.

A measurement yields cases. A case is a set of contenders, each a function that does the work once
and returns figures by name. The contenders of a case run in turn, and the order rotates with each
repetition. If the machine's speed changes, all contenders are affected alike.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from ...commands.bench.bench_results import BenchError, Quantity, Row, Table
from .scale import Scale

Figures = Mapping[str, float | None]
"""Mapping of quantities to figures. A missing quantity was not measured. None means that it could
not be measured, and there is a row that says so."""

PHASE_LIMIT_S = 300.0
"""Time after which a phase counts as hung."""

Say = Callable[[str], None]
"""Function that prints a line of progress."""


@dataclass(frozen=True, slots=True)
class MeasurementSetup:
    """Environment of a measurement."""

    folder: Path
    """Empty folder for this measurement, on the disk that is measured."""
    scale: Scale
    say: Say
    note: Say = lambda line: None
    """Function that stores a sentence with the results: which measurement is missing, why, and the
    remedy."""
    has_time: Callable[[], bool] = lambda: True
    """Function that returns False if no new work may begin."""
    lmcache_python: Path | None = None
    """Python of an environment with LMCache, if one was named."""
    keep: Callable[[Table], None] = lambda table: None
    """Function that saves the rows so far; it is called after each case."""


@dataclass(frozen=True, slots=True)
class Case:
    """Contenders that are measured together."""

    label: str
    contenders: Mapping[str, Callable[[], Figures]]
    quantities: tuple[Quantity, ...] = ()
    """Rows of the case, if they differ from the measurement's."""
    repeats: int | None = None
    """Repetitions of each contender, if they differ from the scale's."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One table of cases and quantities."""

    name: str
    title: str
    note: str
    """Description of the method, for readers of the table."""
    quantities: tuple[Quantity, ...]
    """Rows of the table in order; rows without any figure are left out."""
    cases: Callable[[MeasurementSetup], Generator[Case, None, None]]
    """Generator of the cases; resources of a case may be released when the next one is
    requested."""
    derived: Callable[[Sequence[Row]], list[Row]] = lambda rows: []
    """Function that computes further rows from the measured rows."""


def until(is_done: Callable[[], bool], what: str, limit_s: float = PHASE_LIMIT_S) -> Iterator[None]:
    """Yield once per step until a condition holds. Raises `BenchError` after `limit_s`."""
    end_s = monotonic() + limit_s
    while not is_done():
        if monotonic() > end_s:
            raise BenchError(f"{what} did not end within {limit_s:.0f} s")
        yield


def run(measurement: Measurement, setup: MeasurementSetup) -> Table:
    """Run all cases of a measurement."""
    rows: list[Row] = []
    table = Table(measurement.name, measurement.title, measurement.note, rows)
    with closing(measurement.cases(setup)) as cases:
        for case in cases:
            if not setup.has_time():
                setup.note(
                    f"{measurement.name}: the time is up, so nothing is measured from "
                    f"{case.label!r} on; --minutes gives more"
                )
                break
            rows += run_case(case, case.quantities or measurement.quantities, setup)
            setup.keep(table)
    rows += measurement.derived(rows)
    return table


def run_case(case: Case, quantities: Sequence[Quantity], setup: MeasurementSetup) -> list[Row]:
    """Run a case as often as the scale says, or once if the time is up; return the rows with
    figures."""
    samples: dict[str, dict[str, list[float]]] = {}
    names = list(case.contenders)
    repeats = case.repeats or setup.scale.repeats
    for repeat in range(repeats):
        if repeat and not setup.has_time():
            setup.note(f"{case.label}: measured {repeat} of {repeats} times, the time is up")
            break
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            setup.say(f"{case.label}: {name}, {repeat + 1} of {repeats}")
            gc.collect()
            for quantity, figure in case.contenders[name]().items():
                found = samples.setdefault(quantity, {})
                if figure is not None:
                    found.setdefault(name, []).append(figure)
    unknown = samples.keys() - {quantity.name for quantity in quantities}
    assert not unknown, f"figures without a row: {unknown}"
    return [Row(case.label, q, samples[q.name]) for q in quantities if q.name in samples]
