"""State that all parts of the manager share: the first tier, the port, events, numbers of jobs.

Used under the manager's lock only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from ..tiers.base import BlockHash, BlockStatus, Pairs
from .admission import PastUses
from .base import BlockEvent
from .below.port import Below
from .counters import Counters
from .level import Level, Tier

Clock = Callable[[], float]
"""Monotonic seconds."""

BATCH_BYTES = 32 << 20
"""Target size of a job: large enough for vectored calls, small enough for several jobs to overlap.
"""
MAX_BATCH_BLOCKS = 512
MAX_JOBS_IN_FLIGHT = 4
"""Largest number of jobs in flight for each tier and direction."""
MAX_EVENT_BLOCKS = 512
"""Most blocks lost by a reset of another engine that one step turns into events. The same limit
holds for blocks that an earlier engine left."""


class Flow:
    """The first tier, the port, events, and `tickets`: the numbers of jobs."""

    def __init__(
        self,
        tier: Tier,
        below: Below,
        clock: Clock,
        past: PastUses | None,
        *,
        with_events: bool,
    ) -> None:
        """`past` is for the `UseCounts` of the first tier."""
        self.below = below
        self.clock = clock
        self.with_events = with_events
        self.is_single = not below.tiers
        """True if the first tier is the only one."""
        self.top = Level(tier, self.is_single, self._note_evicted, past)
        names = (tier.name, *(facts.name for facts in below.tiers))
        self.counters = Counters.for_tiers(names, below.links)
        self.tickets = itertools.count(1)
        self.events: list[BlockEvent] = []
        self.evicted: list[BlockHash] = []
        """Hashes evicted from the first tier since the last store."""
        self._adopted: list[BlockHash] = []
        """Hashes of blocks that an earlier engine left, not yet reported as events."""

    def adopt(self, block_hashes: Sequence[BlockHash], statuses: Sequence[BlockStatus]) -> None:
        """Insert complete blocks that an earlier engine left in the first tier."""
        self.top.adopt(block_hashes, statuses)
        if self.with_events:
            self._adopted += block_hashes

    def emit(self, block_hashes: Sequence[BlockHash], removed: bool) -> None:
        """Record an event: blocks were stored in the first tier or removed from it."""
        if self.with_events and block_hashes:
            event = BlockEvent(tuple(block_hashes), self.top.medium, removed, self.top.name)
            self.events.append(event)

    def take_events(self) -> list[BlockEvent]:
        """Return the events since the last call, in order."""
        if self.with_events:
            self.emit(self.top.take_loss(MAX_EVENT_BLOCKS), removed=True)
            self.emit(self._take_adopted(MAX_EVENT_BLOCKS), removed=False)
        self.collect_events()
        events, self.events = self.events, []
        return events

    def collect_events(self) -> None:
        """Collect the events of the tiers below."""
        if self.with_events:
            self.events += self.below.take_events()

    def _take_adopted(self, limit: int) -> list[BlockHash]:
        """Return the next batch of adopted blocks. Leave out those that left the first tier."""
        batch = self._adopted[-limit:]
        del self._adopted[-limit:]
        found = zip(batch, self.top.policy.get_many(batch), strict=True)
        return [h for h, status in found if status is not None and status.ref_cnt >= 0]

    def _note_evicted(self, evicted: Pairs) -> None:
        hashes = [block_hash for block_hash, _ in evicted]
        self.counters.top_evicted_blocks += len(hashes)
        self.emit(hashes, removed=True)
        self.evicted += hashes
        if not self.is_single:
            dirty, may_hold = self.top.dirt.dirty, self.below.may_hold
            self.counters.dropped_dirty_blocks += sum(
                dirty[status.block_id] and not may_hold(block_hash)
                for block_hash, status in evicted
            )
            self.below.touch(hashes[::-1])


def batch_blocks(block_size: int) -> int:
    """Return the number of blocks of this size in one job."""
    return max(1, min(MAX_BATCH_BLOCKS, BATCH_BYTES // block_size))
