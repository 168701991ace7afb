"""Statistics of samples, goals, and the JSON document."""

from __future__ import annotations

import json

import pytest

from kvcascade.tools.commands.bench.bench_results import (
    LIMIT,
    OURS,
    VLLM,
    Goal,
    Quantity,
    Row,
    Table,
    document,
    quantile,
)


def row(goals: tuple[Goal, ...] = (), **samples: list[float]) -> Row:
    """A row with these samples."""
    return Row("a case", Quantity("speed", "GB/s", goals), samples)


def test_median_and_spread() -> None:
    made = row(ours=[3.0, 1.0, 2.0, 10.0], vllm=[4.0])
    assert made.median() == 2.5
    assert made.spread() == pytest.approx((10 - 1) / 2 / 2.5)
    assert made.median(VLLM) == 4 and made.spread(VLLM) == 0
    assert made.median(LIMIT) is None and made.spread(LIMIT) is None and made.ratio(LIMIT) is None


def test_a_spread_around_nothing_is_none() -> None:
    assert row(ours=[0.0, 0.0]).spread() is None


def test_a_ratio_compares_what_was_measured_together() -> None:
    slowing = row(ours=[1.0, 2.0, 4.0], vllm=[2.0, 4.0, 8.0])
    assert slowing.ratio(VLLM) == 0.5
    assert row(ours=[1.0, 9.0], vllm=[0.0, 3.0]).ratio(VLLM) == 3, "nothing to divide by: left out"
    assert row(ours=[1.0], vllm=[0.0]).ratio(VLLM) is None


def test_goals() -> None:
    goals = (Goal(0.5, VLLM), Goal(0.9, LIMIT, is_least=True), Goal(3.0))
    assert [goal.text for goal in goals] == ["≤ 0.5× vllm", "≥ 0.9× limit", "≤ 3"]
    made = row(goals, ours=[2.0], vllm=[4.0], limit=[4.0])
    assert [(value, is_met) for _, value, is_met in made.verdicts()] == [
        (0.5, True),
        (0.5, False),
        (2.0, True),
    ]
    assert [goal.against for goal, *_ in row(goals, ours=[2.0]).verdicts()] == [None]


@pytest.mark.parametrize(
    ("samples", "share", "expected"),
    [([5.0], 0.99, 5), ([1, 2, 3, 4], 0.5, 2), ([4, 3, 2, 1], 0.51, 3), ([1, 2], 1.0, 2)],
)
def test_quantiles(samples: list[float], share: float, expected: float) -> None:
    assert quantile(samples, share) == expected


def test_a_quantile_of_nothing() -> None:
    with pytest.raises(ValueError, match="nothing"):
        quantile([], 0.5)


def test_the_document_holds_every_sample() -> None:
    made = row((Goal(0.5, VLLM),), ours=[1.0, 2.0], vllm=[4.0, 4.0])
    table = Table("manager", "The manager", "How.", [made])
    found = json.loads(json.dumps(document([table], {"machine": {"cores": 2}})))
    assert found["format"] == 1 and found["machine"] == {"cores": 2}
    (measurement,) = found["measurements"]
    assert measurement["name"] == "manager"
    assert measurement["rows"] == [
        {
            "case": "a case",
            "quantity": "speed",
            "unit": "GB/s",
            "is_more_better": False,
            "median": {OURS: 1.5, VLLM: 4.0},
            "spread": {OURS: pytest.approx(1 / 3), VLLM: 0.0},
            "ratio": {VLLM: 0.375},
            "goals": [{"goal": "≤ 0.5× vllm", "value": 0.375, "met": True}],
            "samples": {OURS: [1.0, 2.0], VLLM: [4.0, 4.0]},
        }
    ]
