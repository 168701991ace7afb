"""Paths in which a write failed are left alone for a while: the others take what comes.

One device that dies must not cost the tier its writes. Used by the manager's thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..base import SlotMask

PATH_REST_S = 5.0
"""After a failed write, where there are other paths; then it is tried again."""


class RestingPaths:
    """Which paths take writes. Segment `n` lies in path `n % paths`."""

    def __init__(
        self, paths: int, segments: int, slots_per_segment: int, clock: Callable[[], float]
    ) -> None:
        """`clock` gives monotonic seconds."""
        self._part_of = np.arange(segments) % paths
        self._slots_per_segment = slots_per_segment
        self._clock = clock
        self._until_s = [0.0] * paths
        self._look_around()

    @property
    def awake(self) -> list[int]:
        """Numbers of the paths that take writes, one at least."""
        self._wake()
        return self._awake

    @property
    def mask(self) -> SlotMask | None:
        """The slots of those paths; None: of all. Made once per change: 2 ms for 4M slots."""
        self._wake()
        return self._mask

    def rest(self, slots: npt.NDArray[np.intp], is_own: npt.NDArray[np.bool_]) -> bool:
        """Writing to these slots failed. False if this process has no segment elsewhere: then no
        path rests, and the whole tier should. `is_own` has a flag per slot."""
        end_s = self._clock() + PATH_REST_S
        for part in np.unique(self._part_of[slots // self._slots_per_segment]).tolist():
            self._until_s[part] = end_s
        self._look_around()
        held = np.unique(self._part_of[is_own[:: self._slots_per_segment]])
        if np.isin(held, self._awake).any():
            return True
        self._until_s = [0.0] * len(self._until_s)
        self._look_around()
        return False

    def _wake(self) -> None:
        if self._mask is not None and self._clock() >= self._next_end_s:
            self._look_around()

    def _look_around(self) -> None:
        now_s = self._clock()
        self._awake = [part for part, end_s in enumerate(self._until_s) if end_s <= now_s]
        self._next_end_s = min(
            (end_s for end_s in self._until_s if end_s > now_s), default=math.inf
        )
        self._mask: SlotMask | None = None
        if len(self._awake) < len(self._until_s):
            is_awake = np.isin(self._part_of, self._awake)
            self._mask = np.repeat(is_awake, self._slots_per_segment)
