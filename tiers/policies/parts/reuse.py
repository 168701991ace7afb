"""The value of keeping a run, learnt from earlier returns.

A *run* is a group of blocks that the same request was the last to use. Its *class* holds what is
known when the run is made. `kind` is its part of the request and its number of returns. `gap` is
the usual time between returns. `size` is the number of new blocks.

For each class and age the model counts runs that reached the age (`at_risk`) and runs that returned
at it (`events`). The ratio is the hazard. Rare classes borrow from wider groups: a class from its
kind, a kind from all, and all from a prior hazard that falls with age, which is LRU.

The value of a run is its best rate of return. For any later age the rate is the expected uses until
then, divided by the expected time until the use or that age; the best of these ages counts (J. C.
Gittins: "Bandit Processes and Dynamic Allocation Indices", 1979). N. Beckmann et al. have the same
measure for blocks ("LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018). A person
reads before answering, so a fresh run may be worth less than one whose answer is due. Recency alone
cannot express that.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from ..order import ArraySource, heap_arrays

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

USES = (1, 2, 3, 5, 9)
"""Limits of the classes by number of returns: 0, 1, 2, 3-4, 5-8, more."""
GAPS_LOG2 = (2, 3, 4, 5, 6, 7, 8, 9)
"""Limits of the classes by the mean of log2(1 + time between uses)."""
SIZES = (2, 5, 17, 65)
"""Limits of the classes by number of new blocks."""

TIPS, LEFT_BEHIND, SHARED = 0, len(USES) + 1, len(USES) + 2
"""First kind of each group: ends of conversations by uses, parts that a conversation no longer
uses, and beginnings that several conversations share, by uses."""
KINDS = SHARED + len(USES) + 1
GAP_CLASSES = len(GAPS_LOG2) + 2
"""Number of classes of `gap`; the first one holds runs that never returned."""
SIZE_CLASSES = len(SIZES) + 1
CLASSES = KINDS * GAP_CLASSES * SIZE_CLASSES
UNKNOWN = CLASSES
"""Class of runs whose request has not ended; they have the average value."""

AGES = np.unique(np.round(2 ** (np.arange(38) / 2)).astype(np.int64))
"""Ages, in requests, at which classes of age begin, two an octave; the last one is the end."""
AGE_CLASSES = len(AGES) - 1
_AGES = tuple(AGES[:-1].tolist())
_OLDEST = _AGES[-1]

PRIOR_HAZARD = 0.2
"""Prior chance of a return within one class of age."""
PRIOR_RUNS = 200.0
"""Weight of the prior hazard, in runs."""
KIND_RUNS = 20.0
"""Weight of the wider group's hazard against a kind's or a class's own counts, in runs."""
HAZARD_MAX = 0.97
HALVE_EVERY = 16_384
"""Number of requests after which all counts are halved."""


def use_class(uses: int) -> int:
    """Return the class of `USES` that a number belongs to."""
    return bisect_right(USES, uses)


def class_of(kind: int, gap_log2: float | None, new_blocks: int) -> int:
    """Return the class of a run; `gap_log2` is None if the run never returned."""
    gap_class = 0 if gap_log2 is None else 1 + bisect_right(GAPS_LOG2, gap_log2)
    return (kind * GAP_CLASSES + gap_class) * SIZE_CLASSES + bisect_right(SIZES, new_blocks)


