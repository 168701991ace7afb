"""A `bench.json` as `kvcascade bench` writes it, with rates that are made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from kvcascade.tools.commands.bench.bench_results import OURS, Row, Table, document
from kvcascade.tools.dev.bench.measurement import MeasurementSetup
from kvcascade.tools.dev.bench.scale import FULL
from kvcascade.tools.dev.bench.transfer_bench import MEASUREMENT, cases


def write_bench(path: Path, rate: Callable[[str], float] = lambda case: 1.0) -> None:
    """All cases of the transfers under the names that the benchmark gives them.

    `rate`: GB/s of every row of a case.
    """
    setup = MeasurementSetup(path.parent, FULL, lambda line: None)
    rows = [
        Row(case.label, quantity, {OURS: [rate(case.label)]})
        for case in cases(setup)
        for quantity in case.quantities
    ]
    table = Table(MEASUREMENT.name, MEASUREMENT.title, MEASUREMENT.note, rows)
    path.write_text(json.dumps(document([table], {})))
