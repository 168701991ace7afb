"""When what was used will be used again, learnt from what came back: the value of keeping a run.

A *run* is what one request was the last to use: blocks that were used together and will be used
together. Its *class* says what is known of it when it is made: what part of a request it is and how
often that has come back (`kind`), after how long it used to (`gap`), and how much was new (`size`).
For each class and age the model counts how many runs got that old (`at_risk`) and how many came
back at that age (`events`); the ratio is the hazard. What has been seen seldom leans on what is
wider: a class on its kind, a kind on all, and all on a hazard that falls with age, which is LRU.

The value of a run of some age is the best rate of return over all ways to wait for it: uses to be
had until some later age, divided by the time until then or the use (J. C. Gittins: "Bandit
Processes and Dynamic Allocation Indices", 1979; N. Beckmann et al.: "LHD: Improving Cache Hit Rate
by Maximizing Hit Density", NSDI 2018, has the same measure for blocks). A person reads before
answering, so a fresh run may be worth less than one whose answer is due: no order by recency
can say that.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from .order import ArraySource, heap_arrays

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

USES = (1, 2, 3, 5, 9)
"""Kinds by how often a run has come back: 0, 1, 2, 3-4, 5-8, more."""
GAPS_LOG2 = (2, 3, 4, 5, 6, 7, 8, 9)
"""Classes by the mean of log2(1 + time between uses)."""
SIZES = (2, 5, 17, 65)
"""Classes by the number of new blocks."""

TIPS, LEFT_BEHIND, SHARED = 0, len(USES) + 1, len(USES) + 2
"""Kinds: the end of a conversation by its uses; what a conversation left aside; what several
conversations begin with, by its uses."""
KINDS = SHARED + len(USES) + 1
GAP_CLASSES = len(GAPS_LOG2) + 2
"""The first one: never came back."""
SIZE_CLASSES = len(SIZES) + 1
CLASSES = KINDS * GAP_CLASSES * SIZE_CLASSES
UNKNOWN = CLASSES
"""The class of runs of which nothing is known; they are worth what a run is on average."""

AGES = np.unique(np.round(2 ** (np.arange(38) / 2)).astype(np.int64))
"""Ages, in requests, at which classes of age begin: two an octave; the last one ends the scale."""
AGE_CLASSES = len(AGES) - 1
_AGES = tuple(AGES[:-1].tolist())
_OLDEST = _AGES[-1]

PRIOR_HAZARD = 0.2
"""Chance to come back within one class of age, before anything is known."""
PRIOR_RUNS = 200.0
"""Weight of that, in runs."""
KIND_RUNS = 20.0
"""Weight of what is wider against what a kind or a class has seen, in runs."""
HAZARD_MAX = 0.97
HALVE_EVERY = 16_384
"""Requests after which what was learnt counts half."""


def use_class(uses: int) -> int:
    """Which of the classes of `USES` a number belongs to."""
    return bisect_right(USES, uses)


def class_of(kind: int, gap_log2: float | None, new_blocks: int) -> int:
    """The class of a run; `gap_log2` is None if it never came back."""
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
        """A run of this class came back at this age."""
        if class_ != UNKNOWN:
            age_class = bisect_right(_AGES, age) - 1
            self._events[age_class, class_] += 1

    def note_aged(self, age_class: int, classes: Ints) -> None:
        """Runs of these classes have reached a class of age without coming back."""
        self._at_risk[age_class] += np.bincount(classes, minlength=CLASSES + 1)[:CLASSES]

    def halve(self) -> None:
        """Let what was learnt so far count half."""
        self._events *= 0.5
        self._at_risk *= 0.5

    def value(self, classes: Ints, ages: Ints) -> Floats:
        """Expected uses per request of waiting, for runs of these classes and ages."""
        ages = np.minimum(np.maximum(ages, 1), _OLDEST)
        at = np.searchsorted(AGES, ages, side="right") - 1
        share = (ages - AGES[at]) / (AGES[at + 1] - AGES[at])
        before, after = self._values[classes, at], self._values[classes, at + 1]
        return np.asarray(before * (1 - share) + after * share)

    def learn(self) -> None:
        """Compute the values anew from what was counted. About 2 ms."""
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
        self.learn()

    def _hazards(self) -> Floats:
        """Of each class and, in the last row, of all: shape `(CLASSES + 1, AGE_CLASSES)`."""
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
    """Hazards from counts that lean on those of something wider."""
    runs = at_risk.sum(axis=axes, keepdims=True)
    return np.asarray((events + KIND_RUNS * wider) / (runs + KIND_RUNS))


def _smooth(counts: npt.NDArray[np.float32]) -> Floats:
    """Counts by class and age, each age with half of its neighbours'."""
    found = counts.T.astype(np.float64)
    smooth = found.copy()
    smooth[:, 1:] += found[:, :-1] / 2
    smooth[:, :-1] += found[:, 1:] / 2
    return smooth
