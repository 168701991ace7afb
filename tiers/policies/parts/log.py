"""An exact recency list in two arrays: the building block of most orders here.

Each use appends the slot to a log, and stamps the slot with its position there. An entry is live
only if the slot's stamp still points at it. A batch is appended by one vectorised assignment, in
about ten nanoseconds a block; a linked list takes half a microsecond. A few blocks are appended one
by one through views of the same memory, because numpy takes ten times as long for one number. A
full log is compacted: one pass over it for every `capacity` uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from ...base import SlotMask
from ..order import FEW, ArraySource, Column, heap_arrays, scalars

MIN_LOG_LENGTH = 1024
LOG_LENGTH_PER_SLOT = 3
"""Room per slot; at least 2, so that a compaction pays for at least one use of every slot."""
SCAN_FEW = 16
"""Log entries that a search reads one by one before it reads whole chunks."""
SCAN_CHUNK_MIN = 128
SCAN_CHUNK_MAX = 1 << 16
"""Limits of the log entries that a search reads in one step; each step doubles them."""

WALK = 1024
WALK_FACTOR = 4
"""Slots of a linked list that a search visits before it sorts slots by their place: so many, and so
many for each slot that it is to find, if those are more."""
NO_PLACE = 1 << 62
"""Place of slots that are not present."""

SORT_COST = 8
"""Assumed cost of sorting one slot by its position, in log entries read."""

CLOSE = 4
"""Stamps of live slots span at most this many times their number, unless few are left."""

COMPACT_CHUNK = 1 << 18
"""Log entries that a compaction copies at a time, to limit its memory."""

CHECK_CHUNK = 1 << 16
"""Number of slots that a check reads at a time; their positions fit into a processor's cache."""

MAX_POSITION = 1 << 60
"""No log is used so often that its positions grow as far: a use takes one."""

_HEAD, _TAIL, _COUNT = 0, 1, 2


