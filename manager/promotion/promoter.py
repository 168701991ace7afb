"""Promotion: read blocks from the tiers below into the first tier.

`ClaimQueue` decides which blocks are promoted, and for which requests. `Promoter` queues the
blocks, takes slots, and reads them in batches. The node verifies each block. Blocks that arrived
are pinned for the requests that wait for them.

A block is late if its queue or its job makes no progress for `deadline_s`. A late block is a miss
for every waiting request. If it arrives later, it is a hit for the next lookup. A request may stop
waiting earlier (`LoadChoice.leave_stalled`).

Used under the manager's lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

from ...tiers.base import BlockHash, BlockOutcome
from ..below.port import Ended
from ..core import MAX_JOBS_IN_FLIGHT, ManagerCore, batch_blocks
from ..counters import Reason
from ..demotion import Demoter
from ..first_tier import Transfer
from ..request import Request
from ..workers import WorkerTransfers
from .claims import Holds
from .worth import Worth

DEADLINES_PER_JOB = 3
"""Number of deadlines after which a job is late even if other jobs of its tier end."""


@dataclass(slots=True, eq=False)
class Pending:
    """A block that is queued for promotion or in flight to the first tier."""

    tier: int
    """Number of the tier in which the lookup found the block."""
    waiters: dict[Request, None] = field(default_factory=dict)
    """Requests that wait for the block."""
    is_probe: bool = False
    """True if the block is read to measure the tier, even without a waiting request."""
    is_late: bool = False


@dataclass(slots=True)
class ReadJob(Transfer):
    """Read of blocks from a tier below into slots of the first tier."""

    is_late: bool = False
    """True once the job took too long. No request waits for its blocks any more."""


class ReadQueue:
    """Blocks of one tier that are queued for promotion or in flight."""

    def __init__(self, tier: int, deadline_s: float) -> None:
        self.tier = tier
        self.deadline_s = deadline_s
        self.queued: list[BlockHash] = []
        """Blocks whose read has not started."""
        self.moved_s = -math.inf
        """Time of the last progress: a read started, blocks arrived, or the queue became non-empty.
        """
        self.arrived_s = -math.inf
        """Time at which blocks arrived last."""
        self.jobs: dict[int, ReadJob] = {}

    @property
    def blocks(self) -> int:
        """Number of blocks that are queued or in flight."""
        return len(self.queued) + sum(len(job.hashes) for job in self.jobs.values())

    def take_late(self, now_s: float) -> list[BlockHash]:
        """Remove and return the queued blocks that are late: all of them, or none."""
        if not self.queued or now_s < self.moved_s + self.deadline_s:
            return []
        late, self.queued = self.queued, []
        return late

    def late_jobs(self, now_s: float) -> Iterator[ReadJob]:
        """Mark the jobs that have become late, and yield them."""
        for job in self.jobs.values():
            if not job.is_late and now_s >= self._due_s(job):
                job.is_late = True
                yield job

    def next_due_s(self) -> float:
        """Return the earliest time at which a block or job may become late."""
        due_s = self.moved_s + self.deadline_s if self.queued else math.inf
        return min([due_s, *(self._due_s(job) for job in self.jobs.values() if not job.is_late)])

    def _due_s(self, job: ReadJob) -> float:
        moved_s = max(job.created_s, self.moved_s)
        last_s = job.created_s + (DEADLINES_PER_JOB - 1) * self.deadline_s
        return min(moved_s, last_s) + self.deadline_s


class Promoter:
    """Read blocks from the tiers below into the first tier."""

    def __init__(
        self,
        core: ManagerCore,
        demoter: Demoter,
        holds: Holds,
        workers: WorkerTransfers,
        worth: Worth | None,
    ) -> None:
        """`demoter` makes room in the first tier; `worth` measures the speeds of the tiers."""
        self._core = core
        self._below = core.below
        self._demoter = demoter
        self._holds = holds
        self._workers = workers
        self._worth = worth
        self._top = core.top
        self._batch = batch_blocks(core.top.block_size)
        self.pending: dict[BlockHash, Pending] = {}
        """Blocks that are queued or in flight."""
        deadline_s, tiers = core.options.promotion_deadline_s, range(1, 1 + len(core.below.tiers))
        self.queues = [ReadQueue(tier, deadline_s) for tier in tiers]
        """One queue for each tier below, nearest first."""
        self.late_s = math.inf
        """Earliest time at which a block or job may become late."""

    @property
    def late_blocks(self) -> int:
        """Number of blocks in flight for which no request waits any more. They may never arrive."""
        jobs = (job for queue in self.queues for job in queue.jobs.values())
        return sum(len(job.hashes) for job in jobs if job.is_late and not job.is_orphan)

    def begin(self, block_hash: BlockHash, tier: int, *, is_probe: bool = False) -> Pending:
        """Queue a block that `tier` holds."""
        pending = self.pending[block_hash] = Pending(tier, is_probe=is_probe)
        queue = self.queues[tier - 1]
        if not queue.queued:
            queue.moved_s = self._core.clock()
            self.late_s = min(self.late_s, queue.moved_s + queue.deadline_s)
        queue.queued.append(block_hash)
        return pending

    def give_up(self, request: Request, block_hashes: Sequence[BlockHash]) -> None:
        """Turn blocks for which a request waits into misses, for this request only."""
        for block_hash in block_hashes:
            self.pending[block_hash].waiters.pop(request)
        request.pending.difference_update(block_hashes)
        request.missed.update(block_hashes)

    def leave(self, request: Request) -> None:
        """End the request's waits. Queued blocks without a waiting request are not read."""
        for block_hash in request.pending:
            self.pending[block_hash].waiters.pop(request, None)
        request.pending.clear()

    def flush(self, hits: Callable[[], Container[BlockHash]], may_displace: bool) -> None:
        """Take slots for queued blocks, and start reading. The hits of this step are never evicted.

        `may_displace`: True evicts promoted blocks first that were loaded already. Use it if
        requests wait for room.
        """
        for queue in self.queues:
            if queue.queued:
                self._flush_queue(queue, hits, may_displace)

    def land(self, ended: Ended) -> ReadJob:
        """Take in a read that ended: its tier's speed and its blocks. Return its job."""
        queue = self.queues[ended.tier - 1]
        job = queue.jobs.pop(ended.ticket)
        now_s = self._core.clock()
        arrived = ended.outcomes.count(BlockOutcome.OK)
        if arrived:
            queue.moved_s = queue.arrived_s = now_s
        if self._worth is not None:
            size = self._top.block_size
            in_flight = 0 if job.is_late else len(job.hashes)
            speed = self._worth.links[ended.tier - 1]
            speed.ended(in_flight * size, arrived * size, now_s)
        if job.is_orphan:
            self._top.release(job.statuses)
        else:
            self._land(job, ended)
        return job

    def expire(self) -> None:
        """Turn late blocks into misses, and set `late_s`."""
        now_s, self.late_s = self._core.clock(), math.inf
        for queue in self.queues:
            for block_hash in queue.take_late(now_s):
                self._fail(block_hash, Reason.DEADLINE)
            for job in queue.late_jobs(now_s):
                if self._worth is not None:
                    size_bytes = len(job.hashes) * self._top.block_size
                    self._worth.links[queue.tier - 1].given_up(size_bytes)
                if job.is_orphan:  # a later promotion may read the same blocks
                    continue
                for block_hash in job.hashes:
                    pending = self.pending.get(block_hash)
                    if pending is not None:
                        pending.is_late = True
                        self._miss(block_hash, pending, Reason.DEADLINE)
            self.late_s = min(self.late_s, queue.next_due_s())

    def orphan(self) -> list[Transfer]:
        """Drop all promotions after a reset of the first tier. Return the reads in flight."""
        for pending in self.pending.values():
            for request in pending.waiters:
                request.pending.clear()
        self.pending.clear()
        orphans: list[Transfer] = []
        for queue in self.queues:
            queue.queued = []
            orphans += queue.jobs.values()
        for job in orphans:
            job.is_orphan = True
        return orphans

    def _flush_queue(
        self, queue: ReadQueue, hits: Callable[[], Container[BlockHash]], may_displace: bool
    ) -> None:
        """Start jobs for a queue. Blocks that must wait for a free job stay queued."""
        top, queued = self._top, queue.queued
        batch = self._batch
        free_jobs = MAX_JOBS_IN_FLIGHT - len(queue.jobs)
        wanted = min(len(queued), free_jobs * batch)
        if top.policy.expects:
            top.policy.expect(queued[:wanted])
        room, may_drop = wanted, False
        if wanted > top.backend.get_num_free_blocks():
            may_drop, protected = self._below.is_blocked, hits()
            if may_displace:
                top.make_room_of_spent(wanted, protected)
            room = top.make_room(wanted, protected, may_drop_dirty=may_drop)
        for start in range(0, room, batch):
            self._send(queue, queued[start : min(start + batch, room)])
        queue.queued = queued[room:]
        if room < wanted and not self._will_have_room(wanted - room, may_drop):
            left, queue.queued = queue.queued, []
            for block_hash in left:
                self._fail(block_hash, Reason.BUDGET)

    def _will_have_room(self, n: int, may_drop: bool) -> bool:
        """Return True if slots will become free, or if blocks can be evicted after this step."""
        if self._demoter.clean_ahead(n) or self._workers.is_busy or self._holds.will_end:
            return True
        if any(queue.jobs for queue in self.queues):
            return True
        return self._top.has_victim(may_drop)

    def _send(self, queue: ReadQueue, hashes: list[BlockHash]) -> None:
        present: list[BlockHash] = []
        get = self._top.policy.get
        for block_hash in hashes:
            pending = self.pending.get(block_hash)
            if pending is None or not (pending.waiters or pending.is_probe):
                self.pending.pop(block_hash, None)
            elif get(block_hash) is not None:
                self._fail(block_hash)
            else:
                present.append(block_hash)
        if not present:
            return
        targets, slots = self._top.take(present)
        ticket, now_s = next(self._core.tickets), self._core.clock()
        queue.jobs[ticket] = ReadJob(present, targets, now_s)
        queue.moved_s = now_s
        self.late_s = min(self.late_s, now_s + queue.deadline_s)
        if self._worth is not None:
            speed = self._worth.links[queue.tier - 1]
            speed.started(len(present) * self._top.block_size, now_s)
        self._below.get(ticket, queue.tier, present, slots.tolist())

    def _fail(self, block_hash: BlockHash, reason: Reason | None = None) -> None:
        """Drop a promotion: its block is a miss for every waiting request."""
        pending = self.pending.pop(block_hash, None)
        if pending is not None:
            self._miss(block_hash, pending, reason)

    def _miss(self, block_hash: BlockHash, pending: Pending, reason: Reason | None) -> None:
        for request in pending.waiters:
            request.missed.add(block_hash)
            request.pending.discard(block_hash)
        if reason is not None:
            self._core.counters.recomputed_blocks[reason] += len(pending.waiters)
        pending.waiters.clear()

    def _land(self, job: ReadJob, ended: Ended) -> None:
        top, pop, origin = self._top, self.pending.pop, self._top.origin
        arrived: list[BlockHash] = []
        slots: list[int] = []
        ok = BlockOutcome.OK
        for block_hash, status, outcome in zip(
            job.hashes, job.statuses, ended.outcomes, strict=True
        ):
            if outcome is not ok:
                top.drop(block_hash, status)
                self._fail(block_hash)
                continue
            status.ref_cnt = 0
            arrived.append(block_hash)
            slots.append(status.block_id)
            pending = pop(block_hash, None)
            if pending is not None:
                origin[status.block_id] = pending.tier
                for request in pending.waiters:
                    request.pending.discard(block_hash)
                    self._holds.pin(request, block_hash, status)
        if ended.tier == 1:
            top.dirt.set_settled(slots)
        else:  # a block from a deeper tier is hot now: eviction writes it to tier 1
            top.dirt.set_dirty(slots)
        top.policy.mark_ready(arrived, slots)
        self._core.emit(arrived, removed=False)
