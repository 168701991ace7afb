"""Allocation of the CPU tier's slots.

The statuses are views over one C array, created once. `ref_counts` is the same memory as a numpy
array, so a scan over all blocks is one vector operation. The manager's thread owns the backend.

An allocation takes the slots that were freed last, because their memory is warm in caches. It
returns them in ascending order. A larger allocation sorts freed slots first. Blocks that are
transferred together then lie next to each other and move as one piece.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from ...errors import NoSpaceError
from ..base import (
    NOT_READY,
    Backend,
    BlockHash,
    BlockStatus,
    RefCounts,
    slot_of,
)

SORT_FROM_BLOCKS = 4
"""Allocations of at least this many blocks sort free slots first, to get adjacent ones."""
SORT_WINDOW_FACTOR = 4
"""Free slots sorted per block of such an allocation."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the garbage collector.

    Use it while creating millions of objects of which none is garbage: collections would take most
    of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CpuBackend(Backend):
    """Allocates slots of the CPU arena. Its medium is `"CPU"`."""

    def __init__(self, block_size: int, capacity: int) -> None:
        """Create a backend of `capacity` slots of `block_size` bytes."""
        super().__init__(block_size, "CPU", capacity)
        table = (BlockStatus * capacity)()
        fields = np.frombuffer(memoryview(table), np.int32).reshape(capacity, 2)
        fields[:, 1] = np.arange(capacity, dtype=np.int32)
        self._ref_counts: RefCounts = fields[:, 0]
        with collector_paused():
            self._statuses = list(table)
        self._taken = bytearray(capacity)
        self._taken_flags: npt.NDArray[np.uint8] = np.frombuffer(self._taken, dtype=np.uint8)
        self._free = list(range(capacity - 1, -1, -1))
        self._unsorted = False

    @property
    def ref_counts(self) -> RefCounts:
        return self._ref_counts

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def allocate_blocks(self, block_hashes: Sequence[BlockHash]) -> list[BlockStatus]:
        n = len(block_hashes)
        free = self._free
        if n > len(free):
            raise NoSpaceError(
                f"{n} CPU slots were asked for, {len(free)} of {self.capacity} are free; "
                f"evict first or raise the capacity of the cpu tier"
            )
        if n == 0:
            return []
        if self._unsorted and n >= SORT_FROM_BLOCKS:
            self._sort_tail(n * SORT_WINDOW_FACTOR)
        slots = free[-n:]
        del free[-n:]
        slots.sort()
        statuses, taken = self._statuses, self._taken
        allocated = list(map(statuses.__getitem__, slots))
        for status in allocated:
            status.ref_cnt = NOT_READY
        for slot in slots:
            taken[slot] = 1
        return allocated

    def adopt(self, slots: Sequence[int]) -> list[BlockStatus]:
        """Allocate these free slots. An earlier engine left complete blocks in them."""
        adopted = set(slots)
        self._free = [slot for slot in self._free if slot not in adopted]
        self._taken_flags[list(slots)] = 1
        return [self._statuses[slot] for slot in slots]

    def free(self, status: BlockStatus) -> None:
        slot = status.block_id
        assert self._taken[slot], f"slot {slot} was freed twice"
        self._taken[slot] = 0
        status.ref_cnt = 0
        self._free.append(slot)
        self._unsorted = True

    def free_many(self, statuses: Sequence[BlockStatus]) -> None:
        slots = list(map(slot_of, statuses))
        taken = self._taken
        for slot in slots:
            assert taken[slot], f"slot {slot} was freed twice"
            taken[slot] = 0
        self._ref_counts[slots] = 0
        self._free += slots
        self._unsorted = True

    def reset(self) -> list[BlockStatus]:
        is_busy = (self._taken_flags != 0) & (self._ref_counts != 0)
        self._taken_flags[:] = is_busy
        self._free = np.flatnonzero(~is_busy)[::-1].tolist()
        self._unsorted = False
        return [self._statuses[slot] for slot in np.flatnonzero(is_busy).tolist()]

    def _sort_tail(self, window: int) -> None:
        """Sort the free slots at the end, which are allocated next, in descending order."""
        tail = self._free[-window:]
        tail.sort(reverse=True)
        self._free[-window:] = tail
        self._unsorted = len(tail) < len(self._free)
