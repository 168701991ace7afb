"""Results of a benchmark: samples, statistics, goals, JSON. Plain data and pure functions."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..command_line import CommandError, ExitCode

FORMAT = 1
"""Version of the JSON document."""

OURS, VLLM, LMCACHE = "ours", "vllm", "lmcache"
CLIENT, PAGES, LIMIT, NONE = "client", "pages", "limit", "none"
CONTENDERS = (OURS, VLLM, LMCACHE, CLIENT, PAGES, LIMIT, NONE)
"""Contenders: kvcascade, vLLM's own offloading, LMCache, a client of Valkey, batched copies of
single pages, the limit of the machine, and an engine without the tier that is measured."""


KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GIGA = 1e9

TRANSFERS = "transfers"
"""Name of the measurement of tier rates; `kvcascade replay --bench` reads its rows."""
DOWN, UP = "down", "up"
_UNITS = {"KiB": KIB, "MiB": MIB}
_CASE = re.compile(r"([0-9]+) (KiB|MiB) blocks")


class BenchError(CommandError):
    """A measurement could not be made; the message names the missing requirement."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.PROBLEMS)


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on kvcascade's figure, or on its ratio to the figure of another contender."""

    bound: float
    against: str | None = None
    """Contender whose figure the ratio divides by; None if the bound is on the figure itself."""
    is_least: bool = False
    """True if the bound is a minimum, False if it is a maximum."""

    @property
    def text(self) -> str:
        """Return the bound as short text."""
        sign, unit = "≥" if self.is_least else "≤", "" if self.against is None else "×"
        whose = "" if self.against is None else f" {self.against}"
        return f"{sign} {self.bound:g}{unit}{whose}"

    def is_met(self, figure: float) -> bool:
        """Return True if a figure, or a ratio, is within the bound."""
        return figure >= self.bound if self.is_least else figure <= self.bound


@dataclass(frozen=True, slots=True)
class Quantity:
    """A measured quantity: the name and unit of a row."""

    name: str
    unit: str
    goals: tuple[Goal, ...] = ()
    is_more_better: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity of one case, with all samples of each contender."""

    case: str
    quantity: Quantity
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def median(self, contender: str = OURS) -> float | None:
        """Return the median sample, or None if nothing was measured."""
        samples = self.samples.get(contender)
        return statistics.median(samples) if samples else None

    def spread(self, contender: str = OURS) -> float | None:
        """Return half the distance between the smallest and largest sample, as a share of the
        median."""
        samples, middle = self.samples.get(contender), self.median(contender)
        if not samples or not middle:
            return None
        return (max(samples) - min(samples)) / 2 / abs(middle)

    def ratio(self, contender: str) -> float | None:
        """Return kvcascade's figure divided by a contender's: the median over repetitions that
        measured both."""
        pairs = zip(self.samples.get(OURS, ()), self.samples.get(contender, ()), strict=False)
        ratios = [ours / theirs for ours, theirs in pairs if theirs]
        return statistics.median(ratios) if ratios else None

    def verdicts(self) -> list[tuple[Goal, float, bool]]:
        """Return every goal that has a figure, with the figure and whether it meets the goal."""
        found: list[tuple[Goal, float, bool]] = []
        for goal in self.quantity.goals:
            figure = self.median() if goal.against is None else self.ratio(goal.against)
            if figure is not None:
                found.append((goal, figure, goal.is_met(figure)))
        return found


@dataclass(frozen=True, slots=True)
class Table:
    """All rows of one measurement."""

    name: str
    title: str
    note: str
    rows: Sequence[Row]


def document(tables: Sequence[Table], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON document: facts of the run, then every row with all its samples."""
    return {
        "format": FORMAT,
        **facts,
        "measurements": [
            {
                "name": table.name,
                "title": table.title,
                "note": table.note,
                "rows": [row_facts(row) for row in table.rows],
            }
            for table in tables
        ],
    }


def row_facts(row: Row) -> dict[str, Any]:
    """Return a row as it is in the JSON document."""
    there = [contender for contender in CONTENDERS if row.samples.get(contender)]
    return {
        "case": row.case,
        "quantity": row.quantity.name,
        "unit": row.quantity.unit,
        "is_more_better": row.quantity.is_more_better,
        "median": {contender: row.median(contender) for contender in there},
        "spread": {contender: row.spread(contender) for contender in there},
        "ratio": {contender: row.ratio(contender) for contender in there if contender != OURS},
        "goals": [
            {"goal": goal.text, "value": figure, "met": is_met}
            for goal, figure, is_met in row.verdicts()
        ],
        "samples": {contender: list(row.samples[contender]) for contender in there},
    }


def quantile(samples: Iterable[float], share: float) -> float:
    """Return the smallest sample such that at least `share` of all samples are not above it.

    The result is always one of the samples. With few samples, a high quantile is the largest one.
    """
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("a quantile of nothing")
    rank = max(1, -int(-share * len(ordered) // 1))
    return ordered[min(rank, len(ordered)) - 1]


def size_label(size: int) -> str:
    """Return a block size as it is printed in tables."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def transfer_case(block_bytes: int, paths: int = 1) -> str:
    """Return the name of the transfer case of a block size."""
    more = ", two paths" if paths > 1 else ""
    return f"{size_label(block_bytes)} blocks{more}"


def transfer_block_bytes(case: str) -> int | None:
    """Return the block size of a transfer case with one path, or None for any other case.

    Cases with two paths are left out because two disks are faster than one.
    """
    found = _CASE.fullmatch(case)
    return int(found[1]) * _UNITS[found[2]] if found else None
