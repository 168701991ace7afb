"""What came to the tier, or left it, without the manager's doing: names, for events.

Another process may reset the namespace, and segments change hands. An index that was emptied says
no more what lay where, but the records of the slots do until they are written again: they are read
on an I/O thread, a batch whenever the one before was taken. A record that was overwritten meanwhile
names a block that is here: whoever takes names must look.

Bounded: names that nobody takes for long are dropped, the oldest first, and none are kept before
somebody asked for the first time.
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
"""Of names that wait to be taken."""
MAX_LOSSES = 4
"""Of sets of slots that wait to be named; each is at most the whole tier."""

Slots = npt.NDArray[np.int64]


class MovedBlocks:
    """`note_lost` and `take` belong to the manager's thread, `add` to any."""

    def __init__(self, segments: SegmentSet, executor: Executor) -> None:
        """`executor` reads the records."""
        self.is_wanted = False
        """True once somebody asked."""
        self._segments = segments
        self._executor = executor
        self._named: deque[Moved] = deque(maxlen=MAX_BATCHES)
        self._lost: deque[Slots] = deque(maxlen=MAX_LOSSES)
        self._is_naming = False

    def note_lost(self, slots: Slots) -> None:
        """What lies in these slots of open segments is not in the tier any more."""
        if self.is_wanted and len(slots):
            self._lost.append(slots)

    def add(self, block_hashes: Sequence[BlockHash], *, removed: bool) -> None:
        """These blocks came, or left."""
        if self.is_wanted:
            for start in range(0, len(block_hashes), BATCH_BLOCKS):
                batch = list(block_hashes[start : start + BATCH_BLOCKS])
                self._named.append(Moved(batch, removed))

    def take(self) -> Moved | None:
        """The next batch; None if there is none, or if it has yet to be read."""
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
