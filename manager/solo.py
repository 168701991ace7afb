"""One tier under somebody else's manager: stores and loads of slots that the other one owns.

The other manager decides what it offers and when; admission, eviction, capacity and verification
are this tier's own. A job is answered block by block: what admission, the write budget or the room
refuse is left out of a store without a word, and a block that fails to load is a miss from then on
for `FORGET_FAILED_S`, so that nobody asks for it in a loop. While the tier rests, because transfers
fail or stall, it takes nothing, and every block is a miss.

Used by one thread; nothing here waits, `drain` and `close` apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import numpy as np

from ..tiers.base import BlockHash, BlockOutcome, BlockStatus, SlotSpec
from .admission import PastUses
from .base import BlockEvent
from .breaker import Breaker
from .flow import (
    MAX_MOVED_BLOCKS,
    NOT_WANTED,
    SILENCE,
    STALLED_S,
    Link,
    is_failed_write,
    outcomes_of,
)
from .level import Level, Pairs, Tier

FORGET_FAILED_S = 30.0
MAX_FAILED = 65_536
"""Failed blocks that are remembered; beyond it all are tried again."""
DRAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class SoloResult:
    """A job that ended."""

    job_id: int
    """As the other manager calls it."""
    loaded: tuple[BlockHash, ...]
    """For a load: blocks that arrived and were verified."""
    is_whole: bool
    """True if every block of a load arrived, or nothing of a store failed."""
    size_bytes: int
    time_s: float


@dataclass(slots=True)
class _Job:
    job_id: int
    hashes: list[BlockHash]
    statuses: list[BlockStatus]
    is_load: bool
    is_partial: bool = False
    """Blocks that were asked for are not here."""
    is_outdated: bool = False
    """A load from before a reset: its blocks are here no more, and it alone uses their slots."""

    def blocks(self) -> Pairs:
        """What this job uses of the tier."""
        return list(zip(self.hashes, self.statuses, strict=True))


class SoloTier:
    """A tier and its two handlers."""

    def __init__(self, tier: Tier, link: Link, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self.level = Level(tier, is_last=True)
        self.level.on_evicted = self._note_evicted
        self.events: list[BlockEvent] = []
        self._link = link
        self._clock = clock
        self._ids = itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        self._ended: list[SoloResult] = []
        self._failed: dict[BlockHash, float] = {}
        self._writes = Breaker(clock, STALLED_S, failures_to_open=1)
        self._reads = Breaker(clock, STALLED_S)
        self._past = PastUses(self.level.capacity) if self.level.admission.counts_uses else None
        self.maintain()  # an engine that nobody asks takes no step, which would do it

    @property
    def is_busy(self) -> bool:
        """True while jobs are under way."""
        return bool(self._jobs)

    def has(self, block_hash: BlockHash) -> bool:
        """True if the block can be loaded."""
        if self._reads.is_open:
            return False
        until_s = self._failed.get(block_hash)
        if until_s is not None:
            if self._clock() < until_s:
                return False
            del self._failed[block_hash]
        status = self.level.policy.get(block_hash)
        return status is not None and status.ref_cnt >= 0

    def store(
        self, job_id: int, block_hashes: Sequence[BlockHash], slots: Sequence[int]
    ) -> list[BlockHash]:
        """Write those blocks that are not here and may come; returns which.

        `slots` are the other manager's.
        """
        new = [
            (h, slot)
            for h, slot in zip(block_hashes, slots, strict=True)
            if not self.level.holds(h) and self._admits(h)
        ]
        self.level.policy.expect([h for h, _ in new])
        may_write = bool(new) and not self._writes.is_open
        room = self.level.make_room(len(new), (), may_drop_dirty=True) if may_write else 0
        budget = self.level.write_budget
        if budget is not None and room:
            room = min(room, budget.left_bytes() // self.level.block_size)
        new = new[:room]
        hashes = [h for h, _ in new]
        targets = self.level.take(hashes) if new else []
        job = _Job(job_id, hashes, targets, is_load=False)
        if new and self._start(job, [slot for _, slot in new]):
            if budget is not None:
                budget.started(len(new) * self.level.block_size)
            return hashes
        for block_hash, target in zip(hashes, targets, strict=True):
            self.level.drop(block_hash, target)
        self._ended.append(SoloResult(job_id, (), not new, 0, 0.0))
        return []

    def load(self, job_id: int, block_hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """Read and verify blocks into the other manager's slots."""
        found = [
            (h, status, slot)
            for h, slot in zip(block_hashes, slots, strict=True)
            if (status := self.level.policy.get(h)) is not None and status.ref_cnt >= 0
        ]
        job = _Job(job_id, [h for h, _, _ in found], [s for _, s, _ in found], is_load=True)
        job.is_partial = len(found) < len(block_hashes)
        for status in job.statuses:
            status.ref_cnt += 1
        if found and self._start(job, [slot for _, _, slot in found]):
            return
        for status in job.statuses:
            status.ref_cnt -= 1
        self._ended.append(SoloResult(job_id, (), False, 0, 0.0))

    def finished(self) -> list[SoloResult]:
        """Jobs that ended since the last call."""
        self._collect()
        ended, self._ended = self._ended, []
        return ended

    def maintain(self) -> None:
        """Upkeep of the tier; at the end of every step. What other processes did is taken in.

        It is also the end of whatever may be an engine's last call before it idles: nothing of the
        index must be held then.
        """
        self._writes.look_at_clock()
        self._reads.look_at_clock()
        if self.level.maintain():
            self._forget()

    def finish_request(
        self, block_hashes: Sequence[BlockHash], counted: Container[BlockHash]
    ) -> None:
        """A request ended: its blocks in prefix order; the use of those in `counted` was noted when
        they were stored or loaded."""
        policy = self.level.policy
        if policy.wants_chains:
            policy.note_chain(block_hashes)
        else:
            policy.settle([h for h in block_hashes if h in counted])
            policy.touch([h for h in block_hashes if h not in counted])
        self.maintain()

    def take_events(self) -> list[BlockEvent]:
        """What came and went since the last call."""
        came, left = self.level.take_moved(MAX_MOVED_BLOCKS)
        self._emit(left, removed=True)
        self._emit(came, removed=False)
        self.maintain()
        events, self.events = self.events, []
        return events

    def drain(self) -> None:
        """Wait until every job has ended, `DRAIN_S` at most."""
        for handler, is_load in ((self._link.down, False), (self._link.up, True)):
            waiting = {number for number, job in self._jobs.items() if job.is_load is is_load}
            handler.wait(waiting, DRAIN_S)

    def reset(self) -> None:
        """Make every older block unreachable; `drain` comes first.

        What is under way after all keeps its slots, and a store of it fails when it ends.
        """
        self._collect()
        self._forget()
        self._failed.clear()
        self.events.clear()  # a reset removes without naming: what just ended is not there

    def close(self, deadline_s: float) -> bool:
        """Stop the handlers; False if transfers are still under way."""
        has_ended = [h.shutdown(deadline_s) for h in (self._link.down, self._link.up)]
        self.finished()
        return all(has_ended)

    def _forget(self) -> None:
        jobs = self._jobs.values()
        for job in jobs:
            job.is_outdated = job.is_load
        self.level.forget([pair for job in jobs if not job.is_load for pair in job.blocks()])

    def _collect(self) -> None:
        """Take in what the handlers finished."""
        for handler in (self._link.down, self._link.up):
            for result in handler.get_finished():
                job = self._jobs.pop(result.job_id)
                outcomes = outcomes_of(result, len(job.hashes))
                if job.is_load:
                    self._reads.ended(SILENCE.issuperset(outcomes))
                else:
                    self._writes.ended(is_failed_write(self.level, job.statuses, outcomes))
                land = self._land_load if job.is_load else self._land_store
                loaded, is_whole = land(job, outcomes)
                self._ended.append(
                    SoloResult(job.job_id, loaded, is_whole, result.size_bytes, result.time_s)
                )

    def _admits(self, block_hash: BlockHash) -> bool:
        """The other manager offers a block once per request: offers are its uses."""
        uses = 1
        if self._past is not None:
            uses += self._past.of(block_hash)
            self._past.note(block_hash, uses)
        return self.level.admission.admits(block_hash, uses)

    def _start(self, job: _Job, slots: list[int]) -> bool:
        number = next(self._ids)
        theirs = SlotSpec(np.array(slots, dtype=np.int32))
        ours = self.level.backend.get_load_store_spec(job.hashes, job.statuses)
        handler = self._link.up if job.is_load else self._link.down
        if handler.transfer_async(number, (ours, theirs) if job.is_load else (theirs, ours)):
            self._jobs[number] = job
            (self._reads if job.is_load else self._writes).started()
            return True
        return False

    def _land_store(
        self, job: _Job, outcomes: Sequence[BlockOutcome]
    ) -> tuple[tuple[BlockHash, ...], bool]:
        if self.level.write_budget is not None:
            self.level.write_budget.ended(len(job.hashes) * self.level.block_size)
        stored: list[BlockHash] = []
        is_whole = True
        for block_hash, status, outcome in zip(job.hashes, job.statuses, outcomes, strict=True):
            if outcome is BlockOutcome.OK:
                status.ref_cnt = 0
                stored.append(block_hash)
            else:
                self.level.drop(block_hash, status)
                is_whole &= outcome in NOT_WANTED
        self._emit(stored, removed=False)
        return (), is_whole

    def _land_load(
        self, job: _Job, outcomes: Sequence[BlockOutcome]
    ) -> tuple[tuple[BlockHash, ...], bool]:
        loaded: list[BlockHash] = []
        for block_hash, status, outcome in zip(job.hashes, job.statuses, outcomes, strict=True):
            status.ref_cnt -= 1
            if job.is_outdated and status.ref_cnt == 0:
                self.level.backend.free(status)
            if outcome is BlockOutcome.OK:
                loaded.append(block_hash)
            if job.is_outdated or outcome is BlockOutcome.OK:
                continue
            if len(self._failed) >= MAX_FAILED:
                self._failed.clear()
            self._failed[block_hash] = self._clock() + FORGET_FAILED_S
            is_bad = outcome in (BlockOutcome.CORRUPT, BlockOutcome.GONE)
            if is_bad and status.ref_cnt == 0:  # else another job uses the slot
                if self.level.owns(block_hash):
                    self._emit([block_hash], removed=True)
                self.level.drop(block_hash, status)
        self.level.policy.touch(loaded)
        return tuple(loaded), len(loaded) == len(job.hashes) and not job.is_partial

    def _note_evicted(self, evicted: Sequence[tuple[BlockHash, BlockStatus]]) -> None:
        self._emit([block_hash for block_hash, _ in evicted], removed=True)

    def _emit(self, block_hashes: Sequence[BlockHash], removed: bool) -> None:
        if block_hashes:
            level = self.level
            self.events.append(BlockEvent(tuple(block_hashes), level.medium, removed, level.name))
