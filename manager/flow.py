"""What demotion and promotion share: the chain of tiers, jobs in flight, events and counters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..handlers.base import OffloadingHandler, TransferResult
from ..tiers.base import BlockHash, BlockOutcome, BlockStatus
from .base import BlockEvent
from .breaker import Breaker
from .counters import Counters
from .level import Level, Pairs

Clock = Callable[[], float]
"""Monotonic seconds."""

BATCH_BYTES = 32 << 20
"""Aim for this much per job: large vectored calls, yet several jobs to overlap."""
MAX_BATCH_BLOCKS = 512
MAX_JOBS_IN_FLIGHT = 4
"""Per link and direction."""
STALLED_S = 15.0
"""Transfers one way are under way, and none ends for so long: that counts as a failure."""
NOT_WANTED = (
    BlockOutcome.HELD,
    BlockOutcome.GONE,
    BlockOutcome.CORRUPT,
    BlockOutcome.REFUSED,
)
"""Of a write: the block is below already, from before a reset of the tier there, was found damaged
in the tier above, or was tried several times where others keep the room. Nothing failed there, and
trying again is of no use."""
WRITTEN = frozenset({BlockOutcome.OK, *NOT_WANTED})
"""Of a write: everything but failures."""
SILENCE = frozenset({BlockOutcome.IO_ERROR, BlockOutcome.NO_SPACE})
"""Of a read: what the device says when it fails; everything else is about the block."""
MAX_MOVED_BLOCKS = 512
"""Per tier and step: blocks that moved without the manager's doing and become events."""


@dataclass(frozen=True, slots=True)
class Link:
    """The two handlers between neighbouring tiers."""

    down: OffloadingHandler
    up: OffloadingHandler


@dataclass(slots=True)
class Job:
    """Blocks on their way between two levels. Sources are pinned until the job ends."""

    job_id: int
    source_level: int
    target_level: int
    hashes: list[BlockHash]
    sources: list[BlockStatus]
    targets: list[BlockStatus]
    created_s: float
    """On the manager's clock."""
    is_late: bool = False
    """True once nobody waits for it any more, since it took too long."""
    reset_levels: int = 0
    """So many levels, from the top, were reset meanwhile: nothing is kept of this job."""

    @property
    def is_orphan(self) -> bool:
        """True if an end of this job was reset."""
        return self.reset_levels > 0

    def orphan(self, levels: int) -> bool:
        """So many levels, from the top, are reset; False if that does not concern this job."""
        if min(self.source_level, self.target_level) >= levels:
            return False
        self.reset_levels = max(self.reset_levels, levels)
        return True

    def ends(self) -> Iterator[tuple[int, BlockStatus]]:
        """Every slot this job uses, with its level."""
        for status in self.sources:
            yield self.source_level, status
        for status in self.targets:
            yield self.target_level, status


@dataclass(slots=True)
class Flow:
    """The chain and its books. Used under the manager's lock only."""

    levels: list[Level]
    links: list[Link]
    clock: Clock
    counters: Counters
    events: list[BlockEvent] = field(default_factory=list)
    job_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    with_events: bool = True
    writes: list[Breaker] = field(init=False)
    """Per level: opens when it fails to take blocks, or is full."""
    clean_ahead: Callable[[int, int], bool] = lambda level, n: False
    """`clean_ahead(level, n)`: write `n` more of a level's coldest blocks down; True if clean slots
    are on their way."""

    def __post_init__(self) -> None:
        self.writes = [Breaker(self.clock, STALLED_S, failures_to_open=1) for _ in self.levels]

    def emit(self, block_hashes: Sequence[BlockHash], level: Level, removed: bool) -> None:
        """Note that blocks came to or left a level."""
        if self.with_events and block_hashes:
            self.events.append(BlockEvent(tuple(block_hashes), level.medium, removed, level.name))

    def emit_moved(self) -> None:
        """Note what came to the levels or left them without the manager's doing, a batch each."""
        if not self.with_events:
            return
        for level in self.levels:
            came, left = level.take_moved(MAX_MOVED_BLOCKS)
            self.emit(left, level, removed=True)
            self.emit(came, level, removed=False)

    def on_evicted(self, index: int, evicted: Pairs) -> None:
        """Books of an eviction at `index`: events, recency below, dirt above."""
        level = self.levels[index]
        hashes = [block_hash for block_hash, _ in evicted]
        self.counters.evicted_blocks[index] += len(evicted)
        self.emit(hashes, level, removed=True)
        if not level.is_last:
            lost = sum(level.is_dirty(status.block_id) for _, status in evicted)
            self.counters.dropped_dirty_blocks += lost
            self.levels[index + 1].policy.touch(reversed(hashes))
        for above in self.levels[:index]:
            self._mark_dirty_again(above, hashes)

    def lost_below(self, index: int, block_hash: BlockHash) -> None:
        """A block of level `index` turned out to be gone or damaged: whoever is above is dirty."""
        for above in self.levels[:index]:
            self._mark_dirty_again(above, [block_hash])

    @staticmethod
    def _mark_dirty_again(above: Level, hashes: Sequence[BlockHash]) -> None:
        found = (above.policy.get(block_hash) for block_hash in hashes)
        above.set_dirty([s.block_id for s in found if s is not None and s.ref_cnt >= 0])


def batch_blocks(block_size: int) -> int:
    """How many blocks of this size make one job."""
    return max(1, min(MAX_BATCH_BLOCKS, BATCH_BYTES // block_size))


def outcomes_of(result: TransferResult, n: int) -> Sequence[BlockOutcome]:
    """The outcome of each of the `n` blocks of a job."""
    if result.outcomes:
        return result.outcomes
    return [BlockOutcome.OK if result.success else BlockOutcome.IO_ERROR] * n


def is_failed_write(
    level: Level, targets: Sequence[BlockStatus], outcomes: Sequence[BlockOutcome]
) -> bool:
    """True if blocks could not be written, and there is no other place in the tier to try."""
    if WRITTEN.issuperset(outcomes):
        return False
    failed = [
        target.block_id
        for target, outcome in zip(targets, outcomes, strict=True)
        if outcome not in WRITTEN
    ]
    return not level.backend.avoid(failed)


def release_orphan(flow: Flow, job: Job) -> None:
    """Give back both ends of a job that outlived a reset; the last user of a slot frees it.

    An end that was not reset is left as if the job had failed.
    """
    for level, status in job.ends():
        if level < job.reset_levels:
            status.ref_cnt -= 1
            if status.ref_cnt == 0:
                flow.levels[level].backend.free(status)
    if job.source_level >= job.reset_levels:
        for status in job.sources:
            status.ref_cnt -= 1
    elif job.target_level >= job.reset_levels:
        for block_hash, status in zip(job.hashes, job.targets, strict=True):
            flow.levels[job.target_level].drop(block_hash, status)
            flow.lost_below(job.target_level, block_hash)  # it may have come back above meanwhile
