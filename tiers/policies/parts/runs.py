"""Runs: groups of blocks that the same request was the last to use.

Records of runs lie in a ring of arrays, in the order of their creation. Each run has a number, and
numbers only grow. A run without slots stays as a ghost until its record is reused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ..order import ArraySource, Column, heap_arrays
from .log import RecencyLog, Search
from .reuse import AGE_CLASSES, UNKNOWN, Ints

Slots = npt.NDArray[np.int32]

RUNS_MIN = 1 << 14
"""Minimum number of records, so that a small tier also remembers evicted runs."""
RUNS_PER_SLOT = 0.5
GAP_SCALE = 1000
PIECE = 4096
"""Log positions of a run that are read at a time: one run may fill nearly the whole tier."""
ANCIENT = 0
"""Number of the run that takes the slots of runs whose records were reused."""


class RunRecords:
    """Records of runs: columns by place, which is a run's number modulo `size`."""

    def __init__(self, name: str, size: int, arrays: ArraySource) -> None:
        def column(field: str, dtype: type[np.generic] = np.int32) -> Column:
            return Column(arrays(f"{name}_run_{field}", size, dtype))

        self.size = size
        self.number = column("number", np.int64)
        self.made_at = column("made_at", np.int64)
        """Creation time of each run, counted in requests."""
        self.ended_at_age = column("ended")
        """Age at which each run was used again; 0 while it waits."""
        self.class_ = column("class", np.int16)
        self.anchor = column("anchor")
        """Slot of the block before each run's first block, plus one; 0 if it is unknown."""
        self.uses = column("uses")
        self.gap_scaled = column("gap")
        """Moving mean of log2(1 + time between uses) of each run, times `GAP_SCALE`."""
        self.first = column("first")
        """Depth of each run's first block."""
        self.depth = column("depth")
        """Depth at which each run ends: its request's number of blocks up to that point."""
        self.rest = column("rest", np.int64)
        """Number of the run with the unused rest of each run, after a part was used; 0: none."""
        self._state = Column(arrays(f"{name}_run_state", 1 + AGE_CLASSES, np.int64))
        """The last number given out, then for each class of age the first run not yet counted."""

    @property
    def next_number(self) -> int:
        """Number of the next run."""
        return self._state.of[0] + 1

    @property
    def looked_at(self) -> Ints:
        """For each class of age, the number below which runs were counted at that age."""
        return self._state.array[1:]

    def add(self, now: int, class_: int) -> int:
        """Begin the record of a new run, in place of the oldest one, and return its place."""
        number = self.next_number
        if number % self.size == ANCIENT:
            number += 1
        self._state.of[0] = number
        place = number % self.size
        self.number.of[place] = number
        self.made_at.of[place] = now
        self.class_.of[place] = class_
        self.ended_at_age.of[place] = self.anchor.of[place] = self.uses.of[place] = 0
        self.gap_scaled.of[place] = self.rest.of[place] = 0
        self.first.of[place] = self.depth.of[place] = 0
        return place

    def first_made_after(self, time: int, start: int, stop: int) -> int:
        """Return the number of the first run from `start` on newer than `time`, or `stop`."""
        while start < stop:
            middle = (start + stop) // 2
            if self.made_at.of[middle % self.size] <= time:
                start = middle + 1
            else:
                stop = middle
        return start

    def clear(self) -> None:
        """Forget every run."""
        for column in (self.number, self.made_at, self.ended_at_age, self.class_, self.anchor):
            column.array[:] = 0
        self._state.array[:] = 0


