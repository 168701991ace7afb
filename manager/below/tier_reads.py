"""Reads from one tier below: verified by the handler, counted here block by block."""

from __future__ import annotations

from collections.abc import Sequence

from ...handlers.base import OffloadingHandler, TransferResult
from ...tiers.base import BlockHash, BlockOutcome
from ...tiers.breaker import Breaker
from .port import Ended
from .tier_books import TierBooks, TierJob, Way, outcomes_of
from .tier_writes import arena_slots

SILENCE = frozenset({BlockOutcome.IO_ERROR, BlockOutcome.NO_SPACE})
"""Read outcomes caused by a failing device; every other outcome concerns the block."""
LOST = frozenset({BlockOutcome.CORRUPT, BlockOutcome.GONE})
"""Read outcomes after which the block leaves the tier."""


class TierReads:
    """All reads from one tier into slots of the first tier."""

    def __init__(self, books: TierBooks, handler: OffloadingHandler, stall_s: float) -> None:
        """If reads are in flight and none ends for `stall_s` seconds, this counts as a failure."""
        self._books = books
        self._level = books.level
        self.way = Way(handler, Breaker(books.clock, stall_s))
        self.refused: list[Ended] = []
        """Reads that were not started and not reported yet."""

    def get(self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """Start reading the blocks that the tier holds."""
        level = self._level
        found = list(zip(keys, level.policy.get_many(keys), slots, strict=True))
        present = [(h, s, slot) for h, s, slot in found if s is not None and s.ref_cnt >= 0]
        hashes, statuses = [h for h, _, _ in present], [s for _, s, _ in present]
        for status in statuses:
            status.ref_cnt += 1
        if hashes:
            level.policy.touch(hashes)  # now, because these blocks are soon looked up again
        job = TierJob(ticket, hashes, statuses, self._books.clock(), keys=keys)
        target = arena_slots(hashes, [slot for _, _, slot in present])
        source = level.backend.get_load_store_spec(hashes, statuses)
        if hashes and self.way.start(job, (source, target)):
            return
        for status in statuses:
            status.ref_cnt -= 1
        cancelled = [BlockOutcome.CANCELLED] * len(hashes)
        self._books.counters.promote_failed_blocks += len(hashes)
        self.refused.append(Ended(ticket, True, 1, _in_order(job, cancelled)))

    def collect(self) -> list[Ended]:
        """Collect the reads that ended."""
        ended, self.refused = self.refused, []
        for job, result in self.way.finished():
            ended.append(self._end(job, result))
        if ended or self.way.jobs:
            self._books.counters.promote_openings = self.way.breaker.openings
        return ended

    def _end(self, job: TierJob, result: TransferResult) -> Ended:
        counters = self._books.counters
        outcomes = outcomes_of(result, len(job.hashes))
        counters.promote_s += result.time_s
        counters.promote_latencies_s.append(self._books.clock() - job.created_s)
        if job.is_orphan:
            self._level.release(job)
        else:
            self._land(job, outcomes)
        # A read failed if no block arrived; a damaged block does not mean that the device fails.
        self.way.breaker.ended(SILENCE.issuperset(outcomes))
        in_order = _in_order(job, outcomes)
        return Ended(job.ticket, True, 1, in_order, result.size_bytes, result.time_s)

    def _land(self, job: TierJob, outcomes: Sequence[BlockOutcome]) -> None:
        counters, arrived = self._books.counters, 0
        for block_hash, status, outcome in zip(job.hashes, job.statuses, outcomes, strict=True):
            status.ref_cnt -= 1
            if outcome is BlockOutcome.OK:
                arrived += 1
                continue
            if outcome is BlockOutcome.CORRUPT:
                counters.promote_corrupt_blocks += 1
            elif outcome is BlockOutcome.GONE:
                counters.promote_gone_blocks += 1
            else:
                counters.promote_failed_blocks += 1
            if outcome in LOST and status.ref_cnt == 0:  # else another transfer uses the slot
                self._books.remove_bad(block_hash, status)
        counters.promoted_blocks += arrived
        counters.promoted_bytes += arrived * self._level.block_size


def _in_order(job: TierJob, outcomes: Sequence[BlockOutcome]) -> Sequence[BlockOutcome]:
    """Return one outcome per requested key; blocks that the tier lacks are GONE."""
    if len(job.hashes) == len(job.keys):
        return outcomes
    became = dict(zip(job.hashes, outcomes, strict=True))
    return [became.get(key, BlockOutcome.GONE) for key in job.keys]
