"""Hits of one scheduler step, and the slot in which the next hit is likely.

A prefix is stored into adjacent slots, in order. After a hit, the next block is therefore expected
in the next slot. Comparing its hash with that slot's is cheaper than a search of the dictionary,
and its cost does not grow with the tier. The hits of such a run are recorded by its two ends only.

The scheduler's thread writes these objects. A background thread may read them under the manager's
lock while no request is asking.
"""

from __future__ import annotations

from ..tiers.base import BlockHash


class Answers:
    """Hits and misses of the lookups of one step.

    The adapter of vLLM inlines the hit in a run: if `ready_at[at]` equals the hash, the block is a
    hit, and `at` grows by one.
    """

    __slots__ = ("_hits", "_mark", "_nowhere", "_start", "at", "misses", "ready_at")

    def __init__(self, ready_at: list[BlockHash] | None) -> None:
        """For `ready_at` see `CachePolicy`. If it is None, every hit is searched."""
        self.ready_at: list[BlockHash] = [BlockHash(b"")] if ready_at is None else ready_at
        """Hash of the ready block in each slot. An empty hash means no block; the last entry is
        always empty."""
        self._nowhere = len(self.ready_at) - 1
        self.at = self._nowhere
        """Slot after the slot of the last hit."""
        self.misses = 0
        """Number of misses that the counters do not contain yet."""
        self._start = self._nowhere
        self._hits: list[BlockHash] = []
        self._mark = 0

    def begin(self) -> None:
        """Start the lookups of another request."""
        self._end_run()
        self._mark = len(self._hits)

    def hit(self, block_hash: BlockHash, slot: int | None = None) -> None:
        """Record a hit found by a search. If its slot is given, a run begins behind it."""
        self._end_run()
        self._hits.append(block_hash)
        if slot is not None:
            self.at = self._start = min(slot + 1, self._nowhere)

    def _end_run(self) -> None:
        if self.at > self._start:
            self._hits += self.ready_at[self._start : self.at]
        self.at = self._start = self._nowhere

    def hits(self) -> list[BlockHash]:
        """Return all hits of this step. These blocks must stay until the step ends."""
        return [*self._hits, *self.ready_at[self._start : self.at]]

    def of_request(self) -> list[BlockHash]:
        """Return the hits since `begin`, and end the run: the next block is searched."""
        self._end_run()
        return self._hits[self._mark :]

    def clear(self) -> None:
        """End the step: forget its hits."""
        self.at = self._start = self._nowhere
        self._hits.clear()
        self._mark = 0