class Search:
    """Filter and remaining window of a search for victims."""

    __slots__ = ("is_windowed", "left", "mask", "wanted")

    def __init__(
        self,
        wanted: Callable[[int], bool] | None = None,
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> None:
        self.wanted = wanted
        self.mask = mask
        self.is_windowed = window is not None
        self.left = 1 << 62 if window is None else window
        """Number of slots that the search may still examine."""

    def is_sparse(self, entries: int) -> bool:
        """Return True if sorting the slots of the mask costs less than reading `entries` entries.

        With a window, every slot has to be examined.
        """
        if self.mask is None or self.is_windowed:
            return False
        return int(np.count_nonzero(self.mask)) * SORT_COST < entries

    def accepts(self, slot: int) -> bool:
        """Examine one slot and return whether it may be evicted."""
        self.left -= 1
        if self.mask is not None and not self.mask[slot]:
            return False
        return self.wanted is None or self.wanted(slot)

    def masked(self, slots: list[int]) -> list[int]:
        """Return those of the slots that are in the mask."""
        if self.mask is None or not slots:
            return slots
        batch = np.asarray(slots)
        return list(batch[self.mask[batch]].tolist())

    def pick(
        self, slots: Iterable[int], limit: int, places: Callable[[], npt.NDArray[np.int64]]
    ) -> list[int]:
        """Return up to `limit` accepted slots, for orders that go one by one.

        `slots` yields all slots, coldest first. `places` returns a number for each slot that grows
        in that order, or `NO_PLACE`. It is called if a short walk finds too few.
        """
        walk = max(WALK, WALK_FACTOR * limit)
        walked = list(islice(slots, min(self.left, walk)))
        accepted = filter(self.wanted, self.masked(walked))
        found = list(islice(accepted, max(limit, 0)))
        if len(found) >= limit or len(walked) < walk:
            return found
        return list(islice(filter(self.wanted, self._by_place(places())), limit))

    def _by_place(self, place: npt.NDArray[np.int64]) -> Iterator[int]:
        """Yield the slots of the mask and the window in the order of their places."""
        is_open = place < NO_PLACE
        if self.left < len(place):
            is_open &= place < np.partition(place, self.left)[self.left]
        if self.mask is not None:
            is_open &= self.mask
        slots, n = np.flatnonzero(is_open), WALK
        while len(slots):
            parted = slots if len(slots) <= n else slots[np.argpartition(place[slots], n)]
            first, slots = parted[:n], parted[n:]
            yield from first[np.argsort(place[first])].tolist()
            n *= 8


class Marks(Column):
    """A small number per slot, and the range of numbers to which a search is limited."""

    __slots__ = ("high", "low")

    def __init__(self, array: npt.NDArray[np.uint8], low: int = 0, high: int = 255) -> None:
        super().__init__(array)
        self.low = low
        self.high = high

    def within(self, low: int, high: int) -> Marks:
        """Return the same marks, limited to `low <= mark <= high`."""
        return Marks(self.array, low, high)


class RecencyLog:
    """Slots `0 .. capacity - 1` from least to most recently appended.

    Invariant: slot `s` is present iff `stamp[s] > 0`, and then `log[(stamp[s] - 1) % length] == s`.
    Positions grow until the log is compacted; they are int64.

    The arrays may be files that are damaged while they are in use. A method may then raise an
    `IndexError` or hide slots until `rebuild`, but it ends.
    """

    def __init__(self, name: str, capacity: int, arrays: ArraySource = heap_arrays) -> None:
        length = max(MIN_LOG_LENGTH, LOG_LENGTH_PER_SLOT * capacity)
        self._length = length
        self._stamp = arrays(f"{name}_stamp", capacity, np.int64)
        self._log = arrays(f"{name}_log", length, np.int32)
        self._ends = arrays(f"{name}_ends", 3, np.int64)
        self._stamp_of = scalars(self._stamp)
        self._log_at = scalars(self._log)
        self._end = scalars(self._ends)

    def __len__(self) -> int:
        return max(0, self._end[_COUNT])

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int) and self._stamp_of[slot] > 0

    def holds(self, slots: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which of these slots are present."""
        return np.asarray(self._stamp[slots] > 0)

    def position(self, slot: int) -> int:
        """Return the log position of a slot that is present."""
        return self._stamp_of[slot] - 1

    @property
    def head(self) -> int:
        """Position before which no entry is live."""
        return self._end[_HEAD]

    @property
    def tail(self) -> int:
        """Position of the next slot that is appended."""
        return self._end[_TAIL]

    def append(self, slots: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Make these slots the most recent, the last of them most of all; adds absent ones."""
        if len(slots) <= FEW:
            end, log_at, stamp_of, length = self._end, self._log_at, self._stamp_of, self._length
            for slot in slots:
                if end[_TAIL] - end[_HEAD] >= length:
                    self._compact()
                tail = end[_TAIL]
                if not stamp_of[slot]:
                    end[_COUNT] += 1
                log_at[tail % length] = slot
                stamp_of[slot] = tail + 1
                end[_TAIL] = tail + 1
            return
        if len(slots) > len(self._stamp):  # some are repeated: only the last use counts
            slots = list(dict.fromkeys(reversed(slots)))[::-1]
        batch = np.asarray(slots, dtype=np.intp)  # any other type is converted at every use
        n = len(batch)
        absent = n - int(np.count_nonzero(self._stamp[batch]))
        stamps = self.append_distinct(batch, absent)
        # A slot that was given twice counts once.
        if absent and np.count_nonzero(self._stamp[batch] == stamps) != n:
            self._end[_COUNT] = int(np.count_nonzero(self._stamp))

    def append_distinct(self, batch: npt.NDArray[np.integer], absent: int) -> npt.NDArray[np.int64]:
        """Do what `append` does for slots without repeats, of which `absent` are not present.

        Returns the stamps that the slots got.
        """
        n, end = len(batch), self._end
        if end[_TAIL] - end[_HEAD] + n > self._length:
            self._compact()
        tail = end[_TAIL]
        stamps = np.arange(tail + 1, tail + 1 + n, dtype=np.int64)
        at = tail % self._length
        if at + n <= self._length:
            self._log[at : at + n] = batch
        else:
            self._log[(stamps - 1) % self._length] = batch
        self._stamp[batch] = stamps
        end[_TAIL] = tail + n
        end[_COUNT] += absent
        return stamps

    def discard(self, slots: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Remove these slots; absent ones are ignored."""
        if len(slots) <= FEW:
            for slot in slots:
                if self._stamp_of[slot]:
                    self._stamp_of[slot] = 0
                    self._end[_COUNT] -= 1
            return
        self.discard_distinct(np.unique(np.asarray(slots, dtype=np.intp)))

    def discard_distinct(self, batch: npt.NDArray[np.integer]) -> None:
        """Do what `discard` does for slots without repeats."""
        self._end[_COUNT] -= int(np.count_nonzero(self._stamp[batch]))
        self._stamp[batch] = 0

    def scan(
        self,
        search: Search,
        start: int | None = None,
        stop: int | None = None,
        marks: Marks | None = None,
        few: int = SCAN_FEW,
    ) -> Iterator[int]:
        """Accepted slots at positions `start .. stop - 1`, least recent first.

        Only slots whose mark is in the range of `marks` are looked at, the first `few` entries one
        by one: cheaper if one of these will do. The log must not change while this runs.
        """
        head, tail = self._bounds()
        start = self._skip_dead() if start is None else max(start, head)
        stop = tail if stop is None else min(stop, tail)
        singles = range(start, min(start + few, stop))
        for at in singles:
            if search.left <= 0:
                return
            slot = self._log_at[at % self._length]
            if self._stamp_of[slot] != at + 1:
                continue
            if marks is not None and not marks.low <= marks.of[slot] <= marks.high:
                continue
            if search.accepts(slot):
                yield slot
        at, chunk = singles.stop, SCAN_CHUNK_MIN
        while at < stop and search.left > 0:
            if chunk > SCAN_CHUNK_MIN and search.is_sparse(stop - at):
                assert search.mask is not None
                chunk = stop - at
                live = self._masked(search.mask, at, stop)
            else:
                live = self.between(at, min(at + chunk, stop))
            if marks is not None:
                mark = marks.array[live]
                live = live[(mark >= marks.low) & (mark <= marks.high)]
            live = live[: search.left]
            search.left -= len(live)
            if search.mask is not None:
                live = live[search.mask[live]]
            slots = live.tolist()
            yield from slots if search.wanted is None else filter(search.wanted, slots)
            at += chunk
            chunk = min(2 * chunk, SCAN_CHUNK_MAX)

    def between(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Return the live slots at positions `start .. stop - 1`, in that order."""
        head, tail = self._bounds()
        positions = np.arange(max(start, head), min(stop, tail), dtype=np.int64)
        slots = self._log[positions % self._length]
        return np.asarray(slots[self._stamp[slots] == positions + 1])

    def _masked(self, mask: SlotMask, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Return the slots of `between` that are in a mask, without reading the log."""
        slots = np.flatnonzero(mask).astype(np.int32)
        positions = self._stamp[slots] - 1
        is_inside = (positions >= start) & (positions < stop)
        return np.asarray(slots[is_inside][np.argsort(positions[is_inside])])

    def to_array(self) -> npt.NDArray[np.int32]:
        """Return all slots, coldest first: int32, shape `(len(self),)`."""
        self._check_ends()
        head, tail = self._end[_HEAD], self._end[_TAIL]
        parts = [
            self.between(start, min(start + COMPACT_CHUNK, tail))
            for start in range(head, tail, COMPACT_CHUNK)
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def clear(self) -> None:
        """Remove every slot."""
        self._stamp[:] = 0
        self._ends[:] = 0

    def rebuild(self, present: npt.NDArray[Any]) -> None:
        """After a crash: keep exactly the slots in `present`, in their stamped order.

        Slots without a stamp become the coldest. Nothing that the arrays hold is trusted beyond
        being numbers. Arrays that are right are only read, which makes no page of them dirty.
        """
        if self._has_exactly(present):
            return
        stamps = np.asarray(self._stamp[present])
        self._rewrite(by_stamp(present.astype(np.int32), stamps))

    def _check_ends(self) -> None:
        if not may_be_right(self._length, *self._end):
            raise IndexError("the ends of a log contradict each other")

    def _bounds(self) -> tuple[int, int]:
        """Return head and tail, which are never further apart than the log is long."""
        head = self._end[_HEAD]
        return head, min(self._end[_TAIL], head + self._length)

    def _skip_dead(self) -> int:
        """Advance the head to the coldest live slot and return its position."""
        self._check_ends()
        head, tail = self._end[_HEAD], self._end[_TAIL]
        few = min(head + SCAN_FEW, tail)
        while head < few:
            if self._stamp_of[self._log_at[head % self._length]] == head + 1:
                self._end[_HEAD] = head
                return head
            head += 1
        chunk = SCAN_CHUNK_MIN
        while head < tail:
            positions = np.arange(head, min(head + chunk, tail), dtype=np.int64)
            live = self._stamp[self._log[positions % self._length]] == positions + 1
            if live.any():
                head += int(live.argmax())
                break
            head += len(positions)
            chunk = min(2 * chunk, SCAN_CHUNK_MAX)
        self._end[_HEAD] = head
        return head

    def _has_exactly(self, present: npt.NDArray[Any]) -> bool:
        """Return True if exactly these slots are present, and the arrays keep the invariant.

        Entries that are not live must name slots, too: searches look at their stamps.
        """
        head, tail, count = (int(end) for end in self._ends)
        if not may_be_right(self._length, head, tail, count):
            return False
        if not count == len(present) == np.count_nonzero(self._stamp):
            return False
        lap = head - head % self._length
        begin, end = head - lap, tail - lap
        for entries in (self._log[begin:end], self._log[: max(0, end - self._length)]):
            if len(entries) and not 0 <= entries.min() <= entries.max() < len(self._stamp):
                return False
        for start in range(0, count, CHECK_CHUNK):
            slots = present[start : start + CHECK_CHUNK]
            positions = self._stamp[slots] - 1
            if positions.min() < head or positions.max() >= tail:
                return False
            positions -= lap  # faster than the remainder
            positions -= self._length * (positions >= self._length)
            if not np.array_equal(self._log[positions], slots):
                return False
        return True

    def _compact(self) -> None:
        self._rewrite(self.to_array())

    def _rewrite(self, ordered: npt.NDArray[np.int32]) -> None:
        tail = len(ordered)
        self._stamp[:] = 0
        self._log[:tail] = ordered
        self._stamp[ordered] = np.arange(1, tail + 1, dtype=np.int64)
        self._ends[:] = (0, tail, tail)


def may_be_right(length: int, head: int, tail: int, count: int) -> bool:
    """Return True unless the ends of a log, and its number of slots, contradict each other."""
    return 0 <= count <= tail - head <= length and 0 <= head <= tail <= MAX_POSITION


def by_stamp(slots: npt.NDArray[np.int32], stamps: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return the slots in the order of their stamps. Those of equal stamps keep their order.

    Stamps that differ, and lie close together, need no sorting, which takes four times as long.
    """
    is_known = stamps != 0
    if not is_known.all():
        known = by_stamp(slots[is_known], stamps[is_known])
        return np.concatenate([slots[~is_known], known])
    first, last = (int(stamps.min()), int(stamps.max())) if len(stamps) else (0, 0)
    if last - first < CLOSE * len(stamps):
        placed = np.full(last - first + 1, -1, np.int32)
        placed[stamps - first] = slots
        ordered = placed[placed >= 0]
        if len(ordered) == len(slots):
            return ordered
    return slots[np.argsort(stamps, kind="stable")]
