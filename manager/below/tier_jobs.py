"""Jobs of another manager over one tier: its stores and loads, with one answer per block.

The other manager decides what it offers and when. Admission, room and write budget may refuse
blocks, at once or in the outcome. A store leaves these blocks out and does not fail. A block that
fails to load is a miss for `FORGET_FAILED_S`, so that the other manager does not ask for it in a
loop. While the tier rests, because transfers fail or stall, it accepts no writes, and every block
is a miss.

The node takes a limited number of jobs. The others are queued, loads and stores apart. The other
manager bounds the queues: each of their jobs keeps slots of it. While the tier rests, no job is
queued. Loads fail then, and stores leave their blocks out.

Used by one thread at a time, under the owner's lock. Only `drain` and `close` wait.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from ...handlers.node.node_keeper import JOBS_AT_MOST
from ...tiers.base import BlockHash, BlockOutcome
from ..admission import AdmissionFunction, PastUses
from ..base import BlockEvent
from .node_tier import NodeTier
from .port import Ended, Put

FORGET_FAILED_S = 30.0
MAX_FAILED = 65_536
"""Maximum number of failed blocks that are remembered. Beyond it all are forgotten and tried
again."""
MAX_UNREPORTED = 4096
"""Maximum number of ended requests that wait for their stores. Beyond it they are reported."""
DRAIN_S = 60.0
JOBS_EACH_WAY = JOBS_AT_MOST // 2 - 1
"""Largest number of loads in flight, and of stores. The node takes a reset beside them."""


@dataclass(frozen=True, slots=True)
class TierJobResult:
    """Result of a job that ended."""

    job_id: int
    """Number that the other manager gave to the job."""
    loaded: tuple[BlockHash, ...]
    """Blocks of a load that arrived and were verified."""
    is_whole: bool
    """True if every block of a load arrived, or no block of a store failed."""
    size_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True)
class _Job:
    """A store or a load of the other manager."""

    job_id: int
    keys: list[BlockHash]
    slots: Sequence[int]
    epoch: int
    """Number of resets before the other manager asked for the job."""


@dataclass(slots=True)
class _EndedRequest:
    """A request that ended, and that the tier was not told of."""

    keys: Sequence[BlockHash]
    counted: Container[BlockHash]
    stored: int = 0
    """Number of its first blocks whose stores have ended, as far as was checked."""

    def waits_for(self, storing: Container[BlockHash]) -> bool:
        """Return True if the store of a block is in flight. Each block is checked off once."""
        while self.stored < len(self.keys) and self.keys[self.stored] not in storing:
            self.stored += 1
        return self.stored < len(self.keys)


class TierJobs:
    """Stores and loads of slots that another manager owns."""

    def __init__(
        self, below: NodeTier, admits: AdmissionFunction | None, clock: Callable[[], float]
    ) -> None:
        """`admits` decides which blocks are stored; None: all. `clock` returns monotonic
        seconds."""
        self.below = below
        self._clock = clock
        self._tickets = itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        """Jobs in flight, by ticket."""
        self._loads: deque[_Job] = deque()
        self._stores: deque[_Job] = deque()
        self._ended: list[TierJobResult] = []
        self._failed: dict[BlockHash, float] = {}
        self._epoch = 0
        self._storing: set[BlockHash] = set()
        """Blocks whose store is queued or in flight."""
        self._unreported: list[_EndedRequest] = []
        self._rule = None if admits is None else (admits, PastUses(below.tiers[0].capacity))
        """Admission, and the use counts of blocks; None: every block is admitted."""

    @property
    def is_busy(self) -> bool:
        """True while jobs are queued or in flight."""
        return bool(self._jobs or self._loads or self._stores)

    def has(self, block_hash: BlockHash) -> bool:
        """Return True if the block can be loaded."""
        if self.below.rests(1):
            return False
        until_s = self._failed.get(block_hash)
        if until_s is not None:
            if self._clock() < until_s:
                return False
            del self._failed[block_hash]
        return bool(self.below.may_hold(block_hash))

    def store(
        self, job_id: int, block_hashes: Sequence[BlockHash], slots: Sequence[int]
    ) -> list[BlockHash]:
        """Write the admitted blocks that the tier lacks; return those whose writes started, or
        will be tried.

        `slots` belong to the other manager.
        """
        offered = [
            (h, slot)
            for h, slot in zip(block_hashes, slots, strict=True)
            if not self.below.may_hold(h) and self._admits(h)
        ]
        is_full = bool(self._stores) or len(self.below.writes.jobs) >= JOBS_EACH_WAY
        is_queued = is_full and self.below.takes_puts
        if is_queued:
            offered = [(h, slot) for h, slot in offered if h not in self._storing]
        job = _Job(job_id, [h for h, _ in offered], [s for _, s in offered], self._epoch)
        if not (is_queued and offered):
            return self._begin_store(job)
        self._storing.update(job.keys)
        self._stores.append(job)
        return job.keys

    def load(self, job_id: int, block_hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """Read and verify blocks into the other manager's slots."""
        self._loads.append(_Job(job_id, list(block_hashes), slots, self._epoch))
        self._begin_queued()

    def finished(self) -> list[TierJobResult]:
        """Return the jobs that ended since the last call."""
        self._collect()
        ended, self._ended = self._ended, []
        return ended

    def maintain(self) -> None:
        """Maintain the tier at the end of every step, and take in resets by other engines."""
        self.below.take_lost()
        if self.below.maintain():
            self._epoch += 1

    def finish_request(
        self, block_hashes: Sequence[BlockHash], counted: Container[BlockHash]
    ) -> None:
        """Report the blocks of a request that ended, in prefix order.

        The use of the blocks in `counted` was counted when they were stored or loaded. The tier is
        told once the stores of these blocks have ended, because it ignores blocks that it lacks.
        """
        self._unreported.append(_EndedRequest(block_hashes, counted))
        self._report_requests()
        self.maintain()

    def take_events(self) -> list[BlockEvent]:
        """Return the blocks stored and removed since the last call."""
        events = self.below.take_events()
        self.maintain()
        return events

    def drain(self) -> None:
        """Wait until every job has ended.

        After `DRAIN_S` the node is killed, since the other manager will use the slots again. The
        jobs have failed once it is dead. A node that waits for its disk may live on, and
        `is_busy` stays true.
        """
        if not self._await_jobs():
            self._fail_queued()
            self.below.abandon()
            self._await_jobs()

    def reset(self) -> None:
        """Make every older block unreachable; call `drain` first.

        Transfers still in flight keep their slots, and leave nothing behind.
        """
        self._collect()
        self.below.reset()
        self._epoch += 1
        self._failed.clear()
        self._unreported.clear()

    def close(self, deadline_s: float) -> bool:
        """Stop the transfers within `deadline_s` seconds. Return False if some are still in
        flight."""
        self._fail_queued()
        has_ended = self.below.shutdown(self._clock() + deadline_s)
        self.finished()
        return has_ended

    def _await_jobs(self) -> bool:
        """Wait until every job has ended, at most `DRAIN_S`. Return True if none is left."""
        end_s = self._clock() + DRAIN_S
        while self._jobs and (left_s := end_s - self._clock()) > 0:
            self.below.wait(left_s)
            if self._take_ended():  # in a stall, the tier would refuse what is queued
                self._begin_queued()
                self._report_requests()
        return not self._jobs

    def _collect(self) -> None:
        self._take_ended()
        self._begin_queued()
        self._report_requests()

    def _take_ended(self) -> bool:
        """Take in the jobs that ended. Return True if there were any."""
        all_ended = self.below.poll()
        for ended in all_ended:
            job = self._jobs.pop(ended.ticket)
            loaded, is_whole = self._land(job, ended)
            self._ended.append(
                TierJobResult(job.job_id, loaded, is_whole, ended.size_bytes, ended.time_s)
            )
        return bool(all_ended)

    def _begin_queued(self) -> None:
        """Start as many queued jobs as the node takes; end all of them while the tier rests."""
        below = self.below
        while self._loads and (below.rests(1) or len(below.reads.jobs) < JOBS_EACH_WAY):
            self._begin_load(self._loads.popleft())
        while self._stores and (not below.takes_puts or len(below.writes.jobs) < JOBS_EACH_WAY):
            store = self._stores.popleft()
            self._storing.difference_update(store.keys)
            self._begin_store(store)

    def _fail_queued(self) -> None:
        """End every queued job as failed."""
        for job in (*self._loads, *self._stores):
            self._storing.difference_update(job.keys)
            self._ended.append(TierJobResult(job.job_id, (), False, 0, 0.0))
        self._loads.clear()
        self._stores.clear()

    def _begin_load(self, job: _Job) -> None:
        """Start a load, or end it as failed while the tier rests."""
        if self.below.rests(1):
            self._ended.append(TierJobResult(job.job_id, (), False, 0, 0.0))
            return
        ticket = next(self._tickets)
        self._jobs[ticket] = job
        self.below.get(ticket, 1, job.keys, job.slots)

    def _begin_store(self, job: _Job) -> list[BlockHash]:
        """Start a store; return the blocks whose writes started. Those of before a reset are left
        out."""
        ticket, hashes = next(self._tickets), job.keys
        is_wanted = bool(hashes) and job.epoch == self._epoch
        answers = self.below.put(ticket, hashes, job.slots) if is_wanted else ()
        started = [h for h, a in zip(hashes, answers, strict=False) if a is Put.STARTED]
        if started:
            self._jobs[ticket] = replace(job, keys=started)
            self._storing.update(started)
        else:
            is_whole = Put.NOT_TAKEN not in answers
            self._ended.append(TierJobResult(job.job_id, (), is_whole, 0, 0.0))
        return started

    def _report_requests(self) -> None:
        """Tell the tier of the ended requests whose stores have ended."""
        unreported, self._unreported = self._unreported, []
        excess = len(unreported) - MAX_UNREPORTED
        for number, request in enumerate(unreported):
            if number < excess or not request.waits_for(self._storing):
                self.below.note_request(request.keys, request.counted)
            else:
                self._unreported.append(request)

    def _land(self, job: _Job, ended: Ended) -> tuple[tuple[BlockHash, ...], bool]:
        if not ended.is_get:
            self._storing.difference_update(job.keys)
            return (), BlockOutcome.IO_ERROR not in ended.outcomes  # the rest found no room
        came = list(zip(job.keys, ended.outcomes, strict=True))
        loaded = tuple(h for h, outcome in came if outcome is BlockOutcome.OK)
        if job.epoch == self._epoch:
            self._note_failed([h for h, outcome in came if self._would_ask_again(h, outcome)])
        return loaded, len(loaded) == len(came)

    def _would_ask_again(self, block_hash: BlockHash, outcome: BlockOutcome) -> bool:
        """Return True if a block failed and may still be found."""
        if outcome is BlockOutcome.GONE:
            return bool(self.below.may_hold(block_hash))
        return outcome is not BlockOutcome.OK

    def _note_failed(self, block_hashes: list[BlockHash]) -> None:
        until_s = self._clock() + FORGET_FAILED_S
        for block_hash in block_hashes:
            if len(self._failed) >= MAX_FAILED:
                self._failed.clear()
            self._failed[block_hash] = until_s

    def _admits(self, block_hash: BlockHash) -> bool:
        """Return True if the block is admitted.

        The other manager offers a block once per request, so its offers count as uses.
        """
        if self._rule is None:
            return True
        admits, past = self._rule
        uses = 1 + past.of(block_hash)
        past.note(block_hash, uses)
        return admits(block_hash, uses)
