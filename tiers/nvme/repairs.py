"""Slots in use whose records say nothing: written anew from the index, or else set aside.

Who leaves is found by its record. An I/O thread (or the mover) writes the records anew, one lot at
a time, since each takes a look at the whole index. What still says nothing then lies where the
device neither reads nor writes, and is *hopeless*: it would be asked at every eviction, for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from .directory import IndexDirectory

OnEnd = Callable[[bool], object]
Begin = Callable[[Set[int], OnEnd], object]
"""Queues a repair of these slots, waits for nothing, and says once, from any thread, how it ended:
False if nothing was tried."""


class RecordRepairs:
    """Used by the manager's thread."""

    def __init__(self, directory: IndexDirectory) -> None:
        self._directory = directory
        self._is_running = False
        self._tried: set[int] = set()
        """The last lot that was repaired."""
        self._hopeless: set[int] = set()

    def begin(self, repair: Begin) -> None:
        """Have the slots repaired that the directory could not name, unless a lot is under way."""
        if self._is_running:
            return
        unknown = self._directory.take_unknown()
        self._hopeless |= unknown & self._tried
        lot = unknown - self._tried
        if lot:
            self._is_running = True
            repair(lot, lambda is_done: self._end(lot, is_done))

    def take_hopeless(self) -> set[int]:
        """Slots that said nothing after their repair; it may have come to its end since."""
        taken, self._hopeless = self._hopeless, set()
        return taken

    def _end(self, lot: set[int], is_done: bool) -> None:
        if is_done:
            self._tried = lot
            self._directory.look_again()
        self._is_running = False
