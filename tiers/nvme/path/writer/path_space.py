"""Room for new blocks: new segments, evictions, or segments taken from other namespaces.

A namespace that needs room gets the first of these that is possible:

1. a new segment, if the capacity allows it;
2. the coldest segment of another namespace, if that is colder than its own coldest blocks;
3. the slots of its own coldest blocks, which are evicted.

A segment that is taken loses its blocks first. Then its file is deleted, and a segment of the
namespace that needs it is made in its place.

`SegmentJobs` makes and deletes the files. Used by the writer's thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from .....logs import get_logger
from ..block_table import MAX_COMMIT_BLOCKS
from ..path_messages import Why
from .idle_namespaces import IdleNamespaces
from .namespace.namespace_openings import NamespaceOpenings
from .namespace.namespace_writer import NamespaceWriter
from .path_capacity import PATH_REST_S, RETRY_AFTER_S, PathCapacity
from .segment_jobs import SegmentJobs

PATIENCE_S = 5.0
"""Age of an attempt to make a segment after which blocks are evicted instead."""
SEGMENTS_AT_A_TIME = 8
"""Most segments that are made together. Each batch waits for the journal of the file system, which
takes milliseconds beside other writes."""
RANK_EVERY_S = 1.0
"""Shortest time between two comparisons of a namespace with all others."""
MAX_EVICTED_AHEAD = 256
"""Most blocks that are evicted beyond the need, so that the next grants need no commit."""
EVICTED_AHEAD_SHARE = 64
"""Part of its blocks, as a divisor, that a namespace evicts ahead at most."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TakenSegment:
    """A segment that leaves its namespace."""

    name: str
    number: int


