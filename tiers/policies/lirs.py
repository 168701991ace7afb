"""LIRS: low inter-reference recency set.

S. Jiang, X. Zhang: "LIRS: An Efficient Low Inter-reference Recency Set Replacement Policy to
Improve Buffer Cache Performance", SIGMETRICS 2002. Blocks are hot (LIR) or cold (HIR). Hot blocks
have 99 % of the slots. Cold blocks queue in Q and are evicted first. The stack S is ordered by
recency. It holds the hot blocks, and every block used since the least recent hot one, ghosts
included. A cold block that is used while it is in S becomes hot.

Differences from the paper: S never has more than two entries a slot; beyond that, the oldest ghost
is dropped, as in most implementations. A block may be pinned or protected. The next block of Q is
then evicted instead, or, if there is none, the least recent hot block. If one eviction needs more
blocks than Q holds, it takes hot blocks as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from ..base import SlotMask
from .order import ArraySource, EvictionOrder, heap_arrays, scalars
from .parts.links import StampedLists
from .parts.log import NO_PLACE, Search
from .parts.tags import NONE, TagTable

HIR_SHARE = 0.01
"""Share of the slots that is reserved for cold blocks; at least one slot."""
STACK_LIMIT_PER_SLOT = 2
"""Maximum number of entries of S, per slot."""

_S = 0
_Q, _GHOSTS, _HOT = 0, 1, 2
_AFTER_Q = 1 << 60
"""Added to the stamps of hot blocks, which follow all blocks of Q."""


class LirsOrder(EvictionOrder):
    """LIRS over slots: about 92 bytes a slot, ghosts included.

    Entries below `capacity` are slots, the others are ghosts. Each entry is in one of three lists:
    Q, the ghosts in the order of their eviction, and the hot blocks in no particular order. All hot
    blocks, all ghosts and some blocks of Q are also in S.
    """

    wants_tags = True
    state_bytes_per_slot = 93

    def __init__(self, capacity: int, arrays: ArraySource = heap_arrays) -> None:
        super().__init__(capacity, arrays)
        self._tags = TagTable("lirs_ghost", capacity + capacity // 8 + 1, arrays)
        entries = capacity + self._tags.entries
        self._stack = StampedLists("lirs_stack", entries, 1, arrays)
        self._kinds = StampedLists("lirs_kinds", entries, 3, arrays)
        self._kind_array = arrays("lirs_kind", entries, np.uint8)
        self._kind_of = scalars(self._kind_array)
        self._hot_limit = capacity - max(1, int(capacity * HIR_SHARE))

    def insert(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        for slot, tag in zip(slots, tags, strict=True):
            ghost = self._tags.find(tag)
            if ghost != NONE:
                self._drop_ghost(self.capacity + ghost)
                self._stack.append(_S, slot)
                self._append(_HOT, slot)
                self._limit_hot()
            else:
                is_room = self._kinds.size(_HOT) < self._hot_limit
                self._stack.append(_S, slot)
                self._append(_HOT if is_room else _Q, slot)
            while self._stack.size(_S) > STACK_LIMIT_PER_SLOT * self.capacity:
                if self._kinds.size(_GHOSTS) == 0:
                    break
                self._drop_ghost(self._kinds.coldest(_GHOSTS))

    def touch(self, slots: Sequence[int]) -> None:
        for slot in slots:
            was_in_stack = slot in self._stack
            if was_in_stack:
                self._stack.remove(_S, slot)
            self._stack.append(_S, slot)
            if self._kind_of[slot] == _HOT:
                self._prune()
                continue
            self._kinds.remove(_Q, slot)
            self._append(_HOT if was_in_stack else _Q, slot)
            if was_in_stack:
                self._limit_hot()

    def settle(self, slots: Sequence[int]) -> None:
        # The number of hot blocks among them stays the same; the least recent ones go to Q.
        kinds = sorted(self._kind_of[slot] for slot in slots)
        for kind, slot in zip(kinds, slots, strict=True):
            if slot in self._stack:
                self._stack.remove(_S, slot)
            self._stack.append(_S, slot)
            self._kinds.remove(self._kind_of[slot], slot)
            self._append(kind, slot)
        self._prune()

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._kinds.remove(self._kind_of[slot], slot)
            if slot in self._stack:
                self._stack.remove(_S, slot)
        self._prune()

    def evicted(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        for slot, tag in zip(slots, tags, strict=True):
            kind = self._kind_of[slot]
            self._kinds.remove(kind, slot)
            if kind == _HOT:
                self._stack.remove(_S, slot)
                self._prune()
            elif slot in self._stack:
                self._leave_ghost(slot, tag)

    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        hot = (entry for entry in self._stack.iterate(_S) if self._kind_of[entry] == _HOT)
        coldest_first = chain(self._kinds.iterate(_Q), hot)
        return Search(wanted, mask, window).pick(coldest_first, limit, self._places)

    def clear(self) -> None:
        self._stack.clear()
        self._kinds.clear()
        self._tags.clear()

    def reconcile(self, present: npt.NDArray[np.integer]) -> None:
        expected = np.zeros(self.capacity, np.bool_)
        expected[present] = True
        kinds = self._kind_array[: self.capacity]
        stack = self._known(self._stack.walk(_S), expected)
        queue = self._known(self._kinds.walk(_Q), expected)
        hot = stack[kinds[stack] == _HOT]
        stack = stack[np.argmax(kinds[stack] == _HOT) :] if len(hot) else stack[:0]
        is_cold = expected.copy()
        is_cold[hot] = False
        queue = queue[is_cold[queue]]
        is_cold[queue] = False
        queue = np.concatenate((np.flatnonzero(is_cold), queue))
        self._stack.rebuild([stack])
        self._kinds.rebuild([queue, np.empty(0, np.int64), hot])
        self._kind_array[queue] = _Q
        self._kind_array[hot] = _HOT
        self._tags.clear()

    def __contains__(self, slot: object) -> bool:
        return slot in self._kinds

    def _known(self, entries: list[int], expected: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        found = np.asarray(entries, np.int64)
        found = found[found < self.capacity]
        return found[expected[found]]

    def _places(self) -> npt.NDArray[np.int64]:
        """Return numbers of the slots that grow in the order of eviction."""
        slots = slice(self.capacity)
        queued = self._kinds.stamps[slots]
        place = np.where(
            self._kind_array[slots] == _Q, queued, self._stack.stamps[slots] + _AFTER_Q
        )
        return np.where(self._kinds.is_listed()[slots], place, NO_PLACE)

    def _append(self, kind: int, entry: int) -> None:
        self._kinds.append(kind, entry)
        self._kind_of[entry] = kind

    def _limit_hot(self) -> None:
        """Move the least recent hot block to the end of Q if there is one too many."""
        if self._kinds.size(_HOT) > self._hot_limit:
            self._prune()  # with a very low limit, the last entry of S may not be hot yet
            stalest = self._stack.coldest(_S)
            self._stack.remove(_S, stalest)
            self._kinds.remove(_HOT, stalest)
            self._append(_Q, stalest)
        self._prune()

    def _prune(self) -> None:
        """Remove the entries of S below its least recent hot block; they cannot become hot."""
        for _ in range(self._stack.size(_S)):
            entry = self._stack.coldest(_S)
            if self._kind_of[entry] == _HOT:
                return
            if entry < self.capacity:
                self._stack.remove(_S, entry)
            else:
                self._drop_ghost(entry)

    def _leave_ghost(self, slot: int, tag: int) -> None:
        """Replace an evicted block by a ghost at the same place in S."""
        known = self._tags.find(tag)
        if known != NONE:
            self._drop_ghost(self.capacity + known)
        if len(self._tags) == self._tags.entries:
            self._drop_ghost(self._kinds.coldest(_GHOSTS))
        ghost = self.capacity + self._tags.add(tag)
        self._stack.replace(slot, ghost)
        self._append(_GHOSTS, ghost)

    def _drop_ghost(self, entry: int) -> None:
        self._kinds.remove(_GHOSTS, entry)
        self._stack.remove(_S, entry)
        self._tags.drop(entry - self.capacity)
