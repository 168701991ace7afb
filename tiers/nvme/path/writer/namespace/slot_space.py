"""Slots of one namespace: free, granted to a node, or used by a committed block.

Used by the writer's thread only. No method does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .....base import SlotMask
from ....segments.extents import ExtentPool, runs
from ....segments.format import slot_runs


class HeldGrant(NamedTuple):
    """One slot that a node may write to."""

    client: int
    key: bytes
    epoch: int
    """Epoch of the namespace when the slot was granted."""


class SlotSpace:
    """Free and granted slots of the segments that exist. Segment `n` lies in path `n % paths`."""

    def __init__(self, slots_per_segment: int, slots: int, paths: int) -> None:
        """`slots` is the final number of slots of the namespace."""
        self.slots_per_segment = slots_per_segment
        self.paths = paths
        self.segments: set[int] = set()
        """Numbers of the segments whose slots may be granted or used."""
        self.left_out: set[int] = set()
        """Numbers of the segments that cannot be opened. Their blocks stay in use."""
        self.is_used: SlotMask = np.zeros(slots, dtype=np.bool_)
        """One flag per slot; True if a committed block is in it."""
        self.used = 0
        """Number of used slots."""
        self.dropped_at_opening = 0
        """Number of blocks that the opening removed because their segment files were missing."""
        self.written_in_vain = 0
        """Number of blocks that nodes wrote, or may have written, without a commit. It begins anew
        once they are in the totals."""
        self._pools = [ExtentPool() for _ in range(paths)]
        self._grants: dict[int, HeldGrant] = {}

    @property
    def granted(self) -> int:
        """Number of slots that nodes may write to now."""
        return len(self._grants)

    @property
    def written(self) -> set[int]:
        """Numbers of the segments that nodes may write to now."""
        return {slot // self.slots_per_segment for slot in self._grants}

    @property
    def may_evict(self) -> SlotMask | None:
        """One flag per slot; False in segments that are left out, where an eviction frees no slot.
        None if no segment is left out."""
        if not self.left_out:
            return None
        mask: SlotMask = np.ones(len(self.is_used), dtype=np.bool_)
        mask.reshape(-1, self.slots_per_segment)[sorted(self.left_out)] = False
        return mask

    @property
    def evictable(self) -> int:
        """Number of used slots that an eviction would free."""
        mask = self.may_evict
        return self.used if mask is None else int(np.count_nonzero(self.is_used & mask))

    def free(self, paths: Iterable[int]) -> int:
        """Return the number of free slots in these paths."""
        return sum(len(self._pools[path]) for path in paths)

    def add_segment(self, number: int) -> None:
        """Add a segment. Its slots are free, except those that are used already."""
        assert number not in self.segments, "a segment is added once"
        self.segments.add(number)
        self.left_out.discard(number)
        self._free_unused(number)

    def set_aside(self, number: int) -> bool:
        """Let no more slots of a segment be granted. Return False if a node may write to it."""
        if number in self.written:
            return False
        self.segments.discard(number)
        self._pools[number % self.paths].carve(*self.bounds(number))
        return True

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the first slot of a segment, and that of the next one."""
        first = number * self.slots_per_segment
        return first, first + self.slots_per_segment

    def used_in(self, number: int) -> npt.NDArray[np.int64]:
        """Return the used slots of a segment, ascending."""
        first, end = self.bounds(number)
        return np.flatnonzero(self.is_used[first:end]) + first

    def take(self, client: int, epoch: int, keys: Sequence[bytes], paths: list[int]) -> list[int]:
        """Grant one slot to each key, adjacent where possible; so many must be free there."""
        slots: list[int] = []
        while len(slots) < len(keys):
            pool = max((self._pools[path] for path in paths), key=len)
            for first, length in pool.take(min(len(keys) - len(slots), len(pool))):
                slots.extend(range(first, first + length))
        for key, slot in zip(keys, slots, strict=True):
            self._grants[slot] = HeldGrant(client, key, epoch)
        return slots

    def grant_of(self, slot: int, client: int) -> HeldGrant | None:
        """Return the grant of a slot that this client may write to, or None."""
        grant = self._grants.get(slot)
        return grant if grant is not None and grant.client == client else None

    def use(self, slots: Sequence[int]) -> None:
        """End grants because their blocks are committed now."""
        self._end(slots)
        self.is_used[slots] = True
        self.used += len(slots)

    def give_back(self, slots: Iterable[int]) -> None:
        """End grants without a block; the slots are free again."""
        slots = list(slots)
        self._end(slots)
        self._free(slots)

    def give_up(self, slots: Sequence[int]) -> None:
        """End grants of blocks that were written, or may have been, and are not committed."""
        self.written_in_vain += len(slots)
        self.give_back(slots)

    def release(self, client: int, slots: Iterable[int]) -> list[int]:
        """End grants of a client; return those of the slots that were its own."""
        own = [slot for slot in dict.fromkeys(slots) if self.grant_of(slot, client)]
        self.give_back(own)
        return own

    def unuse(self, slots: Sequence[int]) -> None:
        """Free slots whose blocks are removed from index and presence table."""
        if not len(slots):
            return
        assert bool(self.is_used[slots].all()), "only a used slot loses its block"
        self.is_used[slots] = False
        self.used -= len(slots)
        self._free(slots)

    def end_client(self, client: int) -> None:
        """Free all slots granted to a client."""
        self.give_up([slot for slot, grant in self._grants.items() if grant.client == client])

    def clear(self) -> None:
        """Free every used slot; grants stay until their nodes end them."""
        self.is_used[:] = False
        self.used = 0
        self._pools = [ExtentPool() for _ in range(self.paths)]
        for number in sorted(self.segments):
            self._free_unused(number)

    def _free_unused(self, number: int) -> None:
        first, end = self.bounds(number)
        is_free = ~self.is_used[first:end]
        is_free[[slot - first for slot in self._grants if first <= slot < end]] = False
        pool = self._pools[number % self.paths]
        for start, length in runs(is_free):
            pool.free(first + start, length)

    def _end(self, slots: Iterable[int]) -> None:
        for slot in slots:
            del self._grants[slot]

    def _free(self, slots: Sequence[int]) -> None:
        """Free slots by runs. Those of segments that are set aside or left out are forgotten."""
        ascending = sorted(slots)
        for begin, end in slot_runs(ascending, self.slots_per_segment):
            number = ascending[begin] // self.slots_per_segment
            if number in self.segments:
                self._pools[number % self.paths].free(ascending[begin], end - begin)
