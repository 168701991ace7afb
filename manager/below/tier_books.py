"""Shared state of one tier below: its blocks, events, lost keys and counters.

The reads and the writes of the tier share it (`TierReads`, `TierWrites`). Used under the manager's
lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ...handlers.base import OffloadingHandler, TransferResult, TransferSpec
from ...tiers.base import BlockHash, BlockOutcome, BlockStatus
from ...tiers.breaker import Breaker
from ..admission import PastUses
from ..base import BlockEvent
from ..counters import Departures, LinkCounters
from ..level import Level, Pairs, Tier, Transfer

MAX_MOVED_BLOCKS = 512
"""Number of blocks per tier and step that other processes moved and that become events."""


@dataclass(slots=True)
class TierJob(Transfer):
    """One transfer between slots of the tier and slots above it."""

    keys: Sequence[BlockHash] = ()
    """Every requested key, including keys of blocks that the tier lacks."""


class Way:
    """Transfers in one direction: the handler, the breaker, and the jobs in flight."""

    def __init__(self, handler: OffloadingHandler, breaker: Breaker) -> None:
        self.handler = handler
        self.breaker = breaker
        self.jobs: dict[int, TierJob] = {}

    def start(self, job: TierJob, spec: TransferSpec) -> bool:
        """Start a transfer. Return False if the handler refuses it."""
        if not self.handler.transfer_async(job.ticket, spec):
            return False
        self.jobs[job.ticket] = job
        self.breaker.started()
        return True

    def finished(self) -> Iterator[tuple[TierJob, TransferResult]]:
        """Yield the transfers that ended; afterwards the breaker checks the clock."""
        if not self.jobs:
            return
        for result in self.handler.get_finished():
            job = self.jobs.pop(result.job_id, None)
            if job is not None:
                yield job, result
        self.breaker.look_at_clock()

    def wait(self, tickets: set[int], limit_s: float) -> None:
        """Wait for those of these transfers that go in this direction."""
        mine = tickets & self.jobs.keys()
        if mine:
            self.handler.wait(mine, limit_s)


@dataclass(slots=True)
class TierBooks:
    """Shared state of one tier."""

    tier: Tier
    is_last: bool
    clock: Callable[[], float]
    counters: LinkCounters
    events: list[BlockEvent] | None
    """Events not taken yet; None if the engine uses no events."""
    past: PastUses | None = None
    """Use counts of refused blocks, for `UseCounts`."""
    departures: Departures = field(default_factory=Departures)
    lost: list[BlockHash] = field(default_factory=list)
    """Keys of blocks that left the tier, for the tiers above that hold these blocks."""
    level: Level = field(init=False)

    def __post_init__(self) -> None:
        self.level = Level(self.tier, self.is_last, self._note_evicted, self.past)

    def emit(self, block_hashes: Sequence[BlockHash], removed: bool) -> None:
        """Add an event for blocks that were stored in the tier or removed from it."""
        if self.events is not None and block_hashes:
            level = self.level
            event = BlockEvent(tuple(block_hashes), level.medium, removed, level.name)
            self.events.append(event)

    def emit_moved(self) -> None:
        """Add events for blocks that other processes stored or removed, one batch each."""
        if self.events is not None:
            came, left = self.level.take_moved(MAX_MOVED_BLOCKS)
            self.emit(left, removed=True)
            self.emit(came, removed=False)

    def remove_bad(self, block_hash: BlockHash, status: BlockStatus) -> None:
        """Remove a block that is gone or damaged."""
        if self.level.owns(block_hash):
            self.emit([block_hash], removed=True)
        self.level.drop(block_hash, status)
        self.lost.append(block_hash)

    def forget(self, jobs: Sequence[Transfer], *, is_own: bool) -> None:
        """Forget every block, after a reset of the tier.

        Slots of transfers in flight stay in use; the last transfer that uses a slot frees it.
        """
        if not is_own and self.events is not None:
            self.level.note_loss()
        users = Counter(status.block_id for job in jobs for status in job.statuses)
        self.level.empty(users)
        for job in jobs:
            job.is_orphan = True
        self.lost.clear()
        if is_own and self.events is not None:
            self.events.clear()  # a reset reports no single blocks

    def _note_evicted(self, evicted: Pairs) -> None:
        hashes = [block_hash for block_hash, _ in evicted]
        self.departures.evicted_blocks += len(hashes)
        if not self.is_last:
            lost = sum(self.level.dirt.is_dirty(status.block_id) for _, status in evicted)
            self.departures.lost_dirty_blocks += lost
        self.emit(hashes, removed=True)
        self.lost += hashes


def outcomes_of(result: TransferResult, n: int) -> Sequence[BlockOutcome]:
    """Return the outcome of each of the `n` blocks of a transfer."""
    if result.outcomes:
        return result.outcomes
    return [BlockOutcome.OK if result.success else BlockOutcome.IO_ERROR] * n
