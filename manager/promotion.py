"""Moving blocks up to the first tier: queues, jobs, and what became of each block.

`Turns` decides which blocks come up, and for whom. Here they are queued, given slots, read in
batches hop by hop, verified by the handler, and pinned for the requests that wait for them.

A wait ends when nothing moves: a queued block that is not sent, or a job that does not end, for
`deadline_s` is late. A late block is a miss for everybody who waits for it. If it arrives after
all, it is a hit for whoever asks next.

Used under the manager's lock.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..handlers.base import TransferResult
from ..tiers.base import BlockHash, BlockOutcome, BlockStatus
from .breaker import Breaker
from .counters import Reason
from .flow import (
    MAX_JOBS_IN_FLIGHT,
    SILENCE,
    Flow,
    Job,
    batch_blocks,
    outcomes_of,
    release_orphan,
)
from .holds import Holds
from .request import Request
from .workers import WorkerTransfers
from .worth import Worth

SPENT = 255
"""Origin of a block that came from below and was loaded: it lies on the device and below."""
DEADLINES_PER_JOB = 3
"""A job that does not end for so many deadlines is late even if others on its link do end."""


@dataclass(slots=True, eq=False)
class Pending:
    """One block on its way up."""

    level: int
    """The level that it is read from now."""
    found_in: int
    """The level where the lookup found it."""
    waiters: dict[Request, None] = field(default_factory=dict)
    is_probe: bool = False
    """True if it is read to measure the link, whether anybody waits or not."""
    is_late: bool = False


class Promoter:
    """All upward movement, hop by hop."""

    def __init__(
        self,
        flow: Flow,
        holds: Holds,
        workers: WorkerTransfers,
        deadline_s: float,
        worth: Worth | None,
    ) -> None:
        """Speeds of the links are reported to `worth`."""
        self._flow = flow
        self._holds = holds
        self._workers = workers
        self._worth = worth
        self._top = flow.levels[0]
        self._deadline_s = deadline_s
        self._pending: dict[BlockHash, Pending] = {}
        self._queued: list[list[BlockHash]] = [[] for _ in flow.levels]
        self._moved_s = [-math.inf] * len(flow.levels)
        """Per level: when a block of it was last sent or arrived, or its queue began."""
        self._jobs: list[dict[int, Job]] = [{} for _ in flow.levels]
        self._breakers = [Breaker(flow.clock, deadline_s) for _ in flow.levels]
        self.late_s = math.inf
        """Before this time nothing can become late."""
        self.landings = 0
        """How many jobs have ended."""
        self.origin = bytearray(self._top.capacity)
        """Per slot of the first tier: the level its block was read from; `SPENT` once a request has
        loaded it; 0 if a worker stored it or it was loaded twice."""
        self._origin_of = np.frombuffer(self.origin, dtype=np.uint8)

    @property
    def in_flight(self) -> int:
        """Blocks queued or on their way."""
        return len(self._pending)

    @property
    def is_queued(self) -> bool:
        """True if `flush` has something to start."""
        return any(self._queued)

    def waiting(self, level: int) -> int:
        """Blocks that are queued or on their way up from `level`."""
        moving = sum(len(job.hashes) for job in self._jobs[level].values())
        return len(self._queued[level]) + moving

    def queued_blocks(self) -> list[int]:
        """Per level: blocks that are not sent yet."""
        return [len(queue) for queue in self._queued]

    def job_ids(self, level: int) -> set[int]:
        """Jobs that read from `level`, for `OffloadingHandler.wait`."""
        return set(self._jobs[level])

    def is_resting(self, level: int) -> bool:
        """True while nothing may be read from this level: it failed or stalls."""
        return self._breakers[level].is_open

    def find(self, block_hash: BlockHash) -> Pending | None:
        """The block's way up; None if it is not on its way."""
        return self._pending.get(block_hash)

    def begin(self, block_hash: BlockHash, level: int, request: Request | None) -> None:
        """Queue a block that lies in `level`; without a request it is a probe."""
        pending = self._pending[block_hash] = Pending(level, level, is_probe=request is None)
        if request is not None:
            self.join(block_hash, pending, request)
        self._queue(level, block_hash)

    def join(self, block_hash: BlockHash, pending: Pending, request: Request) -> None:
        """The request waits for a block that is on its way."""
        pending.waiters[request] = None
        request.pending.add(block_hash)

    def leave(self, request: Request) -> None:
        """The request waits no more; blocks that nobody waits for are not sent."""
        for block_hash in request.pending:
            self._pending[block_hash].waiters.pop(request, None)
        request.pending.clear()

    def flush(self, protected: Container[BlockHash], may_displace: bool) -> None:
        """Give slots to queued blocks, and start reading. Never evicts what is protected.

        `may_displace`: requests wait for room, so blocks that were loaded already leave first.
        """
        for level, queue in enumerate(self._queued):
            if queue:
                self._queued[level] = self._flush_level(level, queue, protected, may_displace)

    def collect(self) -> int:
        """Take in what the handlers finished; returns how many jobs ended."""
        ended = 0
        for level, jobs in enumerate(self._jobs):
            if not jobs:
                continue
            for result in self._flow.links[level - 1].up.get_finished():
                job = jobs.pop(result.job_id, None)
                if job is not None:
                    ended += 1
                    self._end(job, level, result)
            self._breakers[level].look_at_clock()
            self._flow.counters.links[level - 1].promote_openings = self._breakers[level].openings
        self.landings += ended
        self.expire()
        return ended

    def expire(self) -> None:
        """Give up what is late, and find out when something may be late next."""
        now_s, self.late_s = self._flow.clock(), math.inf
        for level, (queue, jobs) in enumerate(zip(self._queued, self._jobs, strict=True)):
            if queue:
                due_s = self._moved_s[level] + self._deadline_s
                if now_s >= due_s:
                    self._fail_all(queue, Reason.DEADLINE)
                    self._queued[level] = []
                else:
                    self.late_s = min(self.late_s, due_s)
            for job in jobs.values():
                if not job.is_late:
                    self._expire_job(job, level, now_s)

    def orphan(self, levels: int) -> list[Job]:
        """The first `levels` levels were reset: nothing under way becomes a hit."""
        for pending in self._pending.values():
            for request in pending.waiters:
                request.pending.clear()
        self._pending.clear()
        self._queued = [[] for _ in self._flow.levels]
        return [job for jobs in self._jobs for job in jobs.values() if job.orphan(levels)]

    def _expire_job(self, job: Job, level: int, now_s: float) -> None:
        moved_s = max(job.created_s, self._moved_s[level])
        due_s = min(moved_s, job.created_s + (DEADLINES_PER_JOB - 1) * self._deadline_s)
        due_s += self._deadline_s
        if now_s < due_s:
            self.late_s = min(self.late_s, due_s)
            return
        job.is_late = True
        for block_hash in job.hashes:
            pending = self._pending.get(block_hash)
            if pending is not None:
                pending.is_late = True
                self._miss(block_hash, pending, Reason.DEADLINE)

    def _flush_level(
        self, level: int, queue: list[BlockHash], protected: Container[BlockHash], displace: bool
    ) -> list[BlockHash]:
        """Start jobs for the queue of a level; returns the part that waits for a free job."""
        source, target = self._flow.levels[level], self._flow.levels[level - 1]
        batch = batch_blocks(source.block_size)
        free_jobs = MAX_JOBS_IN_FLIGHT - len(self._jobs[level])
        wanted = min(len(queue), free_jobs * batch)
        may_drop = target.is_last or self._flow.writes[level].is_resting
        target.policy.expect(queue[:wanted])
        if displace and target is self._top:
            target.make_room_of(wanted, protected, self._origin_of == SPENT)
        room = target.make_room(wanted, protected, may_drop_dirty=may_drop)
        for start in range(0, room, batch):
            self._send(level, queue[start : min(start + batch, room)])
        queue = queue[room:]
        if room < wanted and not self._will_have_room(level - 1, wanted - room, may_drop):
            self._fail_all(queue, Reason.BUDGET)
            return []
        return queue

    def _will_have_room(self, level: int, n: int, may_drop: bool) -> bool:
        """True if slots of this level become free, or can be evicted after this step."""
        if self._flow.clean_ahead(level, n):
            return True
        if level == 0 and (self._workers.is_busy or self._holds):
            return True
        target = self._flow.levels[level]
        return bool(target.policy.coldest(1, (), None if may_drop else target.settled_mask))

    def _queue(self, level: int, block_hash: BlockHash) -> None:
        if not self._queued[level]:
            self._moved_s[level] = self._flow.clock()
            self.late_s = min(self.late_s, self._moved_s[level] + self._deadline_s)
        self._queued[level].append(block_hash)

    def _send(self, level: int, hashes: list[BlockHash]) -> None:
        source, target = self._flow.levels[level], self._flow.levels[level - 1]
        present: list[BlockHash] = []
        statuses: list[BlockStatus] = []
        for block_hash in hashes:
            pending = self._pending.get(block_hash)
            if pending is None or not (pending.waiters or pending.is_probe):
                self._pending.pop(block_hash, None)
                continue
            status = source.policy.get(block_hash)
            if status is None or status.ref_cnt < 0 or target.holds(block_hash):
                self._fail(block_hash)
            else:
                present.append(block_hash)
                statuses.append(status)
        if not present:
            return
        for status in statuses:
            status.ref_cnt += 1
        source.policy.touch(present)  # now, since what was just found is found again at once
        targets = target.take(present)
        ids, now_s = self._flow.job_ids, self._flow.clock()
        job = Job(next(ids), level, level - 1, present, statuses, targets, now_s)
        spec = (
            source.backend.get_load_store_spec(present, statuses),
            target.backend.get_load_store_spec(present, targets),
        )
        if self._flow.links[level - 1].up.transfer_async(job.job_id, spec):
            self._jobs[level][job.job_id] = job
            self._moved_s[level] = now_s
            if self._worth is not None:
                self._worth.links[level - 1].sent(len(present) * source.block_size, now_s)
            self._breakers[level].started()
        else:
            self._land(job, level, [BlockOutcome.CANCELLED] * len(present))

    def _fail_all(self, hashes: Iterable[BlockHash], reason: Reason) -> None:
        for block_hash in hashes:
            self._fail(block_hash, reason)

    def _fail(self, block_hash: BlockHash, reason: Reason | None = None) -> None:
        """The block does not come up: a miss for everyone who waits for it."""
        pending = self._pending.pop(block_hash, None)
        if pending is not None:
            self._miss(block_hash, pending, reason)

    def _miss(self, block_hash: BlockHash, pending: Pending, reason: Reason | None) -> None:
        for request in pending.waiters:
            request.missed.add(block_hash)
            request.pending.discard(block_hash)
        if reason is not None:
            self._flow.counters.recomputed_blocks[reason] += len(pending.waiters)
        pending.waiters.clear()

    def _end(self, job: Job, level: int, result: TransferResult) -> None:
        """A job ended: books, speed of the link, and its blocks."""
        now_s, outcomes = self._flow.clock(), outcomes_of(result, len(job.hashes))
        arrived = sum(outcome is BlockOutcome.OK for outcome in outcomes)
        if arrived:
            self._moved_s[level] = now_s
        counters = self._flow.counters.links[level - 1]
        counters.promote_s += result.time_s
        counters.promote_latencies_s.append(now_s - job.created_s)
        if self._worth is not None:
            size = self._top.block_size
            self._worth.links[level - 1].landed(len(outcomes) * size, arrived * size, now_s)
        if job.is_orphan:
            release_orphan(self._flow, job)
        else:
            self._land(job, level, outcomes)
        # A read failed if nothing of it came; a damaged block does not mean that the device fails.
        self._breakers[level].ended(SILENCE.issuperset(outcomes))

    def _land(self, job: Job, level: int, outcomes: Sequence[BlockOutcome]) -> None:
        source, target = self._flow.levels[level], self._flow.levels[level - 1]
        arrived: list[BlockHash] = []
        slots: list[int] = []
        for block_hash, below, status, outcome in zip(
            job.hashes, job.sources, job.targets, outcomes, strict=True
        ):
            below.ref_cnt -= 1
            if outcome is BlockOutcome.OK:
                status.ref_cnt = 0
                arrived.append(block_hash)
                slots.append(status.block_id)
                self._arrive(block_hash, status, level)
            else:
                target.drop(block_hash, status)
                self._fail(block_hash)
                self._count_failure(outcome, level)
                is_bad = outcome in (BlockOutcome.CORRUPT, BlockOutcome.GONE)
                if is_bad and below.ref_cnt == 0:  # else another transfer uses the slot
                    if source.owns(block_hash):
                        self._flow.emit([block_hash], source, removed=True)
                    source.drop(block_hash, below)
                    self._flow.lost_below(level, block_hash)
        target.set_settled(slots)
        target.policy.mark_ready(arrived, slots)
        self._flow.emit(arrived, target, removed=False)
        counters = self._flow.counters.links[level - 1]
        counters.promoted_blocks += len(arrived)
        counters.promoted_bytes += len(arrived) * source.block_size

    def _arrive(self, block_hash: BlockHash, status: BlockStatus, level: int) -> None:
        pending = self._pending.get(block_hash)
        if pending is None:
            return
        if level > 1:  # one hop done, the next one follows
            pending.level = level - 1
            pending.is_late = False
            self._queue(level - 1, block_hash)
            return
        del self._pending[block_hash]
        self.origin[status.block_id] = pending.found_in
        for request in pending.waiters:
            request.pending.discard(block_hash)
            self._holds.pin(request, block_hash, status)

    def _count_failure(self, outcome: BlockOutcome, level: int) -> None:
        counters = self._flow.counters.links[level - 1]
        if outcome is BlockOutcome.CORRUPT:
            counters.promote_corrupt_blocks += 1
        elif outcome is BlockOutcome.GONE:
            counters.promote_gone_blocks += 1
        else:
            counters.promote_failed_blocks += 1
