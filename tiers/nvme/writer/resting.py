"""Paths in which a write failed rest for a while: the other paths take all writes.

If one device dies, the tier must keep accepting writes. Blocks there are evicted in their order
like all others. If the path stays dead, the tier shrinks to what the other paths hold. Evicting
elsewhere first would scan past all blocks of the dead path at every search. Used by the manager's
thread.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

PATH_REST_S = 5.0
"""Rest after a failed write, where there are other paths; then the path is tried again."""


class RestingPaths:
    """Which paths take writes. Segment `n` lies in path `n % paths`."""

    def __init__(self, paths: int, slots_per_segment: int, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._slots_per_segment = slots_per_segment
        self._clock = clock
        self._all = list(range(paths))
        self._until_s = [0.0] * paths
        self._is_any = False

    @property
    def awake(self) -> list[int]:
        """Numbers of the paths that take writes; at least one."""
        if not self._is_any:
            return self._all
        now_s = self._clock()
        awake = [part for part in self._all if self._until_s[part] <= now_s]
        self._is_any = len(awake) < len(self._all)
        return awake

    def rest(self, slots: npt.NDArray[np.intp], is_own: npt.NDArray[np.bool_]) -> bool:
        """Let the paths of these slots rest after a failed write. `is_own` has one flag per slot.

        Returns False if this process has no segment in another path. No path rests then, and the
        whole tier should.
        """
        end_s = self._clock() + PATH_REST_S
        for part in self._parts(slots // self._slots_per_segment):
            self._until_s[part] = end_s
        self._is_any = True
        held = self._parts(np.flatnonzero(is_own[:: self._slots_per_segment]))
        if held.isdisjoint(self.awake):
            self._is_any = False
            self._until_s = [0.0] * len(self._all)
        return self._is_any

    def _parts(self, segments: npt.NDArray[np.intp]) -> set[int]:
        return set((segments % len(self._all)).tolist())
