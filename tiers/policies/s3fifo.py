"""S3-FIFO.

J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi: "FIFO Queues Are All You Need for Cache Eviction",
SOSP 2023. New blocks enter a small queue with a tenth of the slots. The oldest block of the small
queue moves to the main queue if it was used at least twice there. Otherwise it is evicted and
becomes a ghost. A block that returns while its ghost exists enters the main queue directly. The
oldest block of the main queue gets one more round for each use, at most three.

While the tier is not full, the small queue grows beyond its share, as in the paper.

Differences from the paper: a block may be pinned or protected. It is skipped and keeps its place.
If one eviction takes many blocks, the small queue promotes its blocks first. Blocks of the main
queue that get another round queue up behind them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from ..base import SlotMask
from .order import FEW, ArraySource, EvictionOrder, heap_arrays
from .parts.ghosts import GhostLists
from .parts.log import Marks, RecencyLog, Search

SMALL_SHARE = 0.1
"""Share of the slots that belongs to the small queue."""
GHOST_SHARE = 0.9
"""Maximum number of ghosts, as a share of the slots."""
USES_TO_STAY = 2
"""Number of uses in the small queue that promotes a block to the main queue."""
USES_MAX = 3
"""Maximum of the use counter."""

_UNLIMITED = 255
_NOT_SEARCHED = (0, None)


class S3FifoOrder(EvictionOrder):
    """S3-FIFO over slots: about 66 bytes a slot, ghosts included."""

    wants_tags = True

    def __init__(self, capacity: int, arrays: ArraySource = heap_arrays) -> None:
        super().__init__(capacity, arrays)
        self._small = RecencyLog("s3fifo_small", capacity, arrays)
        self._main = RecencyLog("s3fifo_main", capacity, arrays)
        self._uses = Marks(arrays("s3fifo_uses", capacity, np.uint8))
        self._rounds = [self._uses.within(n, n) for n in range(USES_MAX)]
        self._rounds.append(self._uses.within(USES_MAX, _UNLIMITED))
        self._seldom = self._uses.within(0, USES_TO_STAY - 1)
        self._often = self._uses.within(USES_TO_STAY, _UNLIMITED)
        self._used = self._uses.within(1, _UNLIMITED)
        self._searched: tuple[int, int | None] = _NOT_SEARCHED
        self._ghost_limit = int(capacity * GHOST_SHARE)
        self._ghosts = GhostLists("s3fifo_ghost", self._ghost_limit, 1, arrays)
        self._small_limit = max(1, int(capacity * SMALL_SHARE))
        self._main_limit = capacity - self._small_limit

    def insert(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        back: list[int] = []
        new: list[int] = []
        drop = self._ghosts.drop
        for slot, tag in zip(slots, tags, strict=True):
            (new if drop(tag) < 0 else back).append(slot)
        while len(self._ghosts) > self._ghost_limit:
            self._ghosts.drop_oldest(0)
        self._uses.fill(slots, 0)
        self._small.append(new)
        self._main.append(back)
        if back:
            self._searched = _NOT_SEARCHED

    def touch(self, slots: Sequence[int]) -> None:
        if len(slots) > FEW:
            batch = np.asarray(slots)
            self._uses.array[batch] = np.minimum(self._uses.array[batch] + 1, USES_MAX)
            return
        uses = self._uses.of
        for slot in slots:
            if uses[slot] < USES_MAX:
                uses[slot] += 1

    def settle(self, slots: Sequence[int]) -> None:
        self._small.append([slot for slot in slots if slot in self._small])
        self._main.append([slot for slot in slots if slot in self._main])
        self._searched = _NOT_SEARCHED

    def remove(self, slots: Sequence[int]) -> None:
        self._small.discard(slots)
        self._main.discard(slots)

    def evicted(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        self._searched = _NOT_SEARCHED
        for is_often in (False, True):  # the first step promotes most of the often used ones
            self._evict_from_small(slots, tags, is_often=is_often)
        if main := [slot for slot in slots if slot in self._main]:
            # True if the small queue was searched before the last one, and had only promotions.
            if len(self._small) and len(self._main) - len(main) < self._main_limit:
                self._move_up_before(self._small.tail, ())
            self._evict_from_main(main)

    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        search = Search(wanted, mask, window)
        moved: deque[int] = deque()
        small = self._small_candidates(search)
        main = self._main_candidates(search, moved)
        small_size, main_size = len(self._small), len(self._main)
        found: list[int] = []
        is_small_over = is_main_over = False
        while len(found) < limit and not (is_small_over and is_main_over):
            is_mains_turn = main_size > self._main_limit or small_size == 0
            if is_small_over or (is_mains_turn and not is_main_over):
                slot = next(main, None)
                is_main_over = slot is None
                main_size -= 1
            else:
                slot, moving = next(small, (None, []))
                is_small_over = slot is None
                moved.extend(search.masked(moving))
                small_size -= len(moving) + 1
                main_size += len(moving)
            if slot is not None:
                found.append(slot)
        late = filter(search.accepts, moved) if search.left > 0 else iter(())
        found.extend(islice(late, max(0, limit - len(found))))
        return found

    def clear(self) -> None:
        self._small.clear()
        self._main.clear()
        self._ghosts.clear()
        self._uses.array[:] = 0
        self._searched = _NOT_SEARCHED

    def reconcile(self, present: npt.NDArray[np.integer]) -> None:
        in_main = self._main.holds(present)
        self._main.rebuild(present[in_main])
        self._small.rebuild(present[~in_main])
        np.minimum(self._uses.array, USES_MAX, out=self._uses.array)
        self._ghosts.clear()
        self._searched = _NOT_SEARCHED

    def __contains__(self, slot: object) -> bool:
        return slot in self._small or slot in self._main

    def _small_candidates(self, search: Search) -> Iterator[tuple[int | None, list[int]]]:
        """Yield the victims of the small queue, each with the slots that are promoted before it.

        The last item is None, with the slots that are promoted after the last victim.
        """
        at = self._small.head
        for slot in self._small.scan(search, marks=self._seldom):
            stop = self._small.position(slot)
            moving = list(self._small.scan(Search(), at, stop, self._often))
            search.left -= len(moving)
            at = stop + 1
            yield slot, moving
        if search.left > 0:
            moving = list(self._small.scan(Search(window=search.left), at, None, self._often))
            search.left -= len(moving)
            yield None, moving

    def _main_candidates(self, search: Search, moved: deque[int]) -> Iterator[int]:
        """Yield the victims of the main queue. Each slot gets a round for each use.

        The slots in `moved` join the queue after a round.
        """
        first_round, start = self._skip_used()
        for uses, marks in enumerate(self._rounds):
            if uses >= first_round:
                yield from self._main.scan(search, start, marks=marks)
                start = None
            while moved and search.left > 0:
                slot = moved.popleft()
                if search.accepts(slot):
                    yield slot

    def _skip_used(self) -> tuple[int, int | None]:
        """Return the first round that has a victim, and the position of that victim.

        The result is cached until an eviction. Otherwise every search would scan the whole queue of
        a tier whose blocks are all used.
        """
        first_round, start = self._searched
        if len(self._main):
            for uses in range(first_round, USES_MAX + 1):
                slot = next(self._main.scan(Search(), start, marks=self._rounds[uses]), None)
                start = None if slot is None else self._main.position(slot)
                if slot is not None:
                    self._searched = (uses, start)
                    break
        return self._searched

    def _move_up_before(self, stop: int, leaving: Container[int]) -> None:
        """Promote the often used slots of the small queue before a position to the main queue."""
        often = self._small.scan(Search(), None, stop, self._often)
        moving = [slot for slot in often if slot not in leaving]
        if moving:
            self._small.discard(moving)
            self._uses.fill(moving, 0)
            self._main.append(moving)

    def _evict_from_small(
        self, slots: Sequence[int], tags: Sequence[int], *, is_often: bool
    ) -> None:
        """Remove those slots that are in the small queue, and used often or not. Keep ghosts."""
        small, uses = self._small, self._uses.of
        leaving = {
            slot: tag
            for slot, tag in zip(slots, tags, strict=True)
            if slot in small and (uses[slot] >= USES_TO_STAY) == is_often
        }
        if leaving:
            self._move_up_before(max(map(small.position, leaving)), leaving)
            small.discard(list(leaving))
            for tag in leaving.values():
                self._ghosts.add(0, tag)

    def _evict_from_main(self, slots: Sequence[int]) -> None:
        """Remove slots in this order. All slots that the queue passes get a round.

        Slots without uses that follow each other in the queue cost one pass together.
        """
        main, uses, at = self._main, self._uses, 0
        while at < len(slots):
            if rounds := uses.of[slots[at]]:  # a whole round takes a use from each slot
                everyone = main.to_array()
                uses.array[everyone] -= np.minimum(uses.array[everyone], rounds)
            begin, stop = at, main.position(slots[at])
            at += 1
            while at < len(slots) and not uses.of[slots[at]] and main.position(slots[at]) > stop:
                stop = main.position(slots[at])
                at += 1
            self._give_round_before(stop)
            main.discard(slots[begin:at])

    def _give_round_before(self, stop: int) -> None:
        """Move the used slots of the main queue before a position to its end, with a use less."""
        uses = self._uses
        passed = list(self._main.scan(Search(), None, stop, self._used))
        if len(passed) > FEW:
            uses.array[np.asarray(passed)] -= 1
        else:
            for again in passed:
                uses.of[again] -= 1
        self._main.append(passed)
