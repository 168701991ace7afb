"""The hits that were answered in a step, and where the next one is likely to be.

A prefix is stored into adjacent slots, in order, so the hit on one block says where the next one
lies: comparing a hash with the one in that slot is cheaper than looking it up, and costs no more in
a tier of a million blocks. Such hits are not noted one by one: a run is known by its ends.

Written by the scheduler's thread. A background thread may read it under the manager's lock, if no
request is asking at that time.
"""

from __future__ import annotations

from ..tiers.base import BlockHash


class Answers:
    """What lookups answered in this step. The adapter of vLLM inlines the hit in a run:

    if `ready_at[at]` equals the hash, add one to `at`, and it is a hit.
    """

    __slots__ = ("_hits", "_mark", "_nowhere", "_start", "at", "misses", "ready_at")

    def __init__(self, ready_at: list[BlockHash] | None) -> None:
        """`ready_at`: see `CachePolicy`; without it every hit is looked up."""
        self.ready_at: list[BlockHash] = [BlockHash(b"")] if ready_at is None else ready_at
        """An empty hash, in the last place too, stands for no block."""
        self._nowhere = len(self.ready_at) - 1
        self.at = self._nowhere
        """The slot after that of the last hit."""
        self.misses = 0
        """Misses that were answered and not counted yet."""
        self._start = self._nowhere
        self._hits: list[BlockHash] = []
        self._mark = 0

    def begin(self) -> None:
        """The lookups that follow are another request's."""
        self.leave_run()
        self._mark = len(self._hits)

    def hit(self, block_hash: BlockHash, next_slot: int | None = None) -> None:
        """A hit that was looked up; a run begins if the slot after it is given."""
        self.leave_run()
        self._hits.append(block_hash)
        if next_slot is not None:
            self.at = self._start = min(next_slot, self._nowhere)

    def leave_run(self) -> None:
        """The next block is looked up, wherever it lies."""
        if self.at > self._start:
            self._hits += self.ready_at[self._start : self.at]
        self.at = self._start = self._nowhere

    def hits(self) -> list[BlockHash]:
        """All hits of this step; they stay until its end."""
        return [*self._hits, *self.ready_at[self._start : self.at]]

    def of_request(self) -> list[BlockHash]:
        """Those since `begin`."""
        return [*self._hits[self._mark :], *self.ready_at[self._start : self.at]]

    def clear(self) -> None:
        """The step is over."""
        self.at = self._start = self._nowhere
        self._hits.clear()
        self._mark = 0
