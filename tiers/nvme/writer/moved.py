"""Names of blocks that arrived or left without the manager's action, for events.

Another process may reset the namespace, and segments change owners. An emptied index no longer
tells which block lay where. The slot records do, until they are rewritten. They are read on an I/O
thread, one batch whenever the previous one was taken. A record that was overwritten meanwhile names
a block that is stored now, so the consumer of names must check.

Bounded: names that are not taken are dropped, oldest first. None are kept before the first call of
`take`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt

from ...base import BlockHash, Moved
from ..segments.segment_files import SegmentSet

BATCH_BLOCKS = 512
MAX_BATCHES = 1024
"""Largest number of batches of names that wait to be taken."""
MAX_LOSSES = 4
"""Largest number of slot sets that wait to be named; each is at most the whole tier."""

Slots = npt.NDArray[np.int64]


class MovedBlocks:
    """Blocks to report as arrived or removed.

    `note_lost` and `take` belong to the manager's thread; any thread may call `add`.
    """

    def __init__(self, segments: SegmentSet, executor: Executor) -> None:
        """`executor` reads the records."""
        self.is_wanted = False
        """True once `take` has been called."""
        self._segments = segments
        self._executor = executor
        self._named: deque[Moved] = deque(maxlen=MAX_BATCHES)
        self._lost: deque[Slots] = deque(maxlen=MAX_LOSSES)
        self._is_naming = False

    def note_lost(self, slots: Slots) -> None:
        """Queue slots of open segments whose blocks are no longer in the tier."""
        if self.is_wanted and len(slots):
            self._lost.append(slots)

    def add(self, block_hashes: Sequence[BlockHash], *, removed: bool) -> None:
        """Queue blocks that arrived, or left if `removed`."""
        if self.is_wanted:
            for start in range(0, len(block_hashes), BATCH_BLOCKS):
                batch = list(block_hashes[start : start + BATCH_BLOCKS])
                self._named.append(Moved(batch, removed))

    def take(self) -> Moved | None:
        """Return the next batch; None if there is none, or if it has yet to be read."""
        self.is_wanted = True
        if self._lost and not self._is_naming:
            slots = self._lost.popleft()
            if len(slots) > BATCH_BLOCKS:
                self._lost.appendleft(slots[BATCH_BLOCKS:])
            self._name_later(slots[:BATCH_BLOCKS])
        return self._named.popleft() if self._named else None

    def _name_later(self, slots: Slots) -> None:
        self._is_naming = True
        try:
            self._executor.submit(self._name, slots)
        except RuntimeError:  # the executor is shutting down
            self._is_naming = False

    def _name(self, slots: Slots) -> None:
        try:
            records = map(self._segments.record, slots.tolist())
            self.add([BlockHash(r.key) for r in records if r is not None], removed=True)
        finally:
            self._is_naming = False