class PathSpace:
    """Segments of all open namespaces of a path."""

    def __init__(
        self,
        capacity: PathCapacity,
        idle: IdleNamespaces,
        openings: NamespaceOpenings,
        open_idle: Callable[[str], None],
        executor: Executor,
        clock: Callable[[], float],
    ) -> None:
        """`open_idle` begins to open a namespace of `idle`. `clock` returns monotonic seconds."""
        self.capacity = capacity
        self.namespaces: dict[str, NamespaceWriter] = {}
        """Open namespaces by the names of their directories."""
        self.idle = idle
        self.taking: TakenSegment | None = None
        """Segment that loses its blocks now."""
        self._take_from_s = -np.inf
        """Time from which it loses more blocks; later than now after the index refused that."""
        self._evict_from_s: dict[str, float] = {}
        """Time from which a namespace evicts again, after its index refused that."""
        self.deleted: list[TakenSegment] = []
        """Segments whose files were deleted, for the nodes that may have them open."""
        self.files = SegmentJobs(capacity, executor, clock, self._after_deletion)
        self._openings = openings
        self._open_idle = open_idle
        self._clock = clock
        self._ranked_at_s: dict[str, float] = {}
        self._taken_for: tuple[str, float] = ("", 0.0)
        """Namespace for which a segment is taken, and the time of the beginning."""
        self._freed: tuple[float, float] = (-np.inf, np.inf)
        """Time since which segments are taken although none can be made, and their bytes."""

    def add(self, namespace: NamespaceWriter) -> bytes:
        """Count a namespace that was opened. Return the record of the last day that it had before.

        Raises `TierIOError`; it is not counted then.
        """
        home = namespace.home
        self.files.add(namespace)
        self.namespaces[home.name] = namespace
        self._ranked_at_s.clear()  # its segments are compared from now on
        return self.idle.take(home.name)

    def forget(self, name: str) -> None:
        """Stop counting a namespace that was closed or removed."""
        self.namespaces.pop(name, None)
        self.files.forget(name)
        self._evict_from_s.pop(name, None)
        if self.taking is not None and self.taking.name == name:
            self.taking = None

    @property
    def has_jobs(self) -> bool:
        """True while a segment is being made, emptied or deleted, or a namespace opened."""
        return self.files.is_busy or self._is_emptying or bool(self._openings.waiting)

    def own_bytes(self, path: int, *, with_new: bool = True) -> int:
        """Return the bytes of our namespaces in a path, all that they may take without asking.

        `with_new`: with those of new namespaces that are being opened.
        """
        total = self.idle.bytes_in(path) + (self._openings.bytes_in(path) if with_new else 0)
        return total + sum(self.files.bytes_in(name, path) for name in self.namespaces)

    @property
    def own_names(self) -> frozenset[str]:
        """Names of our namespaces, open or not."""
        return self.idle.names.union(self.namespaces, self._openings.waiting)

    def freeable_bytes(self, path: int) -> int:
        """Return the bytes in a path that would be free without any segment.

        A namespace without engines leaves with its last one. Nothing is free while deletions fail.
        """
        if not self.files.may_delete(path):
            return 0
        total, files = self.idle.usable_bytes_in(path), self.files
        for name, namespace in self.namespaces.items():
            is_used = namespace.clients
            total += files.segment_bytes(name, path) if is_used else files.bytes_in(name, path)
        return total

    # -- what is done for a need ----------------------------------------------------------------

    def room_for(self, namespace: NamespaceWriter, need: int) -> tuple[int, Why]:
        """Find room for `need` slots, and start what takes time.

        Return the number of the namespace's own blocks to evict now, and the reason if slots are
        missing all the same.
        """
        awake = self.capacity.awake
        if not awake:  # freed slots would not be granted, and each new attempt would evict more
            return 0, Why.RESTING
        space, name = namespace.space, namespace.home.name
        free = space.free(awake)
        if free - need < space.slots_per_segment // 2 or not space.segments:
            if not self._grow(namespace, need - free):
                self._take_colder(namespace)
        if free >= need:
            return 0, Why.FULL
        since_s = self.files.making_since_s(name)
        if self._taken_for[0] == name:
            since_s = self._taken_for[1]
        if since_s is not None and self._clock() - since_s < PATIENCE_S:
            return 0, Why.LATER
        if self._clock() < self._evict_from_s.get(name, -np.inf):
            return 0, Why.RESTING
        evictable = space.evictable
        ahead = min(MAX_EVICTED_AHEAD, evictable // EVICTED_AHEAD_SHARE)
        evictions = min(need - free + ahead, evictable, MAX_COMMIT_BLOCKS)
        return evictions, Why.LATER if evictions else Why.FULL

    def rest_evictions(self, namespace: NamespaceWriter) -> None:
        """Let a namespace evict nothing for a while, because its index refused that."""
        self._evict_from_s[namespace.home.name] = self._clock() + PATH_REST_S

    def shrink(self) -> None:
        """Take a segment if a path holds more than its share, or if a new namespace lacks room."""
        if self.is_taking:
            return
        lacking = self._openings.lacking
        for path in range(self.capacity.paths):
            left_bytes = self.capacity.left_bytes(path, self.own_bytes(path, with_new=False))
            if (left_bytes < 0 or lacking == path) and self.take_coldest(None, {path}):
                return
        if lacking is not None:
            self._take_last(lacking)

    def take_coldest(
        self, spared: str | None, paths: set[int], least_age_s: float = -np.inf
    ) -> bool:
        """Begin to take the coldest segment in some paths that is older than `least_age_s`.

        `spared` is a namespace that loses none. Without it, a segment of a `min_share`, or one that
        is left out, is taken if there is no other. Return False if there is no such segment, while
        a namespace is being opened for its room, or after a deletion in these paths failed.
        """
        paths = {path for path in paths if self.files.may_delete(path)}
        if self._openings.is_room_coming or not paths:
            return False
        best = self._coldest(spared, paths, is_forced=False)
        oldest = self.idle.oldest(spared)
        if oldest is not None and oldest[1] > max(least_age_s, best[0] if best else -np.inf):
            self._open_idle(oldest[0])
            return True
        if best is None and spared is None:
            best = self._coldest(None, paths, is_forced=True)
        if best is None or best[0] <= least_age_s:
            return False
        return self.take(best[1], best[2])

    def give_up_idle(self, name: str, *, is_final: bool) -> None:
        """Note that a namespace could not be opened for its room: nobody waits for that now."""
        self.idle.put_off(name, is_final=is_final)
        self._taken_for = "", 0.0

    @property
    def is_taking(self) -> bool:
        """True while a segment loses its blocks or its file is being deleted."""
        return self.taking is not None or self.files.is_deleting

    def take(self, name: str, number: int) -> bool:
        """Begin to take a segment of an open namespace. Return False if a node may write to it.

        No segment is being taken.
        """
        if not self.namespaces[name].space.set_aside(number):
            return False
        self.taking = TakenSegment(name, number)
        return True

    def gone(self) -> list[NamespaceWriter]:
        """Return the open namespaces that another program removed, except while segments of them
        are being made, opened or deleted: those names must not lead into new directories."""
        return [
            namespace
            for name, namespace in self.namespaces.items()
            if not (namespace.home.is_in_place or self.files.has_work(name))
        ]

    def take_if_lost(self, namespace: NamespaceWriter, number: int) -> bool:
        """Take a segment if its file is gone or cut, so that a new one is made.

        Return True if it is, also with its whole namespace. It is taken at a later call if another
        one is being taken, or if a node may write to it still.
        """
        try:
            is_lost = not namespace.home.segments.is_whole(number)
        except OSError:  # the device failed, as the write that was refused, or all is gone
            return not namespace.home.is_in_place
        if is_lost and number in namespace.space.segments and not self.is_taking:
            _log.warning(
                "%s is gone or cut: its blocks are lost", namespace.home.segments.path_of(number)
            )
            self.take(namespace.home.name, number)
        return is_lost

    def empty_taken(self) -> tuple[TakenSegment, list[bytes]] | None:
        """Remove some blocks of the segment that is taken; with the last ones, begin to delete it.

        Return it with the keys of these blocks. None: there is no such segment, or the blocks
        cannot be removed now.
        """
        taken = self.taking
        if taken is None or not self._is_emptying:
            return None
        namespace = self.namespaces[taken.name]
        slots = namespace.space.used_in(taken.number)[:MAX_COMMIT_BLOCKS].tolist()
        removed: list[bytes] | None = []
        if slots:
            removed = namespace.remove_slots(slots)
            if removed is None:
                self._take_from_s = self._clock() + PATH_REST_S
                return None
        is_empty = not len(namespace.space.used_in(taken.number))
        if not is_empty and not removed:  # slots that the index does not know
            namespace.space.unuse(slots)
            is_empty = not len(namespace.space.used_in(taken.number))
        if is_empty:
            self.taking = None
            self.files.delete(namespace, taken.number)
        return taken, removed or []

    # -- inside --------------------------------------------------------------------------------

    @property
    def _is_emptying(self) -> bool:
        """True if a segment loses its blocks, and the index need not rest."""
        return self.taking is not None and self._clock() >= self._take_from_s

    def _coldest(
        self, spared: str | None, paths: set[int], *, is_forced: bool
    ) -> tuple[float, str, int] | None:
        """Return age, namespace and number of the coldest segment that may be taken."""
        best: tuple[float, str, int] | None = None
        for name, namespace in self.namespaces.items():
            found = None if name == spared else self._coldest_of(namespace, paths, is_forced)
            if found is not None and (best is None or found[0] > best[0]):
                best = found[0], name, found[1]
        return best

    def _coldest_of(
        self, namespace: NamespaceWriter, paths: set[int], is_forced: bool
    ) -> tuple[float, int] | None:
        """Return age and number of the coldest segment that may be taken from a namespace."""
        space = namespace.space
        left = (len(space.segments) - 1) * self.files.file_bytes(namespace.home.name)
        if not is_forced and left < namespace.min_share_bytes:
            return None
        free = space.segments - space.written
        if is_forced:
            free |= space.left_out
        numbers = [n for n in free if n % self.capacity.paths in paths]
        if not numbers:
            return None
        ages = namespace.recency.segment_ages_s(space.slots_per_segment)
        number = max(numbers, key=lambda n: (float(ages[n]), n))
        return float(ages[number]), number

    def _take_last(self, path: int) -> None:
        """Take a segment of a namespace without engines that has only its tables in a path."""
        files, paths = self.files, self.capacity.paths
        for name, namespace in self.namespaces.items():
            if not namespace.clients and not files.segment_bytes(name, path):
                numbers = namespace.space.segments | namespace.space.left_out
                ready = (n for n in numbers if files.may_delete(n % paths))
                if any(self.take(name, number) for number in ready):
                    return

    def _take_colder(self, namespace: NamespaceWriter) -> None:
        """Take a segment that is colder than this namespace's coldest blocks, if there is one."""
        name, now_s = namespace.home.name, self._clock()
        if self.is_taking:
            return
        if now_s < self._ranked_at_s.get(name, -RANK_EVERY_S) + RANK_EVERY_S:
            return
        missing = self.files.missing
        paths = {path for path in self.capacity.awake if missing(name, path) is not None}
        ready = {path for path in paths if self.capacity.may_try(path, 0)}
        if not paths or not (ready or self._may_free(self.files.file_bytes(name), now_s)):
            return
        paths = ready or paths
        self._ranked_at_s[name] = now_s
        age_s = namespace.recency.coldest_age_s(namespace.space.may_evict)
        if age_s is not None and age_s < 0.0:
            return  # the clock was set back: nobody knows who is colder
        if self.take_coldest(name, paths, -np.inf if age_s is None else age_s):
            self._taken_for = name, now_s

    def _may_free(self, size: int, now_s: float) -> bool:
        """Return True if a segment may be taken though no segment of `size` can be made for now.

        The disk may lack more than that. So the room for one segment is freed, and no more until
        one was made, or `RETRY_AFTER_S` has passed.
        """
        since_s, freed = self._freed
        was_enough = self.capacity.was_made
        if freed >= size and (was_enough or now_s >= since_s + RETRY_AFTER_S):
            self._freed, self.capacity.was_made = (now_s, 0.0), False
        return self._freed[1] < size

    def _grow(self, namespace: NamespaceWriter, lacking: int) -> bool:
        """Make segments for `lacking` slots, one at least, as far as the capacity of the paths
        allows. Return True while some are made."""
        name, capacity, files = namespace.home.name, self.capacity, self.files
        if files.making_since_s(name) is not None:
            return True
        size, lacking_path = files.file_bytes(name), self._openings.lacking
        # A new namespace waits for the room that others make in that path.
        taken = {p: self.own_bytes(p) for p in capacity.awake if p != lacking_path}
        planned: dict[int, list[int]] = {}
        wanted = 1 + max(0, lacking - 1) // namespace.space.slots_per_segment
        for _ in range(min(wanted, SEGMENTS_AT_A_TIME)):
            choices: list[tuple[int, int]] = []
            for path, own_bytes in taken.items():
                may_try = capacity.may_try(path, own_bytes + size)
                number = files.missing(name, path) if may_try else None
                if number is not None:
                    choices.append((number // capacity.paths, number))
            if not choices:
                break
            number = min(choices)[1]
            files.plan(name, number)
            taken[number % capacity.paths] += size
            planned.setdefault(number % capacity.paths, []).append(number)
        if planned:
            capacity.own = self.own_names  # an opening may have failed since
        for path, numbers in planned.items():
            files.make(namespace, numbers, taken[path])
        return bool(planned)

    def _after_deletion(self, name: str, number: int, is_gone: bool) -> None:
        """Note a segment that is gone, and make one of the namespace for which it was taken."""
        if is_gone:
            self.deleted.append(TakenSegment(name, number))
        needs = self.namespaces.get(self._taken_for[0])
        self._taken_for = "", 0.0
        if not is_gone:
            return
        self._openings.note_room()
        since_s, freed = self._freed
        self._freed = since_s, freed + self.files.file_bytes(name)
        if needs is not None:
            self._ranked_at_s.pop(needs.home.name, None)
            if self._freed[1] >= self.files.file_bytes(needs.home.name):
                self.capacity.end_pause(number % self.capacity.paths)
            self._grow(needs, 0)
