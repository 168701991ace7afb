"""Writes into one tier below: room, write budget, breaker, and the outcome of each block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...handlers.base import OffloadingHandler, TransferResult
from ...tiers.base import BlockHash, BlockOutcome, LoadStoreSpec, SlotSpec
from ...tiers.breaker import Breaker
from ..level import Level
from .port import Ended, Put
from .tier_books import TierBooks, TierJob, Way, outcomes_of

STALLED_S = 15.0
"""Time limit in seconds. If transfers in one direction are in flight and none ends for so long,
this counts as a failure."""
NOT_WANTED = frozenset(
    {BlockOutcome.HELD, BlockOutcome.GONE, BlockOutcome.CORRUPT, BlockOutcome.REFUSED}
)
"""Write outcomes that are no failure, and for which a retry is useless.

There are four cases. Another process stored the block first, or the tier was reset. The block was
damaged in the tier above. Or several retries failed because other processes keep the room.
"""
WRITTEN = NOT_WANTED | {BlockOutcome.OK}
"""Write outcomes that are no failure."""

SpecOf = Callable[[Sequence[BlockHash], Sequence[int]], LoadStoreSpec]
"""Function that returns the location of blocks in the tier above, from their keys and slots."""


def arena_slots(keys: Sequence[BlockHash], slots: Sequence[int]) -> LoadStoreSpec:
    """Return the location of slots of the first tier."""
    return SlotSpec(np.array(slots, dtype=np.int32))


def slots_of(upper: Level) -> SpecOf:
    """Return a function that locates blocks of `upper` for writes to the tier below it."""

    def spec(keys: Sequence[BlockHash], slots: Sequence[int]) -> LoadStoreSpec:
        found = upper.policy.get_many(keys)
        return upper.backend.get_load_store_spec(keys, [s for s in found if s is not None])

    return spec


def answers_to_put(n: int, new: Sequence[int], started: Sequence[int], refusal: Put) -> list[Put]:
    """Return the answer to each of the `n` keys of a put.

    `new` are the positions of keys that the tier lacks. Those of them that were not `started` get
    `refusal`.
    """
    if len(started) == n:
        return [Put.STARTED] * n
    answers = [Put.ALREADY] * n
    for at in new:
        answers[at] = refusal
    for at in started:
        answers[at] = Put.STARTED
    return answers


class TierWrites:
    """All writes into one tier."""

    def __init__(self, books: TierBooks, handler: OffloadingHandler, spec_of: SpecOf) -> None:
        """`spec_of` returns the location of blocks in the tier above."""
        self._books = books
        self._spec_of = spec_of
        self._level = books.level
        self._budget = books.tier.write_budget
        self.way = Way(handler, Breaker(books.clock, STALLED_S, failures_to_open=1))
        self.may_recover = True
        """True if the last failure came from the device or its process, and not from lack of
        room."""

    def put(self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> Sequence[Put]:
        """Start writing as many blocks as room and budget allow."""
        if self.way.breaker.is_open:
            return [Put.RESTING] * len(keys)
        holds = self._level.holds
        new = [at for at, key in enumerate(keys) if not holds(key)]
        if not new:
            return [Put.ALREADY] * len(keys)
        self._level.policy.expect([keys[at] for at in new])
        room = self._level.make_room(len(new), (), may_drop_dirty=False)
        answer = Put.LATER if room else Put.FULL
        if room and self._budget is not None:
            room = min(room, self._budget.left_bytes() // self._level.block_size)
            if not room:
                self._books.counters.demote_over_budget_blocks += len(new)
                answer = Put.OVER_BUDGET
        started = new[:room]
        if started and not self._start(ticket, keys, slots, started):
            started, answer = [], Put.NOT_TAKEN
        return answers_to_put(len(keys), new, started, answer)

    def collect(self) -> list[Ended]:
        """Collect the writes that ended."""
        ended: list[Ended] = []
        for job, result in self.way.finished():
            ended.append(self._end(job, result))
        if ended or self.way.jobs:
            self._books.counters.demote_openings = self.way.breaker.openings
        return ended

    def _start(
        self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int], started: list[int]
    ) -> bool:
        level = self._level
        hashes = [keys[at] for at in started]
        statuses = level.take(hashes)
        job = TierJob(ticket, hashes, statuses, self._books.clock(), keys=hashes)
        source = self._spec_of(hashes, [slots[at] for at in started])
        spec = source, level.backend.get_load_store_spec(hashes, statuses)
        if self.way.start(job, spec):
            if self._budget is not None:
                self._budget.started(len(hashes) * level.block_size)
            return True
        self.way.breaker.trip()
        self.may_recover = True
        self._books.counters.demote_openings = self.way.breaker.openings
        for block_hash, status in zip(hashes, statuses, strict=True):
            level.drop(block_hash, status)
        return False

    def _end(self, job: TierJob, result: TransferResult) -> Ended:
        books, level = self._books, self._level
        outcomes = outcomes_of(result, len(job.hashes))
        books.counters.demote_s += result.time_s
        books.counters.demote_latencies_s.append(books.clock() - job.created_s)
        if self._budget is not None:
            self._budget.ended(len(job.hashes) * level.block_size)
        is_failure = self._is_failure(job, outcomes)
        if job.is_orphan:
            level.release(job)
        else:
            self._land(job, outcomes)
        self.way.breaker.ended(is_failure)
        self.may_recover = BlockOutcome.NO_SPACE not in outcomes
        return Ended(job.ticket, False, 1, outcomes, result.size_bytes, result.time_s)

    def _is_failure(self, job: TierJob, outcomes: Sequence[BlockOutcome]) -> bool:
        """Return True if blocks could not be written, and the tier has no other place to try."""
        if WRITTEN.issuperset(outcomes):
            return False
        failed = [
            status.block_id
            for status, outcome in zip(job.statuses, outcomes, strict=True)
            if outcome not in WRITTEN
        ]
        return not self._level.backend.avoid(failed)

    def _land(self, job: TierJob, outcomes: Sequence[BlockOutcome]) -> None:
        level, counters = self._level, self._books.counters
        stored: list[BlockHash] = []
        slots: list[int] = []
        for block_hash, status, outcome in zip(job.hashes, job.statuses, outcomes, strict=True):
            if outcome is BlockOutcome.OK:
                status.ref_cnt = 0
                stored.append(block_hash)
                slots.append(status.block_id)
                continue
            level.drop(block_hash, status)
            if outcome is BlockOutcome.HELD:
                counters.demote_held_blocks += 1
            elif outcome in (BlockOutcome.REFUSED, BlockOutcome.NO_SPACE):
                counters.demote_no_space_blocks += 1
            elif outcome not in NOT_WANTED:
                counters.demote_failed_blocks += 1
        level.dirt.set_dirty(slots)
        self._books.emit(stored, removed=False)
        counters.demoted_blocks += len(stored)
        counters.demoted_bytes += len(stored) * level.block_size
