"""Segments that could not be opened together with their namespaces: they are tried again.

The blocks in such a segment stay in the index, and nodes may read them. None of its slots is
granted, and none of its blocks is evicted, because that would free no slot.

Files are opened on an I/O thread. Everything else runs on the writer's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress

from .....errors import KVCascadeError
from .....logs import get_logger
from ...segments.segment_files import SegmentFiles
from .namespace.namespace_home import NamespaceHome
from .namespace.namespace_writer import NamespaceWriter
from .path_capacity import RETRY_AFTER_S

_log = get_logger(__name__)


class LeftOutSegments:
    """Attempts to open the segments that are left out, by the name of the namespace's directory."""

    def __init__(self, executor: Executor, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._executor = executor
        self._clock = clock
        self._retry_at_s: dict[str, float] = {}
        """Times of the next attempts."""
        self._attempts: dict[str, Future[list[int]]] = {}
        """Attempts that were begun, and whose result is not taken in."""

    def has_work(self, name: str) -> bool:
        """Return True while segments of a namespace are being opened."""
        return name in self._attempts

    def forget(self, name: str) -> None:
        """Stop opening the segments of a namespace."""
        self._retry_at_s.pop(name, None)
        attempt = self._attempts.pop(name, None)
        if attempt is not None:
            attempt.cancel()

    def retry(self, namespaces: Iterable[NamespaceWriter]) -> None:
        """Take in the attempts that ended, and begin those that are due.

        No segment is being taken, because it could be one of them.
        """
        for namespace in namespaces:
            self._take_in(namespace)
            if namespace.space.left_out:
                self._begin(namespace)

    # -- inside --------------------------------------------------------------------------------

    def _begin(self, namespace: NamespaceWriter) -> None:
        name, now_s = namespace.home.name, self._clock()
        if name in self._attempts:
            return
        if now_s < self._retry_at_s.setdefault(name, now_s + RETRY_AFTER_S):
            return
        del self._retry_at_s[name]
        numbers = sorted(namespace.space.left_out)
        with suppress(RuntimeError):  # the executor is shutting down
            self._attempts[name] = self._executor.submit(_usable, namespace.home, numbers)

    def _take_in(self, namespace: NamespaceWriter) -> None:
        """Add the segments that an attempt could open, unless they were deleted meanwhile."""
        name, space = namespace.home.name, namespace.space
        attempt = self._attempts.get(name)
        if attempt is None or not attempt.done():
            return
        del self._attempts[name]
        if attempt.exception() is not None:  # such as too little memory
            return
        usable = sorted(space.left_out.intersection(attempt.result()))
        for number in usable:
            space.add_segment(number)
        if usable:
            _log.info("%s: %d segments that were left out are in use again", name, len(usable))


def _usable(home: NamespaceHome, numbers: Sequence[int]) -> list[int]:
    """Return those of the segments that can be used from now on. Runs on an I/O thread."""
    return [n for n in numbers if home.is_in_place and _is_usable(home.segments, n)]


def _is_usable(segments: SegmentFiles, number: int) -> bool:
    """Return True if a segment can be opened, repaired if needed, or if its file is gone.

    A file that is gone is made anew like one that is lost later.
    """
    try:
        segments.mend(number)
    except KVCascadeError as error:
        with suppress(OSError):  # the disk is not mounted
            return isinstance(error.__cause__, FileNotFoundError) and not segments.is_whole(number)
        return False
    return True
