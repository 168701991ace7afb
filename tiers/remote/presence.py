"""Known presence of blocks in a remote tier, and the search for the rest of a chain."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import islice
from typing import Any

from ..base import BlockHash

HELD_S = 30.0
"""Time for which a block that was there counts as held."""
ABSENT_S = 5.0
"""Time for which a block that was absent is not asked for again."""
WAYS = 8
"""A search splits the open part of a chain into so many parts at a time."""
MAX_REMEMBERED = 1 << 17
"""Limit on the blocks whose presence is remembered."""


class Presence(Enum):
    """Knowledge about one block."""

    HELD = "held"
    ABSENT = "absent"
    UNKNOWN = "unknown"


HELD, ABSENT, UNKNOWN = Presence.HELD, Presence.ABSENT, Presence.UNKNOWN
"""The members, for lookups: an attribute of an enum costs 75 ns with Python 3.11."""


def drop_oldest(known: dict[BlockHash, Any]) -> None:
    """Remove the entries that came first, until `MAX_REMEMBERED` are left."""
    excess = len(known) - MAX_REMEMBERED
    for key in [*islice(known, excess)] if excess > 0 else ():
        del known[key]


def _renew(known: dict[BlockHash, float], key: BlockHash, value: float) -> None:
    """Set a value, and put it behind the others."""
    known.pop(key, None)
    known[key] = value


class PresenceMemory:
    """Answers of the last seconds. Any thread; a look takes no lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self.until: dict[BlockHash, float] = {}
        """Time until which an answer counts; negative for an absent block. Oldest answers first.
        Always the same dictionary. `RemoteTier.may_hold` reads it as `of` does."""
        self._arrived_s: dict[BlockHash, float] = {}
        """Time of the last write of a block, whether it was there before or not; oldest first."""
        self.epoch = 0
        """Grows with `clear`. An answer that was asked for in an earlier epoch is not kept."""

    def of(self, key: BlockHash) -> Presence:
        """Return what is known of a block."""
        until_s = self.until.get(key)
        if until_s is None:
            return UNKNOWN
        now_s = self._clock()
        return HELD if until_s >= now_s else ABSENT if -until_s >= now_s else UNKNOWN

    def last(self, key: BlockHash) -> Presence:
        """Return the last answer about a block, however old."""
        until_s = self.until.get(key)
        if until_s is None:
            return UNKNOWN
        return HELD if until_s > 0 else ABSENT

    def was_there(self, key: BlockHash) -> bool:
        """Return True if the last answer, or a write since, was that the block is there."""
        return self.last(key) is HELD or key in self._arrived_s

    def note(self, epoch: int, held: Iterable[BlockHash], absent: Iterable[BlockHash]) -> None:
        """Remember answers that were asked for in `epoch`."""
        now_s = self._clock()
        with self._lock:
            if epoch != self.epoch:
                return
            for key in held:
                _renew(self.until, key, now_s + HELD_S)
            for key in absent:
                _renew(self.until, key, -(now_s + ABSENT_S))
                self._arrived_s.pop(key, None)
            drop_oldest(self.until)

    def note_arrivals(self, epoch: int, keys: Sequence[BlockHash]) -> None:
        """Remember that blocks are there: they were written, or were there already, in `epoch`."""
        self.note(epoch, keys, ())
        now_s = self._clock()
        with self._lock:
            if epoch != self.epoch:
                return
            for key in keys:
                _renew(self._arrived_s, key, now_s)
            drop_oldest(self._arrived_s)

    def arrived_s(self, key: BlockHash) -> float:
        """Return the time of the last write of a block that was not found absent since; minus
        infinity without one. Answers about many other blocks do not push it out."""
        return self._arrived_s.get(key, -math.inf)

    def forget(self) -> None:
        """Forget all answers. Times of writes stay: a failure of the server makes none older."""
        with self._lock:
            self.until.clear()

    def forget_all(self) -> None:
        """Forget answers and times of writes; what is being written stays wanted."""
        with self._lock:
            self.until.clear()
            self._arrived_s = {}

    def clear(self) -> None:
        """Forget everything; answers on their way are not kept either."""
        with self._lock:
            self.epoch += 1
        self.forget_all()


class ChainSearch:
    """Search for the end of the part of a prefix chain that is there.

    Blocks are written head first, so the first absent one ends the useful part. The first block
    that is not known is asked for alone: a prompt that nobody had costs one request. Then up to
    `WAYS` blocks that divide the open part are asked for at a time.
    """

    def __init__(self, length: int) -> None:
        """`length`: number of blocks, at least 1."""
        self._length = length
        self._is_new = True
        self._low = -1
        """Last block that is there; -1: none is known."""
        self._high = length
        """First block that is absent; `length`: none is known."""

    @property
    def held(self) -> int:
        """Number of blocks that are there, from the first one on, as far as is known."""
        return self._low + 1

    def probes(self) -> list[int]:
        """Return the blocks to ask for next; none if the end is known."""
        first, last = self._low + 1, self._high - 1
        if first > last:
            return []
        if self._is_new:
            return [first]
        if self._high == self._length:  # the last one may be there: then no other is asked for
            parts = min(WAYS, last - first + 1)
            step = (last - self._low) / parts
            return sorted({self._low + round(step * i) for i in range(1, parts + 1)})
        gaps = min(WAYS, self._high - self._low)
        step = (self._high - self._low) / gaps
        return sorted({self._low + round(step * i) for i in range(1, gaps)})

    def learn(self, is_there: Mapping[int, bool]) -> None:
        """Take the answers to `probes`."""
        self._is_new = False
        absent = [block for block, there in is_there.items() if not there]
        self._high = min([self._high, *absent])
        below = [block for block, there in is_there.items() if there and block < self._high]
        self._low = max([self._low, *below])
