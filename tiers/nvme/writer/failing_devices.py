"""Handle failing devices: paths rest, slots are repaired or set aside.

`RestingPaths`: a path in which a write failed rests for a while, and the other paths take all
writes. If one device dies, the tier must keep accepting writes. Blocks there are evicted in their
order like all others. If the path stays dead, the tier shrinks to what the other paths hold.
Evicting elsewhere first would scan past all blocks of the dead path at every search. Used by the
manager's thread.

`RecordRepairs`: records of slots in use that are unusable are rewritten from the index. A victim is
identified by its slot record. An I/O thread (or the mover) rewrites the records from the index, one
lot at a time, as each lot reads the whole index. A record that is still unusable afterwards lies
where the device neither reads nor writes. Every eviction would consider its slot again, so the slot
is set aside. It is retried now and then, as a device may recover.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set

import numpy as np
import numpy.typing as npt

from ..index_directory import MAX_UNKNOWN_SLOTS, IndexDirectory

PATH_REST_S = 5.0
"""Rest after a failed write, where there are other paths; then the path is tried again."""
RETRY_AFTER_S = 60.0
"""Pause after no record of a lot that was set aside could be repaired."""

OnEnd = Callable[[int | None], object]
"""Receives the number of repaired records; None if nothing was tried."""
Begin = Callable[[Set[int], OnEnd], object]
"""Queues a repair of these slots without waiting. `OnEnd` is called once, from any thread."""


class RestingPaths:
    """Paths that take writes. Segment `n` lies in path `n % paths`."""

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


class RecordRepairs:
    """Decides which slot records are repaired, retried or set aside. Manager's thread only."""

    def __init__(self, directory: IndexDirectory, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._directory = directory
        self._clock = clock
        self._is_running = False
        self._tried: set[int] = set()
        """The last lot that was repaired."""
        self._unrepairable: set[int] = set()
        """Slots whose records are unusable even after a repair."""
        self._aside: deque[int] = deque()
        self._retried: list[int] = []
        """Slots that were set aside and retried, until `take_retried`."""
        self._retry_at_s = 0.0

    def begin(self, repair: Begin) -> None:
        """Repair the slots that the directory could not identify, unless a lot is in progress."""
        if self._is_running:
            return
        unknown = self._directory.take_unknown()
        self._unrepairable |= unknown & self._tried
        lot = unknown - self._tried
        if lot:
            self._is_running = True
            repair(lot, lambda repaired: self._end(lot, repaired))
        elif self._aside and self._clock() >= self._retry_at_s:
            self._is_running = True
            some = [self._aside.popleft() for _ in range(min(len(self._aside), MAX_UNKNOWN_SLOTS))]
            repair(set(some), lambda repaired: self._end_retry(some, repaired))

    def take_unrepairable(self) -> set[int]:
        """Return slots with unusable records after their repair; some may have been repaired
        since."""
        taken, self._unrepairable = self._unrepairable, set()
        return taken

    def take_retried(self) -> list[int]:
        """Return slots that were set aside and retried, each once; some of them were repaired."""
        taken, self._retried = self._retried, []
        return taken

    def retry_later(self, slot: int) -> None:
        """Queue a retry of a slot that was set aside, or still is."""
        self._retry_at_s = max(self._retry_at_s, self._clock() + RETRY_AFTER_S)
        self._aside.append(slot)

    def _end(self, lot: set[int], repaired: int | None) -> None:
        if repaired is not None:
            self._tried = lot
            self._directory.look_again()
        self._is_running = False

    def _end_retry(self, lot: list[int], repaired: int | None) -> None:
        if repaired:
            self._directory.look_again()
            self._retried += lot
        else:
            self._retry_at_s = self._clock() + RETRY_AFTER_S
            self._aside.extend(lot)
        self._is_running = False
