"""Writing dirty blocks down, ahead of demand.

The demoter takes the coldest dirty blocks of a tier in batches, asks the tier below for adjacent
slots and hands the copy to the link's handler. When the copy has landed, the block above is
settled: it stays readable until its slot is needed, and then leaves at no cost. A block that could
not be written stays dirty and is offered again while it is still there.

A block that the tier below evicts later is dirty again, and is written once more when it is among
the coldest here, in every write mode. Age alone does not queue it a second time: where the tier
below is the smaller one, an idle engine would go on writing for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..tiers.base import BlockHash, BlockOutcome, BlockStatus
from .admission import PastUses
from .counters import LinkCounters
from .flow import (
    MAX_JOBS_IN_FLIGHT,
    NOT_WANTED,
    Flow,
    Job,
    batch_blocks,
    is_failed_write,
    outcomes_of,
    release_orphan,
)
from .level import Level, Pairs

MAX_SETTLED = 512
"""Blocks that one step may find not to need writing, at a few microseconds each: after a restart,
or where little is admitted, that is most of the tier."""
MAX_AHEAD_BLOCKS = 32 << 10
"""Of a lower tier the watermarks are shares of so many slots at most: nobody waits there but the
tier above and what comes up, and each search passes what is clean already, 0.1 µs a block."""


class Demoter:
    """Moves dirty blocks from one level to the next one below. Under the manager's lock."""

    def __init__(self, flow: Flow, index: int, low_watermark: float, high_watermark: float) -> None:
        """Between levels `index` and `index + 1`; watermarks are shares of the upper one."""
        self._flow = flow
        self._index = index
        self._upper: Level = flow.levels[index]
        self._lower: Level = flow.levels[index + 1]
        self._handler = flow.links[index].down
        self.counters: LinkCounters = flow.counters.links[index]
        self._batch = batch_blocks(self._upper.block_size)
        self.was_cut_short = False
        """True if the last look ended before it came to the last dirty block."""
        self.may_find_room = False
        """True if the last look ended for want of room below, and there will be some."""
        slots = min(self._upper.capacity, MAX_AHEAD_BLOCKS) if index else self._upper.capacity
        self._window = max(1, round(high_watermark * slots))
        self._slack = max(1, round((high_watermark - low_watermark) * slots))
        self._taken_at_scan = -self._slack
        self._started_by_scan = 0
        self._found: list[BlockHash] = []
        """What the last search found beyond the job it was for, coldest first."""
        self.on_put_off: Callable[[list[BlockHash]], None] | None = None
        """Told which blocks were not written and should be tried again: their device failed, or
        there was room for a part of their job."""
        self._jobs: dict[int, Job] = {}
        self._breaker = flow.writes[index + 1]
        self._may_recover = True
        """What failed last was the device or its process, and not for want of room."""
        if self._lower.admission.counts_uses:
            self._upper.past_uses = PastUses(self._lower.capacity)

    @property
    def jobs_in_flight(self) -> int:
        """Copies under way."""
        return len(self._jobs)

    @property
    def job_ids(self) -> set[int]:
        """Their ids, for `wait`."""
        return set(self._jobs)

    @property
    def losable_blocks(self) -> int:
        """Blocks in the upper tier that the lower one has place for; 0 if its medium keeps them."""
        if self._upper.is_lasting:
            return 0
        return min(len(self._upper.policy), self._lower.capacity)

    @property
    def room_blocks(self) -> int:
        """How many blocks could be sent down now."""
        return (MAX_JOBS_IN_FLIGHT - len(self._jobs)) * self._batch if self._may_start() else 0

    @property
    def is_blocked(self) -> bool:
        """True while the tier below takes no writes: dirty blocks above may then be dropped."""
        return self._breaker.is_resting

    @property
    def is_stalled(self) -> bool:
        """True if copies are under way and none has ended for long."""
        return self._breaker.is_stalled

    @property
    def rest_left_s(self) -> float:
        """Seconds until the tier below may be tried again after a failure."""
        return self._breaker.rest_left_s

    def may_recover_within(self, limit_s: float) -> bool:
        """True if the tier below rests, and a try after that, so soon, may succeed."""
        return self._may_recover and 0 < self._breaker.rest_left_s < limit_s

    def wait(self, job_ids: set[int], limit_s: float) -> None:
        """Wait until these copies have ended, so long at most. Not under the lock."""
        self._handler.wait(job_ids, limit_s)

    def keep_ahead(self) -> None:
        """Make the cold end of the upper level clean if the low watermark may have been crossed.

        Looks once per `high - low` slots taken, so a store pays for a constant number of looks, and
        writes no more than the window each time: where the tier below is smaller than that, what it
        evicts is dirty again here, and an idle engine would go on for ever. A look that settles
        many blocks goes on at the next step.
        """
        if self._upper.taken_blocks - self._taken_at_scan < self._slack:
            return
        window = self._window - self._upper.backend.get_num_possible_blocks()
        left = window - self._started_by_scan
        started = self._demote_coldest(left, window, MAX_SETTLED) if left > 0 else 0
        self._started_by_scan += started
        may_go_on = self.was_cut_short or self.may_find_room
        is_idle = len(self._jobs) < MAX_JOBS_IN_FLIGHT and not may_go_on
        if left <= started or (not started and is_idle):
            self._taken_at_scan = self._upper.taken_blocks
            self._started_by_scan = 0

    def demote_coldest(self, n: int) -> int:
        """Start writing up to `n` of the coldest dirty blocks; returns how many are on their way.

        What is below already, or not admitted, is settled instead: that may be nearly all of the
        tier, so a look ends when it settled `n` blocks, or `MAX_SETTLED` (`was_cut_short`).
        """
        return self._demote_coldest(n, None, max(n, MAX_SETTLED))

    def most_useful(self, n: int, in_use: Sequence[BlockHash]) -> list[BlockHash]:
        """Up to `n` dirty blocks, those first that are worth most at the next start.

        No search finds what is pinned: `in_use` names it, tails before heads.
        """
        if n <= 0:
            return []
        idle = self._upper.policy.coldest(len(self._upper.policy), mask=self._upper.dirty_mask)
        hottest_first = [*reversed(self._dirty_among(in_use)), *reversed(idle)]
        return self._upper.by_use([*dict(hottest_first).items()])[:n]

    def _demote_coldest(self, n: int, window: int | None, max_settled: int) -> int:
        """`window`: look only among that many of the coldest blocks."""
        started = settled = 0
        self.was_cut_short = self.may_find_room = False
        while started < n and self._may_start():
            self.was_cut_short = settled >= max_settled
            if self.was_cut_short:
                break
            limit = self._next_size(n - started)
            if limit == 0:
                break
            cold = self._next_cold(limit, window)
            sent = self._send(cold)
            if sent is None or not cold:
                break
            started += sent
            settled += len(cold) - sent
        return started

    def _next_cold(self, limit: int, window: int | None) -> Pairs:
        """Up to `limit` of the coldest dirty blocks; none if there are no more.

        A search in a window first passes all that is clean already: so it is for several jobs, and
        what one of them leaves over comes first next time, if it is still dirty.
        """
        while self._found:
            part, self._found = self._found[:limit], self._found[limit:]
            if cold := self._dirty_among(part):
                return cold
        ahead = limit if window is None else MAX_JOBS_IN_FLIGHT * self._batch
        found = self._upper.policy.coldest(ahead, mask=self._upper.dirty_mask, window=window)
        self._found = [block_hash for block_hash, _ in found[limit:]]
        return found[:limit]

    def _dirty_among(self, block_hashes: Iterable[BlockHash]) -> Pairs:
        found = ((block_hash, self._upper.policy.get(block_hash)) for block_hash in block_hashes)
        return [
            (block_hash, status)
            for block_hash, status in found
            if status is not None and status.ref_cnt >= 0 and self._upper.is_dirty(status.block_id)
        ]

    def demote(self, block_hashes: Sequence[BlockHash]) -> int:
        """Start writing these blocks if they are here, ready and dirty; returns how many are left.

        Those left are at the end of the list: offer them again.
        """
        self.may_find_room = False
        left = len(block_hashes)
        while left and self._may_start() and (size := self._next_size(left)):
            start = len(block_hashes) - left
            part = block_hashes[start : start + size]
            if self._send(self._dirty_among(reversed(part))) is None:
                break
            left -= size
        return left

    def collect(self) -> int:
        """Take in what the handler finished; returns how many jobs ended."""
        if not self._jobs:
            return 0
        finished = self._handler.get_finished()
        for result in finished:
            job = self._jobs.pop(result.job_id, None)
            if job is None:
                continue
            self.counters.demote_s += result.time_s
            self.counters.demote_latencies_s.append(self._flow.clock() - job.created_s)
            if self._lower.write_budget is not None:
                self._lower.write_budget.ended(len(job.hashes) * self._lower.block_size)
            outcomes = outcomes_of(result, len(job.hashes))
            is_failure = is_failed_write(self._lower, job.targets, outcomes)
            if job.is_orphan:
                release_orphan(self._flow, job)
            else:
                self._land(job, outcomes)
            self._breaker.ended(is_failure)
            self._may_recover = BlockOutcome.NO_SPACE not in outcomes
        self._breaker.look_at_clock()
        self.counters.demote_openings = self._breaker.openings
        return len(finished)

    def orphan(self, levels: int) -> list[Job]:
        """So many levels were reset: jobs in flight there will be forgotten when they land."""
        return [job for job in self._jobs.values() if job.orphan(levels)]

    def _next_size(self, n: int) -> int:
        """How many of `n` blocks the next job may take. A tier that can still grow evicts nothing:
        it gets as many as it has room for now, and with 0 the rest is for a later step."""
        n, backend = min(n, self._batch), self._lower.backend
        free = backend.get_num_free_blocks()
        if free >= n or backend.get_num_possible_blocks() <= free:
            return n
        self.may_find_room = free == 0
        return free

    def _may_start(self) -> bool:
        return len(self._jobs) < MAX_JOBS_IN_FLIGHT and not self._breaker.is_open

    def _send(self, cold: Pairs) -> int | None:
        """Start one job. Coldest first in, prefix order out. None: no job can start now."""
        wanted = self._filter(cold)
        if not wanted:
            return 0
        self._lower.policy.expect(block_hash for block_hash, _ in wanted)
        room = self._lower.make_room(len(wanted), (), may_drop_dirty=False)
        budget = self._lower.write_budget
        if budget is not None and room:
            room = min(room, budget.left_bytes() // self._lower.block_size)
            if room == 0:
                self._settle(wanted)
                self.counters.demote_over_budget_blocks += len(wanted)
                return None
        if room == 0:
            self.may_find_room = self._flow.clean_ahead(self._index + 1, len(wanted))
            return None
        if room < len(wanted) and self.on_put_off is not None:
            self.on_put_off([block_hash for block_hash, _ in wanted[room:]])
        wanted = wanted[:room]
        wanted.reverse()
        hashes = [block_hash for block_hash, _ in wanted]
        sources = [status for _, status in wanted]
        targets = self._lower.take(hashes)
        if not self._start(hashes, sources, targets):
            self._breaker.trip()
            self._may_recover = True
            self.counters.demote_openings = self._breaker.openings
            for block_hash, target in zip(hashes, targets, strict=True):
                self._lower.drop(block_hash, target)
            return None
        if budget is not None:
            budget.started(len(hashes) * self._lower.block_size)
        return len(hashes)

    def _start(
        self, hashes: list[BlockHash], sources: list[BlockStatus], targets: list[BlockStatus]
    ) -> bool:
        ids = self._flow.job_ids
        now_s = self._flow.clock()
        job = Job(next(ids), self._index, self._index + 1, hashes, sources, targets, now_s)
        spec = (
            self._upper.backend.get_load_store_spec(hashes, sources),
            self._lower.backend.get_load_store_spec(hashes, targets),
        )
        if not self._handler.transfer_async(job.job_id, spec):
            return False
        for status in sources:
            status.ref_cnt += 1
        self._upper.set_arriving([status.block_id for status in sources])
        self._breaker.started()
        self._jobs[job.job_id] = job
        return True

    def _filter(self, cold: Pairs) -> Pairs:
        """Settle what is already below and what admission refuses; the rest shall be written."""
        wanted: Pairs = []
        settled: list[int] = []
        for block_hash, status in cold:
            slot = status.block_id
            if self._lower.holds(block_hash):
                settled.append(slot)
            elif not self._lower.admission.admits(block_hash, self._upper.uses(slot)):
                settled.append(slot)
                self._upper.note_refused(block_hash, slot)
                self.counters.demote_refused_blocks += 1
            else:
                wanted.append((block_hash, status))
        self._upper.set_settled(settled)
        return wanted

    def _settle(self, blocks: Pairs) -> None:
        self._upper.set_settled([status.block_id for _, status in blocks])

    def _land(self, job: Job, outcomes: Sequence[BlockOutcome]) -> None:
        stored: list[BlockHash] = []
        written: list[int] = []
        settled: list[int] = []
        failed: list[int] = []
        again: list[BlockHash] = []
        for block_hash, source, target, outcome in zip(
            job.hashes, job.sources, job.targets, outcomes, strict=True
        ):
            source.ref_cnt -= 1
            if outcome is BlockOutcome.OK:
                target.ref_cnt = 0
                settled.append(source.block_id)
                stored.append(block_hash)
                written.append(target.block_id)
                continue
            self._lower.drop(block_hash, target)
            if outcome in NOT_WANTED:
                self.counters.demote_held_blocks += outcome is BlockOutcome.HELD
                self.counters.demote_no_space_blocks += outcome is BlockOutcome.REFUSED
                settled.append(source.block_id)
            else:
                failed.append(source.block_id)
                if outcome is not BlockOutcome.NO_SPACE:
                    again.append(block_hash)
        self._lower.set_dirty(written)
        self._upper.set_settled(settled)
        self._upper.set_dirty(failed)
        if again and self.on_put_off is not None:
            self.on_put_off(again)
        self._flow.emit(stored, self._lower, removed=False)
        self.counters.demoted_blocks += len(stored)
        self.counters.demoted_bytes += len(stored) * self._lower.block_size
        full = sum(outcome is BlockOutcome.NO_SPACE for outcome in outcomes)
        self.counters.demote_no_space_blocks += full
        self.counters.demote_failed_blocks += len(failed) - full