class Runs:
    """The run of each slot, and the slots of each run in order of use; about 63 bytes a slot.

    Invariant: slot `s` is present iff it is in the log, and then `run_of[s]` is the place of a
    record whose run has `live` slots in log positions `start .. stop - 1`.
    """

    def __init__(self, name: str, capacity: int, arrays: ArraySource = heap_arrays) -> None:
        size = max(RUNS_MIN, int(RUNS_PER_SLOT * capacity))
        self.records = RunRecords(name, size, arrays)
        self.log = _Log(name, capacity, arrays, self)
        self.run_of = arrays(f"{name}_run_of", capacity, np.int32)
        self.depth_of = arrays(f"{name}_depth_of", capacity, np.int32)
        """Depth of each slot's block in its chain: the number of blocks before it, if known."""
        self.start = arrays(f"{name}_run_start", size, np.int64)
        self.stop = arrays(f"{name}_run_stop", size, np.int64)
        self.live = Column(arrays(f"{name}_run_live", size, np.int32))

    def held(self) -> Ints:
        """Return the places of all runs that hold slots, the oldest first, without `ANCIENT`."""
        places = np.flatnonzero(self.live.array)
        if len(places) and places[0] == ANCIENT:
            places = places[1:]
        oldest = int(np.searchsorted(places, self.records.next_number % self.records.size))
        return np.concatenate((places[oldest:], places[:oldest]))

    def add(self, now: int, class_: int = UNKNOWN) -> int:
        """Make a new run without slots and return the place of its record."""
        place = self.records.add(now, class_)
        if self.live.of[place]:
            self._forget(place)
        self.live.of[place] = 0
        return place

    def put(self, slots: Slots, *places: tuple[int, int]) -> None:
        """Make `slots`, coldest first, the most recent.

        Each `(place, n)` of `places` makes a run of the next `n`. Slots must be distinct.
        """
        batch = np.asarray(slots, np.intp)  # numpy converts any other type at every use
        self.log.append_distinct(batch, len(batch) - self._leave(batch))
        begin, at = self.log.tail - len(slots), 0
        for place, n in places:
            self.run_of[batch[at : at + n]] = place
            self.start[place], self.stop[place] = begin + at, begin + at + n
            self.live.of[place] = n
            at += n
        assert at == len(slots), "every slot belongs to a run"

    def discard(self, slots: Slots) -> None:
        """Remove slots; absent ones are ignored."""
        batch = np.asarray(slots, np.intp)
        if self._leave(batch):
            self.log.discard_distinct(batch)

    def move_all(self, place: int, to: int) -> None:
        """Move the slots of one run to another; their places in the log stay the same."""
        slots = self.slots(np.array([place]))
        self.run_of[slots] = to
        self.start[to], self.stop[to] = self.start[place], self.stop[place]
        self.live.of[to] = len(slots)
        self.live.of[place] = 0

    def slots(self, places: Ints) -> Slots:
        """Return the slots of some runs, run by run, coldest first."""
        if not len(places):
            return np.empty(0, np.int32)
        start, length = self.start[places], self.stop[places] - self.start[places]
        ends = np.cumsum(length)
        positions = np.repeat(start - (ends - length), length) + np.arange(ends[-1])
        slots, is_live = self.log.at(positions)
        owners = np.repeat(places, length)
        return np.asarray(slots[is_live & (self.run_of[slots] == owners)])

    def pieces(self, places: Ints) -> Iterator[Slots]:
        """Yield the result of `slots` in parts, so that a caller can stop early.

        Nothing may change while this runs.
        """
        at = 0
        for long in np.flatnonzero(self.stop[places] - self.start[places] > PIECE).tolist():
            yield self.slots(places[at:long])
            yield from self._pieces_of(int(places[long]))
            at = long + 1
        yield self.slots(places[at:])

    def _pieces_of(self, place: int) -> Iterator[Slots]:
        at, stop, has_begun = int(self.start[place]), int(self.stop[place]), False
        while at < stop:
            slots, is_live = self.log.at(np.arange(at, min(at + PIECE, stop)))
            is_live &= self.run_of[slots] == place
            if not has_begun:  # dead entries stay dead: skip them next time
                has_begun = bool(is_live.any())
                self.start[place] = at + (int(is_live.argmax()) if has_begun else len(slots))
            yield np.asarray(slots[is_live])
            at += PIECE

    def search(self, ranked: Iterable[Ints], search: Search) -> Iterator[int]:
        """Yield the slots that a search accepts, of runs in the order given, some at a time."""
        for places in ranked:
            for piece in self.pieces(places):
                if search.left <= 0:
                    return
                slots = piece[: search.left]
                search.left -= len(slots)
                if search.mask is not None:
                    slots = slots[search.mask[slots]]
                yield from filter(search.wanted, slots.tolist())

    def segments(self, chain: Slots) -> list[tuple[int, int, int]]:
        """Return `(place, start, stop)` for each stretch of a chain whose slots are of one run."""
        if not len(chain):
            return []
        places = self.run_of[chain]
        starts = [0, *(np.flatnonzero(places[1:] != places[:-1]) + 1).tolist()]
        stops = [*starts[1:], len(chain)]
        return list(zip(places[starts].tolist(), starts, stops, strict=True))

    def depth_of_first(self, chain: Sequence[int]) -> int:
        """Return the depth at which a chain begins; the engine's own blocks are not in it."""
        is_known = bool(chain) and self.records.class_.of[int(self.run_of[chain[0]])] != UNKNOWN
        return int(self.depth_of[chain[0]]) if is_known else 0

    def clear(self) -> None:
        """Forget every slot, run and ghost."""
        self.log.clear()
        self._forget_records()

    def rebuild(self, present: npt.NDArray[np.integer]) -> None:
        """Put all slots into one run after a crash; of the old state only their order is kept."""
        self._forget_records()
        self.log.rebuild(present)
        self.records.class_.of[ANCIENT] = UNKNOWN
        self.run_of[present] = ANCIENT
        self.start[ANCIENT], self.stop[ANCIENT] = self.log.head, self.log.tail
        self.live.of[ANCIENT] = len(present)

    def _forget_records(self) -> None:
        self.records.clear()
        for field in (self.live.array, self.start, self.stop, self.run_of):
            field[:] = 0

    def _leave(self, slots: npt.NDArray[np.integer]) -> int:
        """Take slots out of their runs; returns how many of them were present."""
        is_present = self.log.holds(slots)
        present = int(np.count_nonzero(is_present))
        if present:
            places = self.run_of[slots]
            if present < len(slots):
                places = places[is_present]
            np.subtract.at(self.live.array, places, 1)
        return present

    def _forget(self, place: int) -> None:
        """Free the record of a run that still has slots: they join the run `ANCIENT`."""
        self.records.class_.of[ANCIENT] = UNKNOWN
        slots = self.slots(np.array([place]))
        self.run_of[slots] = ANCIENT
        begin = self.start[place]
        if self.live.of[ANCIENT]:
            begin = min(begin, self.start[ANCIENT])
            self.stop[ANCIENT] = max(self.stop[place], self.stop[ANCIENT])
        else:
            self.stop[ANCIENT] = self.stop[place]
        self.start[ANCIENT] = begin
        self.live.of[ANCIENT] += len(slots)


class _Log(RecencyLog):
    """Recency log that also updates the positions of runs when it is compacted."""

    def __init__(self, name: str, capacity: int, arrays: ArraySource, runs: Runs) -> None:
        super().__init__(name, capacity, arrays)
        self._runs = runs

    def at(self, positions: Ints) -> tuple[Slots, npt.NDArray[np.bool_]]:
        """Return the slots at some positions, and for each whether the entry is still live."""
        slots = self._log[positions % self._length]
        return slots, self._stamp[slots] == positions + 1

    def _rewrite(self, ordered: Slots) -> None:
        before = self._stamp[ordered] - 1
        held = np.flatnonzero(self._runs.live.array)
        for ends in (self._runs.start, self._runs.stop):
            ends[held] = np.searchsorted(before, ends[held])
        super()._rewrite(ordered)
