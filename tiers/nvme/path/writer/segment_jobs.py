"""Segment files of the open namespaces of a path: which exist, and which are made or deleted.

Files are made and deleted on I/O threads. A namespace has one batch of new files at a time in each
path. Everything else runs on the writer's thread.

Segments that could not be opened together with their namespace are left out, and tried again. Their
blocks stay in the index, and nodes may read them. None of their slots is granted, and none of their
blocks is evicted, because that would free no slot.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from .....errors import KVCascadeError, NoSpaceError
from .....logs import get_logger
from ...segments.segment_files import SegmentFiles
from .namespace.namespace_home import NamespaceHome
from .namespace.namespace_writer import NamespaceWriter
from .path_capacity import RETRY_AFTER_S, PathCapacity

_log = get_logger(__name__)


@dataclass(slots=True)
class _Files:
    """Segment files of one namespace, with those that are being made or deleted."""

    namespace: NamespaceWriter
    numbers: list[set[int]]
    """Numbers of the segments by path. Each step of the writer counts them for every path."""
    file_bytes: int
    mend_at_s: float
    """Time of the next attempt to open the segments that are left out."""
    making: set[int] = field(default_factory=set)
    """Segments that are being made."""
    making_since_s: float = 0.0
    """Time at which the last of them began to be made."""
    retry_at_s: dict[int, float] = field(default_factory=dict)
    """Paths in which the last attempt failed for another reason than room, to the time of the next
    one; each is logged once."""
    mending: Future[list[int]] | None = None
    """Attempt to open the segments that are left out, whose result is not taken in."""


class SegmentJobs:
    """Segment files of all open namespaces, by the name of the namespace's directory."""

    def __init__(
        self,
        capacity: PathCapacity,
        executor: Executor,
        clock: Callable[[], float],
        on_deleted: Callable[[str, int, bool], None],
    ) -> None:
        """`on_deleted` is called with namespace and number of a segment, and True if it was
        deleted, False if it could not be. `clock` returns monotonic seconds."""
        self._capacity = capacity
        self._executor = executor
        self._clock = clock
        self._on_deleted = on_deleted
        self._files: dict[str, _Files] = {}
        self._done: deque[Callable[[], None]] = deque()
        """Functions that the writer's thread calls after jobs on an I/O thread."""
        self._deleting: _Files | None = None
        """Namespace of which a segment is being deleted; one is at a time."""
        self._keeping: dict[int, float] = {}
        """Paths in which the last deletion failed, to the time of the next attempt; each is logged
        once."""
        self._failing: set[int] = set()
        """Paths in which the last segment found no room; each is logged once."""

    def add(self, namespace: NamespaceWriter) -> None:
        """Count the files of a namespace that was opened. Raises `TierIOError`."""
        home = namespace.home
        numbers: list[set[int]] = [set() for _ in range(self._capacity.paths)]
        for number in home.segments.found():
            numbers[number % self._capacity.paths].add(number)
        mend_at_s = self._clock() + RETRY_AFTER_S
        self._files[home.name] = _Files(namespace, numbers, home.layout.file_bytes, mend_at_s)

    def forget(self, name: str) -> None:
        """Stop counting the files of a namespace."""
        self._files.pop(name, None)

    def numbers(self, name: str) -> set[int]:
        """Return the segments of a namespace, with those that are being made or deleted."""
        files = self._files.get(name)
        return set() if files is None else set().union(*files.numbers)

    def file_bytes(self, name: str) -> int:
        """Return the size of a segment of a namespace."""
        return self._files[name].file_bytes

    def making_since_s(self, name: str) -> float | None:
        """Return the time at which segments of a namespace began to be made; None if none are."""
        files = self._files[name]
        return files.making_since_s if files.making else None

    def has_work(self, name: str) -> bool:
        """Return True while a file of a namespace is being made, opened or deleted."""
        files = self._files[name]
        return bool(files.making or files.mending) or self._deleting is files

    @property
    def is_deleting(self) -> bool:
        """True while a file is being deleted."""
        return self._deleting is not None

    def may_delete(self, path: int) -> bool:
        """Return True if no deletion in a path failed lately."""
        return self._clock() >= self._keeping.get(path, 0.0)

    @property
    def is_busy(self) -> bool:
        """True while a file is being made or deleted."""
        return self.is_deleting or any(files.making for files in self._files.values())

    def bytes_in(self, name: str, path: int) -> int:
        """Return the bytes of a namespace in a path, all that it may take without asking."""
        home = self._files[name].namespace.home
        return self.segment_bytes(name, path) + home.bytes_beside_segments(path)

    def segment_bytes(self, name: str, path: int) -> int:
        """Return the bytes of the segments of a namespace in a path."""
        files = self._files[name]
        return len(files.numbers[path]) * files.file_bytes

    def missing(self, name: str, path: int) -> int | None:
        """Return the lowest number in a path of which the namespace has no segment.

        None, too, for a while after one could not be made there for another reason than room.
        """
        files, paths = self._files[name], self._capacity.paths
        if self._clock() < files.retry_at_s.get(path, 0.0):
            return None
        total = files.namespace.home.slots // files.namespace.space.slots_per_segment
        return next((n for n in range(path, total, paths) if n not in files.numbers[path]), None)

    def poll(self) -> None:
        """Take in what the I/O threads have done."""
        while self._done:
            self._done.popleft()()

    def plan(self, name: str, number: int) -> None:
        """Count a segment that `make` is about to make."""
        files = self._files[name]
        files.numbers[number % self._capacity.paths].add(number)
        files.making.add(number)
        files.making_since_s = self._clock()

    def make(self, namespace: NamespaceWriter, numbers: list[int], own_bytes: int) -> None:
        """Begin to make planned segments of one path; the first alone if there is not room for all.

        For `own_bytes` see `PathCapacity.claim`.
        """
        files, path = self._files[namespace.home.name], numbers[0] % self._capacity.paths
        size = files.file_bytes

        def create(n: int) -> None:
            some, left = numbers[:n], numbers[n:]
            ours = own_bytes - len(left) * size
            with self._capacity.claim(path, n * size, ours):
                namespace.home.segments.create(some)
            self._done.append(lambda: self._made(files, some))
            self._done.append(lambda: self._give_up(files, left))

        def make() -> None:
            for n in sorted({1, len(numbers)}, reverse=True):
                try:
                    return create(n)
                except Exception as error:  # too little memory, too: none must stay planned
                    if n == 1:
                        self._done.append(partial(self._failed, files, numbers, error))

        self._submit(make)

    def delete(self, namespace: NamespaceWriter, number: int) -> None:
        """Begin to delete a segment without blocks."""
        self._deleting = files = self._files[namespace.home.name]

        def delete() -> None:
            try:
                namespace.home.segments.remove(number)
                self._done.append(lambda: self._deleted(files, number, None))
            except Exception as error:
                self._done.append(partial(self._deleted, files, number, error))

        self._submit(delete)

    def mend(self) -> None:
        """Use the segments that could be opened again, and try those that are still left out.

        No segment is being taken, because it could be one of them.
        """
        for name, files in self._files.items():
            space, attempt, now_s = files.namespace.space, files.mending, self._clock()
            if attempt is not None and attempt.done():
                files.mending, files.mend_at_s = None, now_s + RETRY_AFTER_S
                opened = attempt.result() if attempt.exception() is None else []
                usable = sorted(space.left_out.intersection(opened))  # others were deleted
                for number in usable:
                    space.add_segment(number)
                if usable:
                    _log.info(
                        "%s: %d segments that were left out are in use again", name, len(usable)
                    )
            elif attempt is None and space.left_out and now_s >= files.mend_at_s:
                home, numbers = files.namespace.home, sorted(space.left_out)
                with suppress(RuntimeError):  # the executor is shutting down
                    files.mending = self._executor.submit(_usable, home, numbers)

    # -- inside --------------------------------------------------------------------------------

    def _is_open(self, files: _Files) -> bool:
        return self._files.get(files.namespace.home.name) is files

    def _made(self, files: _Files, numbers: list[int]) -> None:
        path = numbers[0] % self._capacity.paths
        self._failing.discard(path)
        files.retry_at_s.pop(path, None)
        self._capacity.was_made = True
        if self._is_open(files):
            files.making.difference_update(numbers)
            for number in numbers:
                files.namespace.space.add_segment(number)

    def _failed(self, files: _Files, numbers: list[int], error: Exception) -> None:
        path = numbers[0] % self._capacity.paths
        lacks_room = _is_lack_of_room(error)
        if path not in (self._failing if lacks_room else files.retry_at_s):
            _log.warning("no segment can be made for now: %s", str(error) or repr(error))
        if lacks_room:
            self._failing.add(path)
            self._capacity.put_off(path)
        else:  # other namespaces may make theirs, and their room would not help
            files.retry_at_s[path] = self._clock() + RETRY_AFTER_S
        self._give_up(files, numbers)

    def _give_up(self, files: _Files, numbers: list[int]) -> None:
        files.making.difference_update(numbers)
        for number in numbers:
            files.numbers[number % self._capacity.paths].discard(number)

    def _deleted(self, files: _Files, number: int, error: Exception | None) -> None:
        """Take in a deletion that has ended; with `error` it failed."""
        self._deleting, path = None, number % self._capacity.paths
        if error is None:
            self._keeping.pop(path, None)
        else:
            if path not in self._keeping:
                _log.warning("a segment could not be deleted: %s", str(error) or repr(error))
            self._keeping[path] = self._clock() + RETRY_AFTER_S
        if not self._is_open(files):
            return
        space = files.namespace.space
        if error is None:
            files.numbers[path].discard(number)
            space.left_out.discard(number)
        elif number not in space.left_out:
            space.add_segment(number)
        self._on_deleted(files.namespace.home.name, number, error is None)

    def _submit(self, job: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the executor is shutting down: as a kill would
            self._executor.submit(job)


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


def _is_lack_of_room(error: Exception) -> bool:
    """Return True if room on the disk would help. It does not against limits of files or memory."""
    number = getattr(error.__cause__, "errno", errno.ENOSPC)
    return isinstance(error, NoSpaceError) and number in (errno.ENOSPC, errno.EDQUOT)