class ReuseModel:
    """Hazards and values by class and age. 0.4 MB, whatever the tier's size."""

    def __init__(self, name: str, arrays: ArraySource = heap_arrays) -> None:
        shape = (AGE_CLASSES, CLASSES)
        cells = AGE_CLASSES * CLASSES
        self._events = arrays(f"{name}_events", cells, np.float32).reshape(shape)
        self._at_risk = arrays(f"{name}_at_risk", cells, np.float32).reshape(shape)
        values = arrays(f"{name}_values", (AGE_CLASSES + 1) * (CLASSES + 1), np.float32)
        self._values = values.reshape(CLASSES + 1, AGE_CLASSES + 1)
        if not self._values[UNKNOWN, 0] > 0:
            self.clear()

    def note_return(self, class_: int, age: int) -> None:
        """Count the return of a run of this class at this age."""
        if class_ != UNKNOWN:
            age_class = bisect_right(_AGES, age) - 1
            self._events[age_class, class_] += 1

    def note_aged(self, age_class: int, classes: Ints) -> None:
        """Count runs of these classes that reached a class of age without a return."""
        self._at_risk[age_class] += np.bincount(classes, minlength=CLASSES + 1)[:CLASSES]

    def halve(self) -> None:
        """Halve all counts."""
        self._events *= 0.5
        self._at_risk *= 0.5

    def value(self, classes: Ints, ages: Ints) -> Floats:
        """Return the expected uses per request of waiting for runs of these classes and ages."""
        ages = np.minimum(np.maximum(ages, 1), _OLDEST)
        at = np.searchsorted(AGES, ages, side="right") - 1
        share = (ages - AGES[at]) / (AGES[at + 1] - AGES[at])
        before, after = self._values[classes, at], self._values[classes, at + 1]
        return np.asarray(before * (1 - share) + after * share)

    def update_values(self) -> None:
        """Compute all values from the counts."""
        hazard = np.ascontiguousarray(self._hazards().T)
        width = np.diff(AGES)[:, None]
        survival = np.cumprod(1 - hazard, axis=0)
        start = np.zeros((1, CLASSES + 1))
        reached = np.concatenate((start + 1, survival[:-1]))
        uses = np.concatenate((start, np.cumsum(reached * hazard, axis=0)))
        waits = reached * width * (1 - hazard / 2)
        time = np.concatenate((start, np.cumsum(waits, axis=0)))
        values = np.empty((AGE_CLASSES + 1, CLASSES + 1))
        for age in range(AGE_CLASSES):
            waited = time[age + 1 :] - time[age]
            rate = uses[age + 1 :] - uses[age]
            rate /= np.maximum(waited, 1e-30, out=waited)
            rate.max(axis=0, out=values[age])
        values[AGE_CLASSES] = values[AGE_CLASSES - 1]
        self._values[:] = values.T

    def clear(self) -> None:
        """Forget everything."""
        self._events[:] = 0
        self._at_risk[:] = 0
        self.update_values()

    def _hazards(self) -> Floats:
        """Return the hazards by class, and of all in the last row: `(CLASSES + 1, AGE_CLASSES)`."""
        shape = (KINDS, GAP_CLASSES, SIZE_CLASSES, AGE_CLASSES)
        events = _smooth(self._events).reshape(shape)
        at_risk = _smooth(self._at_risk).reshape(shape)
        tips = slice(TIPS, LEFT_BEHIND)
        overall = (events[tips].sum(axis=(0, 1, 2)) + PRIOR_RUNS * PRIOR_HAZARD) / (
            at_risk[tips].sum(axis=(0, 1, 2)) + PRIOR_RUNS
        )
        wider = np.full((KINDS, 1, 1, AGE_CLASSES), PRIOR_HAZARD)
        wider[tips] = overall
        kind = _lean(events.sum(axis=(1, 2), keepdims=True), at_risk, (1, 2), wider)
        by_gap = _lean(events.sum(axis=2, keepdims=True), at_risk, (2,), kind)
        by_size = _lean(events.sum(axis=1, keepdims=True), at_risk, (1,), kind)
        # Gap and size are taken as independent, given the kind: too few runs for every pair.
        hazard = (by_gap * by_size / kind).reshape(CLASSES, AGE_CLASSES)
        return np.asarray(np.minimum(np.concatenate((hazard, overall[None])), HAZARD_MAX))


def _lean(events: Floats, at_risk: Floats, axes: tuple[int, ...], wider: Floats) -> Floats:
    """Return hazards from counts, drawn towards the hazards of a wider group."""
    runs = at_risk.sum(axis=axes, keepdims=True)
    return np.asarray((events + KIND_RUNS * wider) / (runs + KIND_RUNS))


def _smooth(counts: npt.NDArray[np.float32]) -> Floats:
    """Return counts by class and age, with half of both neighbours added to each age."""
    found = counts.T.astype(np.float64)
    smooth = found.copy()
    smooth[:, 1:] += found[:, :-1] / 2
    smooth[:, :-1] += found[:, 1:] / 2
    return smooth
