"""SIEVE.

Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson, K. V. Rashmi: "SIEVE is Simpler than LRU: an Efficient
Turn-Key Eviction Algorithm for Web Caches", NSDI 2024. Blocks are queued in the order of arrival
and never move. Each slot has a bit that a use sets. A hand goes from the oldest slot to the newest
and then starts again. It clears set bits, and evicts the blocks whose bit is clear.

Difference from the paper: a block may be pinned or protected; the hand skips it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from ..base import SlotMask
from .order import ArraySource, EvictionOrder, heap_arrays, scalars
from .parts.log import Marks, RecencyLog, Search


class SieveOrder(EvictionOrder):
    """SIEVE over slots: 21 bytes a slot.

    The hand is a position of the queue. It examines the first slot at or after that position next.
    """

    def __init__(self, capacity: int, arrays: ArraySource = heap_arrays) -> None:
        super().__init__(capacity, arrays)
        self._hand = scalars(arrays("sieve_hand", 1, np.int64))
        self._queue = _Queue("sieve", capacity, arrays, self._hand)
        self._used = Marks(arrays("sieve_used", capacity, np.uint8))
        self._searched: tuple[int, int] | None = None
        self._laps = (self._used.within(0, 0), self._used.within(1, 255))

    def insert(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        self.settle(slots)
        self._used.fill(slots, 0)

    def touch(self, slots: Sequence[int]) -> None:
        self._used.fill(slots, 1)

    def settle(self, slots: Sequence[int]) -> None:
        tail = self._queue.tail
        self._queue.append(slots)
        if self._queue.tail != tail + len(slots):  # the queue was compacted
            self._searched = None

    def remove(self, slots: Sequence[int]) -> None:
        self._queue.discard(slots)
        self._wrap()

    def evicted(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        for slot in slots:
            self._advance_to(slot)
            self._queue.discard((slot,))
        self._wrap()

    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        search = Search(wanted, mask, window)
        queue, hand = self._queue, self._hand[0]
        ahead, behind = self._skip_used()
        # Marked slots are victims on the second lap only, as the first lap clears the mark.
        unused, used = self._laps
        laps = (
            queue.scan(search, start, stop, marks)
            for start, stop, marks in (
                (ahead, None, unused),
                (behind, hand, unused),
                (hand, None, used),
                (queue.head, hand, used),
            )
        )
        return list(islice(chain.from_iterable(laps), max(limit, 0)))

    def clear(self) -> None:
        self._queue.clear()
        self._used.array[:] = 0
        self._hand[0] = 0
        self._searched = None

    def reconcile(self, present: npt.NDArray[np.integer]) -> None:
        self._queue.rebuild(present)
        self._hand[0] = min(max(self._hand[0], self._queue.head), self._queue.tail)
        np.minimum(self._used.array, 1, out=self._used.array)
        self._searched = None

    def __contains__(self, slot: object) -> bool:
        return slot in self._queue

    def _advance_to(self, slot: int) -> None:
        """Move the hand past a slot that is evicted, and clear the bits on the way."""
        queue, at = self._queue, self._queue.position(slot)
        if self._used.of[slot]:  # the hand makes a whole lap first
            self._used.array[:] = 0
        elif at < self._hand[0]:
            self._clear_between(self._hand[0], queue.tail)
            self._clear_between(queue.head, at)
        else:
            self._clear_between(self._hand[0], at)
        self._hand[0] = at + 1

    def _skip_used(self) -> tuple[int, int]:
        """Return two positions: of the first unused slot ahead of the hand, and behind it.

        The result is cached until an eviction. Otherwise every search would scan the whole queue of
        a tier whose blocks are all used.
        """
        queue, hand = self._queue, self._hand[0]
        ahead, behind = self._searched or (hand, queue.head)
        unused = self._laps[0]
        slot = next(queue.scan(Search(), ahead, None, unused), None)
        ahead = queue.tail if slot is None else queue.position(slot)
        if slot is None:
            slot = next(queue.scan(Search(), behind, hand, unused), None)
            behind = hand if slot is None else queue.position(slot)
        self._searched = (ahead, behind)
        return self._searched

    def _clear_between(self, start: int, stop: int) -> None:
        if stop > start:
            self._used.array[self._queue.between(start, stop)] = 0

    def _wrap(self) -> None:
        """Move the hand to the oldest slot if none is ahead of it, so that it skips new slots."""
        if next(self._queue.scan(Search(), self._hand[0]), None) is None:
            self._hand[0] = 0
        self._searched = None


class _Queue(RecencyLog):
    """Queue that keeps the hand between the same two slots when positions change."""

    def __init__(
        self, name: str, capacity: int, arrays: ArraySource, hand: memoryview[int]
    ) -> None:
        super().__init__(name, capacity, arrays)
        self._hand = hand

    def _rewrite(self, ordered: npt.NDArray[np.int32]) -> None:
        passed = int(np.count_nonzero(self._stamp[ordered] <= self._hand[0]))
        super()._rewrite(ordered)
        self._hand[0] = passed
