"""What rows say of themselves: which way is better, and what a p95 of few requests is."""

from __future__ import annotations

import re

import pytest

from kvcascade.tools.commands.bench.bench_results import Quantity, quantile
from kvcascade.tools.dev.bench import MEASUREMENTS, measurement_of
from kvcascade.tools.dev.bench.engine.engine import MEASUREMENT as ENGINE
from kvcascade.tools.dev.bench.engine.engine_runs import fresh_prompts, one_pass
from kvcascade.tools.dev.bench.measurement import Measurement
from kvcascade.tools.dev.bench.scale import EngineScale
from kvcascade.tools.dev.bench.transfer_bench import quantities

FOUND = {
    "hit rate",
    "blocks found",
    "recency kept",
    "cached tokens",
    "of the idle rate",
    "beside stores",
    "beside loads",
}
"""In names of rows of which more is better, though they are no rates."""


def rows(name: str) -> tuple[Quantity, ...]:
    """Of a measurement."""
    measurement: Measurement = measurement_of(name)
    return measurement.quantities or quantities(512 << 10, paths=2)


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_every_row_says_which_way_is_better(name: str) -> None:
    for row in rows(name):
        is_rate = row.unit.endswith("/s") or any(part in row.name for part in FOUND)
        has_least = any(goal.is_least for goal in row.goals)
        assert row.is_more_better is (is_rate or has_least), row
        assert not row.goals or row.is_more_better is has_least, row


def test_the_note_tells_what_a_p95_is() -> None:
    scale = EngineScale()
    for count in (len(fresh_prompts(scale, "fresh", scale.fresh)), len(one_pass(scale))):
        assert quantile(range(count), 0.95) == count - 1
        assert str(count) in re.findall(r"\d+", ENGINE.note)
