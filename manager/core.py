"""State that all parts of the manager share: options, first tier, port, events, numbers of jobs.

Used under the manager's lock only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..config.schema import OnReset, WriteMode
from ..tiers.base import BlockHash, BlockStatus, Pairs
from .admission import PastUses
from .base import BlockEvent
from .below.port import Below, Ended
from .counters import Counters
from .first_tier import FirstTier, Tier

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

OnTransfer = Callable[[str, Ended, float], None]
"""Function that receives each job between the first tier and a tier below when it has ended: the
name of the tier below, the outcome, and the time at which it began on the manager's clock. It is
called under the manager's lock by the scheduler's thread or the ticker, and must not wait."""


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """Behaviour of the cascade."""

    write_mode: WriteMode = WriteMode.DEMOTE
    on_reset: OnReset = OnReset.INVALIDATE
    low_watermark: float = 0.4
    """Share of the first tier whose coldest slots are clean before demotion starts."""
    high_watermark: float = 0.5
    """Share of the first tier whose coldest slots are clean after demotion."""
    dirty_age_s: float = 5.0
    """Seconds after its store at which a dirty block is written, with the write mode "back"."""
    promotion_budget_slots: int | None = None
    """Slots of the first tier that promotions may take or hold. None: the clean slots without a
    reserve, but at least half of all slots."""
    promotion_deadline_s: float = 10.0
    """Seconds without progress after which a promotion is late and its blocks are misses."""
    load_or_recompute: bool = True
    """True: promote blocks only if that is expected to be faster than computing them again."""
    prefill_tokens_per_s: float | None = None
    """Prefill speed; None: it is measured."""
    tokens_per_block: float = 0.0
    """Number of tokens that a block holds; 0: unknown, and every block is promoted."""
    served_end: bytes = b""
    """Last bytes of the hashes of those blocks by which tokens are counted; empty: all blocks."""
    offered_once: tuple[bytes, ...] = ()
    """Last bytes of the hashes of blocks that the engine offers only once, whatever the result."""
    shutdown_flush_s: float = 20.0
    steps_until_flushed: int = 4
    """Number of steps after a reset until every worker has finished its earlier transfers. It does
    not matter to an engine that calls `on_reset_flushed`."""
    waits_for_stores: bool = True
    """True: a block that a worker is storing is pending. False: it is a miss, because the engine
    reports stores only at the end of their request."""
    with_events: bool = True
    on_transfer: OnTransfer | None = None


class ManagerCore:
    """Options, first tier, port, counters, events; `tickets` numbers the jobs at the port."""

    def __init__(
        self,
        tier: Tier,
        below: Below,
        clock: Clock,
        past: PastUses | None,
        options: ManagerOptions,
    ) -> None:
        """`past` is for the `UseCounts` of the first tier."""
        self.below = below
        self.clock = clock
        self.options = options
        self.with_events = options.with_events
        self.is_single = not below.tiers
        """True if the first tier is the only one."""
        self.top = FirstTier(tier, self.is_single, self._note_evicted, past)
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
