"""Slots in use whose records say nothing: written anew from the index, or else set aside.

Who leaves is found by its record. An I/O thread (or the mover) writes the records anew, one lot at
a time, since each takes a look at the whole index. What still says nothing then lies where the
device neither reads nor writes: it would be asked at every eviction, for ever. It is set aside, and
tried again now and then, for a device may come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set

from ..index_directory import MAX_UNKNOWN_SLOTS, IndexDirectory

RETRY_AFTER_S = 60.0
"""After none of a lot that was set aside could be repaired."""

OnEnd = Callable[[int | None], object]
"""Told how many records were repaired; None if nothing was tried."""
Begin = Callable[[Set[int], OnEnd], object]
"""Queues a repair of these slots without waiting; says once, from any thread, how it ended."""


class RecordRepairs:
    """Used by the manager's thread."""

    def __init__(self, directory: IndexDirectory, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._directory = directory
        self._clock = clock
        self._is_running = False
        self._tried: set[int] = set()
        """The last lot that was repaired."""
        self._hopeless: set[int] = set()
        self._aside: deque[int] = deque()
        self._mended: list[int] = []
        self._retry_at_s = 0.0

    def begin(self, repair: Begin) -> None:
        """Have the slots repaired that the directory could not name, unless a lot is under way."""
        if self._is_running:
            return
        unknown = self._directory.take_unknown()
        self._hopeless |= unknown & self._tried
        lot = unknown - self._tried
        if lot:
            self._is_running = True
            repair(lot, lambda repaired: self._end(lot, repaired))
        elif self._aside and self._clock() >= self._retry_at_s:
            self._is_running = True
            some = [self._aside.popleft() for _ in range(min(len(self._aside), MAX_UNKNOWN_SLOTS))]
            repair(set(some), lambda repaired: self._end_retry(some, repaired))

    def take_hopeless(self) -> set[int]:
        """Slots that said nothing after their repair; it may have come to its end since."""
        taken, self._hopeless = self._hopeless, set()
        return taken

    def take_mended(self) -> list[int]:
        """Slots that were set aside, some of which were repaired; each is given once."""
        taken, self._mended = self._mended, []
        return taken

    def retry_later(self, slot: int) -> None:
        """A slot was set aside, or is so still."""
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
            self._mended += lot
        else:
            self._retry_at_s = self._clock() + RETRY_AFTER_S
            self._aside.extend(lot)
        self._is_running = False
