"""Bringing blocks up, before they are offered as hits.

A lookup that finds a block in a lower tier queues it; at the end of the step everything queued is
given slots at once and read in batches. Blocks under way are *pending*: the second question about
one costs a dictionary look. When the bytes have arrived and were verified, the block is ready in
the first tier and held for the requests that asked for it.

Limits: slots that are pending or held never exceed the budget, so waiting requests can neither
fill the first tier nor evict one another; every wait ends by the deadline, after which the answer
is a miss.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from ..handlers.base import TransferResult
from ..tiers.base import BlockHash, BlockOutcome, BlockStatus
from .base import LookupState
from .breaker import Breaker
from .flow import (
    MAX_JOBS_IN_FLIGHT,
    SILENCE,
    Flow,
    Job,
    batch_blocks,
    outcomes_of,
    release_orphan,
)
from .request import Request
from .worth import Decision, Worth

BUDGET_WAIT_S = 1.0
"""How long a request that has nothing under way may wait for others to free the budget."""


@dataclass(slots=True, eq=False)
class Pending:
    """One block on its way up."""

    deadline_s: float
    level: int
    """Where it is read from now."""
    found_in: int
    """The level where the lookup found it."""
    waiters: dict[Request, None]


class Promoter:
    """All upward movement, hop by hop. Used under the manager's lock."""

    def __init__(
        self, flow: Flow, budget_slots: int, deadline_s: float, worth: Worth | None = None
    ) -> None:
        """Without `worth` everything that is found below is brought up."""
        self._flow = flow
        self._worth = worth
        self._undecided: dict[Request, list[BlockHash]] = {}
        """Blocks queued in this step, of requests for which nothing was decided yet. One that
        several of them want belongs to each: that one gives it up says nothing for the others."""
        self._top = flow.levels[0]
        self._budget_slots = budget_slots
        self._deadline_s = deadline_s
        self._pending: dict[BlockHash, Pending] = {}
        self._queued: list[list[BlockHash]] = [[] for _ in flow.levels]
        self._due_s = [math.inf] * len(flow.levels)
        """Per queue: before then none of its blocks is late. A long queue is looked through when
        there is something to find, not at every step."""
        self._jobs: list[dict[int, Job]] = [{} for _ in flow.levels]
        self._breakers = [Breaker(flow.clock, deadline_s) for _ in flow.levels]
        self._held: dict[int, int] = {}
        """Slot to the number of requests that hold it."""
        self._waiting: dict[Request, None] = {}
        self.origin = bytearray(self._top.capacity)
        """Per slot of the first tier: the level its block was read from, until it is loaded."""

    @property
    def in_flight(self) -> int:
        """Blocks queued or on their way."""
        return len(self._pending)

    @property
    def is_waited_for(self) -> bool:
        """True if something is under way and a request waits; one that ended does not."""
        return bool(self._pending and self._waiting)

    @property
    def is_queued(self) -> bool:
        """True if `flush` has something to start."""
        return any(self._queued) and not self._undecided

    def waiting(self, level: int) -> int:
        """Blocks that are queued or on their way up from `level`."""
        moving = sum(len(job.hashes) for job in self._jobs[level].values())
        return len(self._queued[level]) + moving

    def job_ids(self, level: int) -> set[int]:
        """Jobs that read from `level`, for `OffloadingHandler.wait`."""
        return set(self._jobs[level])

    def ask(self, block_hash: BlockHash, request: Request) -> LookupState | None:
        """The state of a block that is under way; None if it is not."""
        pending = self._pending.get(block_hash)
        if pending is None:
            return None
        if not request.may_read(self._flow.levels[pending.found_in].medium):
            return LookupState.MISS  # nor does it wait while others read there
        if self._flow.clock() < pending.deadline_s:
            if not request.is_waiting or request not in pending.waiters:
                is_undecided = next(iter(pending.waiters), None) in self._undecided
                if is_undecided and request.decision is Decision.OPEN:
                    self._undecided.setdefault(request, []).append(block_hash)
                pending.waiters[request] = None
                self._begin_promotion(request)
            request.note_pending(block_hash, pending.deadline_s)
            return LookupState.PENDING
        if block_hash not in request.missed:
            request.missed.add(block_hash)
            self._flow.counters.deadline_misses += 1
        return LookupState.MISS

    def start(self, block_hash: BlockHash, level: int, request: Request) -> LookupState:
        """Queue a block that lies ready in `level`, if the budget allows and the tier answers."""
        if self._breakers[level].is_open:
            self._flow.counters.links[level - 1].promote_refused_blocks += 1
            return LookupState.MISS
        if request not in self._undecided and not self._may_be_worth(level, request):
            return LookupState.MISS
        if len(self._pending) + len(self._held) >= self._budget_slots:
            return self._no_budget(request)
        now = self._flow.clock()
        if request.waiting_since_s is not None:
            if now >= request.waiting_since_s + self._deadline_s:
                return LookupState.MISS
        deadline_s = now + self._deadline_s
        self._pending[block_hash] = Pending(deadline_s, level, level, {request: None})
        self._begin_promotion(request)
        request.note_pending(block_hash, deadline_s)
        self._queue(level, block_hash, deadline_s)
        if self._worth is not None and request.decision is Decision.OPEN:
            self._undecided.setdefault(request, []).append(block_hash)
        return LookupState.PENDING

    def wait_for_store(self, block_hash: BlockHash, request: Request) -> LookupState:
        """The block is being stored by a worker: pending, until the request's deadline."""
        self._begin_wait(request)
        assert request.waiting_since_s is not None
        if self._flow.clock() < request.waiting_since_s + self._deadline_s:
            return LookupState.PENDING
        request.missed.add(block_hash)
        self._flow.counters.deadline_misses += 1
        return LookupState.MISS

    def hold(self, request: Request, block_hash: BlockHash, status: BlockStatus) -> None:
        """Pin a ready block of the first tier for a request that waits for others."""
        slot = status.block_id
        users = self._held.get(slot, 0)
        has_budget = len(self._pending) + len(self._held) < self._budget_slots
        if block_hash not in request.holds and (users or has_budget):
            status.ref_cnt += 1
            request.holds[block_hash] = status
            self._held[slot] = users + 1

    def release(self, request: Request) -> None:
        """The request is served, over, or waited too long: let go of its blocks."""
        for status in request.holds.values():
            status.ref_cnt -= 1
            users = self._held.pop(status.block_id)
            if users > 1:
                self._held[status.block_id] = users - 1
        request.holds.clear()
        self._end_wait(request)

    def held_blocks(self) -> Iterator[BlockHash]:
        """What requests hold, in prefix order; those of several requests come more than once."""
        return chain.from_iterable(request.holds for request in self._waiting)

    def release_expired(self) -> None:
        """Let go of holds whose request has not come back within twice the deadline."""
        oldest = self._flow.clock() - 2 * self._deadline_s
        for request in list(self._waiting):
            if request.waiting_since_s is None or request.waiting_since_s < oldest:
                self.release(request)

    def decide(self) -> None:
        """The step's questions were asked: load or recompute, for each request that is new."""
        undecided, self._undecided = self._undecided, {}
        if not undecided or self._worth is None:
            return
        now = self._flow.clock()
        wanted = {r: [h for h in hashes if h in self._pending] for r, hashes in undecided.items()}
        left = set(chain.from_iterable(wanted.values()))  # open whether anybody loads them
        queued = [len(q) - n for q, n in zip(self._queued, self._by_level(left), strict=True)]
        probed: set[BlockHash] = set()
        for request, hashes in wanted.items():
            blocks = self._by_level(h for h in hashes if h in left)
            saved = self._worth.saved_blocks(hashes, request)
            if self._worth.is_worth(blocks, queued, now, saved):
                queued = [a + b for a, b in zip(queued, blocks, strict=True)]
                left.difference_update(hashes)
                request.decision = Decision.LOAD
                self._flow.counters.promotions_worth += 1
            else:
                self._give_up(request, undecided[request], now, probed)
        for level, queue in enumerate(self._queued):
            self._queued[level] = [h for h in queue if h in self._pending]

    def flush(self, protected: Container[BlockHash]) -> None:
        """Give slots to what is queued, and start reading. Never evicts what is protected."""
        for level, queue in enumerate(self._queued):
            if queue:
                self._queued[level] = self._flush_level(level, queue, protected)

    def collect(self) -> int:
        """Take in what the handlers finished; returns how many jobs ended."""
        ended = 0
        for level, jobs in enumerate(self._jobs):
            if not jobs:
                continue
            for result in self._flow.links[level - 1].up.get_finished():
                job = jobs.pop(result.job_id, None)
                if job is None:
                    continue
                ended += 1
                counters = self._flow.counters.links[level - 1]
                counters.promote_s += result.time_s
                counters.promote_latencies_s.append(self._flow.clock() - job.created_s)
                self._note_speed(job, level, result)
                if job.is_orphan:
                    release_orphan(self._flow, job)
                else:
                    self._land(job, level, outcomes_of(result, len(job.hashes)))
                self._note_end(level, outcomes_of(result, len(job.hashes)))
            self._breakers[level].look_at_clock()
            self._flow.counters.links[level - 1].promote_openings = self._breakers[level].openings
        return ended

    def orphan(self, levels: int) -> list[Job]:
        """So many levels, the first one among them, were reset: nothing under way becomes a hit."""
        self._pending.clear()
        self._undecided.clear()
        self._queued = [[] for _ in self._flow.levels]
        for request in list(self._waiting):
            request.holds.clear()
            self._end_wait(request)
        self._held.clear()
        return [job for jobs in self._jobs for job in jobs.values() if job.orphan(levels)]

    def _begin_promotion(self, request: Request) -> None:
        request.has_promotions = True
        self._begin_wait(request)

    def _begin_wait(self, request: Request) -> None:
        if request.waiting_since_s is None:
            request.begin_wait(self._flow.clock())
            self._waiting[request] = None

    def _end_wait(self, request: Request) -> None:
        request.end_wait()
        self._waiting.pop(request, None)

    def _may_be_worth(self, level: int, request: Request) -> bool:
        """False if it need not even be known how many blocks the request finds below."""
        worth = self._worth
        if worth is None or request.decision is Decision.LOAD:
            return True
        now = self._flow.clock()
        if request.decision is Decision.OPEN:
            if not worth.is_hopeless(level, now) or worth.may_probe(level, now):
                return True
            self._recompute(request)
        return False

    def _recompute(self, request: Request) -> None:
        request.decision = Decision.RECOMPUTE
        self._flow.counters.promotions_not_worth += 1

    def _give_up(
        self, request: Request, hashes: Sequence[BlockHash], now_s: float, probed: set[BlockHash]
    ) -> None:
        """The request computes what it queued; a few blocks come up all the same if it is time, and
        are `probed` from then on."""
        assert self._worth is not None
        self._recompute(request)
        level = max((self._pending[h].level for h in hashes if h in self._pending), default=1)
        if self._worth.is_hopeless(level, now_s) and self._worth.may_probe(level, now_s):
            probed.update(hashes[: self._worth.probe_blocks(level, now_s)])
            self._flow.counters.promotion_probes += 1
        for block_hash in hashes:
            request.missed.add(block_hash)
            request.pending.discard(block_hash)
            pending = self._pending.get(block_hash)
            if pending is not None:
                pending.waiters.pop(request, None)
                if not pending.waiters and block_hash not in probed:
                    del self._pending[block_hash]
        if not request.holds and not request.pending:
            self._end_wait(request)

    def _by_level(self, hashes: Iterable[BlockHash]) -> list[int]:
        """How many of these blocks on their way lie in each level."""
        blocks = [0] * len(self._queued)
        for block_hash in hashes:
            blocks[self._pending[block_hash].level] += 1
        return blocks

    def _no_budget(self, request: Request) -> LookupState:
        """What is under way for this request is as far as it goes; others get a short wait."""
        if not request.has_promotions:
            self._begin_wait(request)
            assert request.waiting_since_s is not None
            if self._flow.clock() < request.waiting_since_s + min(BUDGET_WAIT_S, self._deadline_s):
                return LookupState.RETRY
        self._flow.counters.budget_misses += 1
        return LookupState.MISS

    def _flush_level(
        self, level: int, queue: list[BlockHash], protected: Container[BlockHash]
    ) -> list[BlockHash]:
        """Start jobs for what is queued at a level; returns what must wait for a free job."""
        source, target = self._flow.levels[level], self._flow.levels[level - 1]
        batch = batch_blocks(source.block_size)
        free_jobs = MAX_JOBS_IN_FLIGHT - len(self._jobs[level])
        wanted = min(len(queue), free_jobs * batch)
        may_drop = target.is_last or self._flow.writes[level].is_resting
        target.policy.expect(queue[:wanted])
        room = target.make_room(wanted, protected, may_drop_dirty=may_drop)
        for start in range(0, room, batch):
            self._send(level, queue[start : min(start + batch, room)])
        queue = queue[room:]
        if room < wanted and not self._flow.clean_ahead(level - 1, wanted - room):
            for block_hash in queue:
                self._fail(block_hash)
            return []
        return self._in_time(level, queue)

    def _queue(self, level: int, block_hash: BlockHash, deadline_s: float) -> None:
        self._queued[level].append(block_hash)
        self._due_s[level] = min(self._due_s[level], deadline_s)

    def _in_time(self, level: int, queue: list[BlockHash]) -> list[BlockHash]:
        """What of a level's queue is still waited for."""
        now = self._flow.clock()
        if now < self._due_s[level]:
            return queue
        waiting = {h: p.deadline_s for h in queue if (p := self._pending.get(h)) is not None}
        for block_hash, deadline_s in waiting.items():
            if deadline_s <= now:
                self._fail(block_hash)
        self._due_s[level] = min((d for d in waiting.values() if d > now), default=math.inf)
        return [h for h in queue if h in self._pending]

    def _send(self, level: int, hashes: list[BlockHash]) -> None:
        source, target = self._flow.levels[level], self._flow.levels[level - 1]
        present: list[BlockHash] = []
        statuses: list[BlockStatus] = []
        for block_hash in hashes:
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
            if self._worth is not None:
                self._worth.links[level - 1].sent(len(present) * source.block_size, now_s)
            self._breakers[level].started()
        else:
            self._land(job, level, [BlockOutcome.CANCELLED] * len(present))

    def _fail(self, block_hash: BlockHash) -> None:
        """The block does not come up: a miss for everyone who waits for it."""
        pending = self._pending.pop(block_hash, None)
        if pending is not None:
            for request in pending.waiters:
                request.missed.add(block_hash)
                request.pending.discard(block_hash)

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

    def _note_speed(self, job: Job, level: int, result: TransferResult) -> None:
        if self._worth is not None:
            outcomes, size = outcomes_of(result, len(job.hashes)), self._top.block_size
            arrived = sum(outcome is BlockOutcome.OK for outcome in outcomes)
            link = self._worth.links[level - 1]
            link.landed(len(outcomes) * size, arrived * size, self._flow.clock())

    def _note_end(self, level: int, outcomes: Sequence[BlockOutcome]) -> None:
        """A read failed if nothing of it came; a damaged block is not the device's silence."""
        self._breakers[level].ended(SILENCE.issuperset(outcomes))

    def _arrive(self, block_hash: BlockHash, status: BlockStatus, level: int) -> None:
        pending = self._pending.get(block_hash)
        if pending is None:
            return
        if level > 1:  # one hop done, the next one follows
            pending.level = level - 1
            self._queue(level - 1, block_hash, pending.deadline_s)
            return
        del self._pending[block_hash]
        self.origin[status.block_id] = pending.found_in
        for request in pending.waiters:
            request.pending.discard(block_hash)
            if request in self._waiting:
                self.hold(request, block_hash, status)

    def _count_failure(self, outcome: BlockOutcome, level: int) -> None:
        counters = self._flow.counters.links[level - 1]
        if outcome is BlockOutcome.CORRUPT:
            counters.promote_corrupt_blocks += 1
        elif outcome is BlockOutcome.GONE:
            counters.promote_gone_blocks += 1
        else:
            counters.promote_failed_blocks += 1
