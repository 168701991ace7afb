"""What a measurement is, and how it is run: repeated, with the contenders taking turns.

A measurement gives cases one after another; a case is a set of contenders, each a function that
does the work once and returns its figures by name. Contenders of one case run in turns, another one
first each time, so that a machine that slows down or speeds up does so for all of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...commands.bench.bench_results import Quantity, Row, Table
from .scale import Scale

Figures = Mapping[str, float | None]
"""Quantity to figure; what is not there was not measured. None: it could not be, and there is a row
that says so."""

Say = Callable[[str], None]
"""Takes a line of progress."""


@dataclass(frozen=True, slots=True)
class MeasurementSetup:
    """What a measurement is given."""

    folder: Path
    """Its own, empty, on the disk that is measured."""
    scale: Scale
    say: Say
    nvme: Mapping[str, Any] = field(default_factory=dict)
    """Options of our NVMe tier in transfers, beside those that a measurement sets."""
    note: Say = lambda line: None
    """Takes a sentence that stays with the results: what is not measured, why, and what to do."""
    has_time: Callable[[], bool] = lambda: True
    """Returns False when nothing new is to be started."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured together."""

    label: str
    contenders: Mapping[str, Callable[[], Figures]]
    quantities: tuple[Quantity, ...] = ()
    """Its rows, where they are not those of the measurement."""
    repeats: int | None = None
    """How often each contender runs, where not as often as the scale says."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One table."""

    name: str
    title: str
    note: str
    """How it was measured, for readers of the table."""
    quantities: tuple[Quantity, ...]
    """Its rows, in their order; those that no contender has a figure of are left out."""
    cases: Callable[[MeasurementSetup], Generator[Case, None, None]]
    """Makes the cases; what a case needs may go when the next one is asked for."""
    derived: Callable[[Sequence[Row]], list[Row]] = lambda rows: []
    """Rows that follow from the others."""


def run(measurement: Measurement, setup: MeasurementSetup) -> Table:
    """Run all cases of a measurement."""
    rows: list[Row] = []
    with closing(measurement.cases(setup)) as cases:
        for case in cases:
            if not setup.has_time():
                setup.note(
                    f"{measurement.name}: the time is up, so nothing is measured from "
                    f"{case.label!r} on; --minutes gives more"
                )
                break
            rows += run_case(case, case.quantities or measurement.quantities, setup)
    rows += measurement.derived(rows)
    return Table(measurement.name, measurement.title, measurement.note, rows)


def run_case(case: Case, quantities: Sequence[Quantity], setup: MeasurementSetup) -> list[Row]:
    """Run one case as often as the scale says, or once if the time is up; returns the rows that it
    has figures of."""
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
