"""Room for new blocks: new segments, evictions, or segments taken from other namespaces.

A namespace that needs room gets, in this order: a new segment if the capacity allows it; otherwise
the coldest segment of another namespace if that is colder than its own coldest blocks; otherwise
its own coldest blocks are evicted. A segment that is taken loses its blocks first, its file is
deleted, and a segment of the namespace that needs it is made in its place.

Files are made and deleted on I/O threads, one at a time for each namespace. Everything else runs on
the writer's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .....errors import KVCascadeError
from .....logs import get_logger
from .namespace_writer import MAX_EVICTIONS_PER_STEP, NamespaceWriter
from .path_capacity import PathCapacity, fixed_bytes

PATIENCE_S = 5.0
"""Age of an attempt to make a segment after which blocks are evicted instead."""
RANK_EVERY_S = 1.0
"""Shortest time between two comparisons of a namespace with all others."""
MAX_EVICTED_AHEAD = 256
"""Most blocks that are evicted beyond the need, so that the next grants need no commit."""
EVICTED_AHEAD_SHARE = 64
"""Part of its blocks, as a divisor, that a namespace evicts ahead at most."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """How the need of a namespace is met."""

    evictions: int = 0
    """Number of its own blocks to evict now."""
    is_coming: bool = False
    """True if a segment is on the way."""


@dataclass(frozen=True, slots=True)
class TakenSegment:
    """A segment that leaves its namespace."""

    name: str
    number: int


@dataclass(slots=True)
class _Files:
    """Segment files of one namespace, with those that are being made or deleted."""

    numbers: set[int]
    file_bytes: int
    making_since_s: float | None = None
    """Time at which a segment began to be made; None if none is."""


class PathSpace:
    """Segments of all open namespaces of a path."""

    def __init__(
        self, capacity: PathCapacity, executor: Executor, clock: Callable[[], float]
    ) -> None:
        """`clock` returns monotonic seconds."""
        self.capacity = capacity
        self.namespaces: dict[str, NamespaceWriter] = {}
        """Open namespaces by the name of their directories."""
        self.idle_bytes: dict[str, list[int]] = {}
        """Bytes in each path of our namespaces that are not open."""
        self.idle_folders: frozenset[Path] = frozenset()
        """Directories of our namespaces that are not open."""
        self.idle_ages_s: Callable[[], dict[str, float]] = dict
        """Returns the time since the last use of each namespace that is not open."""
        self.open_idle: Callable[[str], bool] = lambda name: False
        """Opens a namespace that is not open, to take its segments. Returns False if it cannot."""
        self.taking: TakenSegment | None = None
        """Segment that loses its blocks now."""
        self._files: dict[str, _Files] = {}
        self._executor = executor
        self._clock = clock
        self._done: deque[Callable[[], None]] = deque()
        """What the writer's thread does after a job on an I/O thread."""
        self._ranked_at_s: dict[str, float] = {}
        self._deleting = 0

    def add(self, namespace: NamespaceWriter) -> None:
        """Count a namespace that was opened."""
        home = namespace.home
        self.namespaces[home.name] = namespace
        self.idle_bytes.pop(home.name, None)
        numbers = set(home.segments.found())
        self._files[home.name] = _Files(numbers, home.layout.file_bytes)

    def forget(self, name: str) -> None:
        """Stop counting a namespace that was closed or removed."""
        self.namespaces.pop(name, None)
        self._files.pop(name, None)
        if self.taking is not None and self.taking.name == name:
            self.taking = None

    def is_busy(self, name: str) -> bool:
        """Return True while a segment of this namespace is being made, emptied or deleted."""
        files = self._files[name]
        is_taken = self.taking is not None and self.taking.name == name
        return is_taken or self._deleting > 0 or files.making_since_s is not None

    @property
    def has_jobs(self) -> bool:
        """True while a segment is being made, emptied or deleted."""
        makes = any(files.making_since_s is not None for files in self._files.values())
        return makes or self._deleting > 0 or self.taking is not None

    def poll(self) -> None:
        """Take in what the I/O threads have done."""
        while self._done:
            self._done.popleft()()

    def own_bytes(self, path: int) -> int:
        """Return the bytes of our namespaces in a path, all that they may take without asking."""
        total = sum(sizes[path] for sizes in self.idle_bytes.values())
        for name, namespace in self.namespaces.items():
            files = self._files[name]
            here = sum(number % self.capacity.paths == path for number in files.numbers)
            total += here * files.file_bytes
            total += fixed_bytes(namespace.home.metadata_bytes, path)
        return total

    # -- what is done for a need ----------------------------------------------------------------

    def room_for(self, namespace: NamespaceWriter, need: int) -> Room:
        """Find room for `need` slots, and start what takes time."""
        space, capacity = namespace.space, self.capacity
        free = space.free(capacity.awake)
        files = self._files[namespace.home.name]
        if free - need < space.slots_per_segment // 2 or not space.segments:
            self._grow(namespace)
        if free >= need:
            return Room()
        since_s = files.making_since_s
        is_coming = since_s is not None and self._clock() - since_s < PATIENCE_S
        if not is_coming:
            is_coming = self._take_colder(namespace) and not space.used
        if is_coming:
            return Room(is_coming=True)
        ahead = min(MAX_EVICTED_AHEAD, space.used // EVICTED_AHEAD_SHARE)
        evictions = min(need - free + ahead, space.used, MAX_EVICTIONS_PER_STEP)
        return Room(evictions, is_coming=evictions > 0 and evictions < need - free < space.used)

    def shrink(self) -> None:
        """Take a segment if a path holds more than its share."""
        if self.taking is not None or self._deleting:
            return
        for path in range(self.capacity.paths):
            if self.capacity.left_bytes(path, self.own_bytes(path)) < 0:
                self.take_coldest(None, {path})
                return

    def take_coldest(
        self, spared: str | None, paths: set[int], least_age_s: float = -np.inf
    ) -> bool:
        """Begin to take the coldest segment in some paths that is older than `least_age_s`.

        `spared` is a namespace that loses none. Return False if there is no such segment.
        """
        best: tuple[float, str, int] | None = None
        for name, namespace in self.namespaces.items():
            found = None if name == spared else self._coldest_of(namespace, paths, spared is None)
            if found is not None and (best is None or found[0] > best[0]):
                best = found[0], name, found[1]
        ages = {n: age for n, age in self.idle_ages_s().items() if n != spared}
        oldest = max(ages, key=ages.__getitem__, default=None)
        if oldest is not None and ages[oldest] > max(least_age_s, best[0] if best else -np.inf):
            return self.open_idle(oldest)  # its segments are compared from now on
        if best is None or best[0] <= least_age_s:
            return False
        _, name, number = best
        if not self.namespaces[name].space.set_aside(number):
            return False
        self.taking = TakenSegment(name, number)
        return True

    def empty_taken(self) -> tuple[TakenSegment, list[bytes], bool] | None:
        """Remove some blocks of the segment that is taken.

        Return it with the keys of these blocks, and whether it is empty and its file is being
        deleted; None if there is no such segment, or if the blocks cannot be removed now.
        """
        taken = self.taking
        if taken is None:
            return None
        namespace = self.namespaces[taken.name]
        slots = namespace.space.used_in(taken.number)[:MAX_EVICTIONS_PER_STEP].tolist()
        removed: list[bytes] | None = []
        if slots:
            removed = namespace.remove_slots(slots)
            if removed is None:
                return None
        is_empty = not len(namespace.space.used_in(taken.number))
        if not is_empty and not removed:  # slots that the index does not know
            namespace.space.unuse(slots)
            is_empty = not len(namespace.space.used_in(taken.number))
        if is_empty:
            self.taking = None
            self._delete(namespace, taken.number)
        return taken, removed or [], is_empty

    # -- inside --------------------------------------------------------------------------------

    def _coldest_of(
        self, namespace: NamespaceWriter, paths: set[int], is_forced: bool
    ) -> tuple[float, int] | None:
        """Return age and number of the coldest segment that may be taken from a namespace."""
        space = namespace.space
        size = self._files[namespace.home.name].file_bytes
        left = (len(space.segments) - 1) * size
        if not is_forced and left < namespace.min_share_bytes:
            return None
        numbers = [n for n in space.segments if n % self.capacity.paths in paths]
        if not numbers:
            return None
        ages = namespace.recency.segment_ages_s(space.slots_per_segment)
        number = max(numbers, key=lambda n: (float(ages[n]), n))
        return float(ages[number]), number

    def _take_colder(self, namespace: NamespaceWriter) -> bool:
        """Take a segment that is colder than this namespace's coldest blocks, if there is one.

        Return True if a segment is on its way.
        """
        if self.taking is not None or self._deleting:
            return True
        name, now_s = namespace.home.name, self._clock()
        if now_s < self._ranked_at_s.get(name, -RANK_EVERY_S) + RANK_EVERY_S:
            return False
        paths = {path for path in self.capacity.awake if self._missing(namespace, path) is not None}
        if not paths:
            return False
        self._ranked_at_s[name] = now_s
        age_s = namespace.recency.coldest_age_s()
        return self.take_coldest(name, paths, -np.inf if age_s is None else age_s)

    def _missing(self, namespace: NamespaceWriter, path: int) -> int | None:
        """Return the lowest number in a path of which the namespace has no segment."""
        numbers, paths = self._files[namespace.home.name].numbers, self.capacity.paths
        total = namespace.home.slots // namespace.space.slots_per_segment
        return next((n for n in range(path, total, paths) if n not in numbers), None)

    def _grow(self, namespace: NamespaceWriter) -> None:
        """Begin to make a segment, if the capacity of some path allows it."""
        files, capacity = self._files[namespace.home.name], self.capacity
        if files.making_since_s is not None:
            return
        choices: list[tuple[int, int]] = []
        for path in capacity.awake:
            number = self._missing(namespace, path) if capacity.may_try(path) else None
            if number is None:
                continue
            if capacity.left_bytes(path, self.own_bytes(path)) >= files.file_bytes:
                choices.append((number // capacity.paths, number))
        if choices:
            self._make(namespace, min(choices)[1])

    def _make(self, namespace: NamespaceWriter, number: int) -> None:
        home, capacity = namespace.home, self.capacity
        files, path = self._files[home.name], number % capacity.paths
        files.numbers.add(number)
        files.making_since_s = self._clock()
        own_bytes, own = self.own_bytes(path), self._own_folders()

        def make() -> None:
            try:
                with capacity.claim(path, files.file_bytes, own_bytes, own) as foreign:
                    home.segments.create(number)
                home.segments.let_go(number)
                self._done.append(lambda: self._made(namespace, number, foreign))
            except (OSError, KVCascadeError) as error:
                reason = error
                self._done.append(lambda: self._failed(namespace, number, reason))

        self._submit(make, lambda: self._failed(namespace, number, None))

    def _made(self, namespace: NamespaceWriter, number: int, foreign: int) -> None:
        self.capacity.note_foreign(number % self.capacity.paths, foreign)
        if self.namespaces.get(namespace.home.name) is namespace:
            self._files[namespace.home.name].making_since_s = None
            namespace.space.add_segment(number)

    def _failed(self, namespace: NamespaceWriter, number: int, error: Exception | None) -> None:
        if error is not None:
            _log.warning("no segment could be made: %s", error)
        self.capacity.put_off(number % self.capacity.paths, None)
        if self.namespaces.get(namespace.home.name) is namespace:
            files = self._files[namespace.home.name]
            files.making_since_s = None
            files.numbers.discard(number)

    def _delete(self, namespace: NamespaceWriter, number: int) -> None:
        self._deleting += 1

        def delete() -> None:
            try:
                namespace.home.segments.remove(number)
                self._done.append(lambda: self._deleted(namespace, number, True))
            except (OSError, KVCascadeError) as error:
                _log.warning("a segment could not be deleted: %s", error)
                self._done.append(lambda: self._deleted(namespace, number, False))

        self._submit(delete, lambda: self._deleted(namespace, number, False))

    def _deleted(self, namespace: NamespaceWriter, number: int, is_gone: bool) -> None:
        self._deleting -= 1
        files = self._files.get(namespace.home.name)
        if files is None:
            return
        if is_gone:
            files.numbers.discard(number)
            self._ranked_at_s.clear()
        else:
            namespace.space.add_segment(number)

    def _submit(self, job: Callable[[], None], refused: Callable[[], None]) -> None:
        try:
            self._executor.submit(job)
        except RuntimeError:  # the executor is shutting down
            self._done.append(refused)

    def _own_folders(self) -> frozenset[Path]:
        homes = [namespace.home for namespace in self.namespaces.values()]
        return self.idle_folders.union(*(home.folders for home in homes))
