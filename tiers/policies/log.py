"""An exact recency list in two arrays: the building block of every order here.

Each use appends the slot to a log and stamps the slot with its place there; an entry is live only
if the slot's stamp still points at it. Appending is one vectorised assignment for a whole batch,
about ten nanoseconds a block, where a linked list costs half a microsecond. The log is compacted
when it is full, which costs a pass over it once per `capacity` uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..base import SlotMask
from .order import ArraySource, heap_arrays

MIN_LOG_LENGTH = 1024
LOG_LENGTH_PER_SLOT = 3
"""Room per slot; at least 2, so that a compaction pays for at least one use of every slot."""
SCAN_CHUNK = 512
"""Log entries looked at per step when searching from the cold end."""

_HEAD, _TAIL, _COUNT = 0, 1, 2


class RecencyLog:
    """Slots `0 .. capacity - 1` from least to most recently appended.

    Invariant: slot `s` is present iff `stamp[s] > 0`, and then `log[(stamp[s] - 1) % length] == s`.
    Positions grow for ever; they are int64 and are never reused.
    """

    def __init__(self, name: str, capacity: int, arrays: ArraySource = heap_arrays) -> None:
        length = max(MIN_LOG_LENGTH, LOG_LENGTH_PER_SLOT * capacity)
        self._length = length
        self._stamp = arrays(f"{name}_stamp", capacity, np.int64)
        self._log = arrays(f"{name}_log", length, np.int32)
        self._ends = arrays(f"{name}_ends", 3, np.int64)

    def __len__(self) -> int:
        return int(self._ends[_COUNT])

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int) and bool(self._stamp[slot] > 0)

    def append(self, slots: Sequence[int]) -> None:
        """Make these slots the most recent, the last of them most of all; adds absent ones."""
        if not slots:
            return
        if len(slots) > len(self._stamp):  # then some are repeated: only the last use counts
            slots = list(dict.fromkeys(reversed(slots)))[::-1]
        batch = np.asarray(slots, dtype=np.int32)
        if int(self._ends[_TAIL] - self._ends[_HEAD]) + len(batch) > self._length:
            self._compact()
        tail = int(self._ends[_TAIL])
        positions = np.arange(tail, tail + len(batch), dtype=np.int64)
        self._ends[_COUNT] += np.count_nonzero(self._stamp[batch] == 0)
        self._log[positions % self._length] = batch
        self._stamp[batch] = positions + 1
        self._ends[_TAIL] = tail + len(batch)
        distinct = int(np.count_nonzero(self._stamp[batch] == positions + 1))
        if distinct != len(batch):  # a slot was given twice: count it once
            self._ends[_COUNT] = np.count_nonzero(self._stamp)

    def discard(self, slots: Sequence[int]) -> None:
        """Remove these slots; absent ones are ignored."""
        if not slots:
            return
        batch = np.unique(np.asarray(slots, dtype=np.int32))
        self._ends[_COUNT] -= np.count_nonzero(self._stamp[batch])
        self._stamp[batch] = 0

    def coldest(self, mask: SlotMask | None = None, window: int | None = None) -> Iterator[int]:
        """Slots from the least recent on. The log must not change while this runs."""
        for chunk in self._chunks(mask, window):
            yield from chunk

    def find(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        """Up to `limit` of the coldest slots that `wanted` accepts ; see `EvictionOrder`."""
        found: list[int] = []
        if limit <= 0:
            return found
        for chunk in self._chunks(mask, window):
            for slot in chunk:
                if wanted(slot):
                    found.append(slot)
                    if len(found) == limit:
                        return found
        return found

    def to_array(self) -> np.ndarray:
        """All slots, coldest first: int32, shape `(len(self),)`."""
        present = np.flatnonzero(self._stamp)
        return present[np.argsort(self._stamp[present])].astype(np.int32)

    def clear(self) -> None:
        """Remove every slot."""
        self._stamp[:] = 0
        self._ends[:] = 0

    def rebuild(self, present: np.ndarray) -> None:
        """After a crash: keep exactly the slots in `present`, in their stamped order.

        Slots without a stamp become the coldest. Nothing that the arrays hold is trusted beyond
        being numbers.
        """
        stamps = np.asarray(self._stamp[present])
        ordered = present[np.argsort(stamps, kind="stable")].astype(np.int32)
        self._rewrite(ordered)

    def _chunks(self, mask: SlotMask | None, window: int | None) -> Iterator[list[int]]:
        head, tail = int(self._ends[_HEAD]), int(self._ends[_TAIL])
        at_front, left = True, len(self) if window is None else window
        for start in range(head, tail, SCAN_CHUNK):
            positions = np.arange(start, min(start + SCAN_CHUNK, tail), dtype=np.int64)
            slots = self._log[positions % self._length]
            live = slots[self._stamp[slots] == positions + 1][:left]
            if len(live):
                at_front = False
                left -= len(live)
                yield (live if mask is None else live[mask[live]]).tolist()
            elif at_front:  # nothing live here any more: never look again
                self._ends[_HEAD] = int(positions[-1]) + 1
            if left <= 0:
                return

    def _compact(self) -> None:
        self._rewrite(self.to_array())

    def _rewrite(self, ordered: np.ndarray) -> None:
        tail = len(ordered)
        self._stamp[:] = 0
        self._log[:tail] = ordered
        self._stamp[ordered] = np.arange(1, tail + 1, dtype=np.int64)
        self._ends[:] = (0, tail, tail)
