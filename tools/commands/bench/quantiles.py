"""The one quantile that all commands report."""

from __future__ import annotations

from collections.abc import Iterable


def quantile(samples: Iterable[float], share: float) -> float:
    """The smallest sample that at least `share` of all are not above: never one between two.

    Of few samples a high quantile is simply the largest one.
    """
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("a quantile of nothing")
    rank = max(1, -int(-share * len(ordered) // 1))
    return ordered[min(rank, len(ordered)) - 1]
