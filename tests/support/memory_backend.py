"""`MemoryBackend`: a tier in ordinary memory, the twin of every real backend in tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcascade.errors import NoSpaceError
from kvcascade.tiers.base import (
    NOT_READY,
    Backend,
    BlockHash,
    BlockStatus,
    RefCounts,
)


class MemoryBackend(Backend):
    """Slots in one bytearray. Adjacent where possible: the lowest free slots go first."""

    def __init__(self, block_size: int, capacity: int, medium: str = "MEMORY") -> None:
        super().__init__(block_size, medium, capacity)
        self.data = bytearray(block_size * capacity)
        table = (BlockStatus * capacity)(*(BlockStatus(0, slot) for slot in range(capacity)))
        self._statuses = list(table)
        self._ref_counts: RefCounts = np.frombuffer(memoryview(table), np.int32)[::2]
        self._free = set(range(capacity))
        self.is_overtaken = False
        """Set it to play another process that resets the tier."""

    @property
    def ref_counts(self) -> RefCounts:
        return self._ref_counts

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def allocate_blocks(self, block_hashes: Sequence[BlockHash]) -> list[BlockStatus]:
        if len(block_hashes) > len(self._free):
            raise NoSpaceError(
                f"{len(block_hashes)} slots asked for, {len(self._free)} free; evict first"
            )
        slots = sorted(self._free)[: len(block_hashes)]
        self._free.difference_update(slots)
        statuses = [self._statuses[slot] for slot in slots]
        for status in statuses:
            status.ref_cnt = NOT_READY
        return statuses

    def free(self, status: BlockStatus) -> None:
        assert status.block_id not in self._free, "a slot may be freed only once"
        status.ref_cnt = 0
        self._free.add(status.block_id)

    def reset(self) -> list[BlockStatus]:
        used = (s for s in self._statuses if s.block_id not in self._free)
        busy = [status for status in used if status.ref_cnt != 0]
        self._free = set(range(self.capacity)) - {status.block_id for status in busy}
        return busy

    def view(self, slot: int) -> memoryview:
        """The bytes of one slot, writable."""
        start = slot * self.block_size
        return memoryview(self.data)[start : start + self.block_size]
