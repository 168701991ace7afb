"""Jobs of a node: split into parts, carried out on I/O threads, answered when all parts ended.

No I/O happens here. `BlockIO` moves the parts on threads and calls back on the node's own thread.
So all methods are called by that one thread.

A put asks the writer for slots, writes parts into them, and commits each part as it ends. If the
writer is lost, its grants are void: parts that have not begun are cancelled, and what ends later is
not committed. These blocks count as CANCELLED and may be offered again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from ....tiers.base import BlockHash, BlockOutcome, SlotArray
from ....tiers.nvme.path.block_reader import BlocksRead
from ....tiers.nvme.path.block_writer import BlocksWritten
from ....tiers.nvme.path.path_messages import (
    ALREADY_SLOT,
    MAX_KEYS_PER_MESSAGE,
    Bad,
    Commit,
    CommitDone,
    Committed,
    FromNode,
    Grant,
    Granted,
    Read,
    Release,
    Reset,
    Welcome,
    Why,
    pack_checksums,
    pack_slots,
    unpack_slots,
)
from ..path_wire import (
    LIFE_INTERVAL_S,
    GetJob,
    JobDone,
    NodeReady,
    PutJob,
    ResetJob,
    pack_outcomes,
)

PART_BYTES = 8 << 20
"""Bytes of one part of a job, which one thread moves."""
NO_EPOCH = -1
"""Epoch of blocks that belong to none: two resets came after them."""
READ_REPORT_INTERVAL_S = 1.0
"""Time between two reports of the bytes read."""

_OF_COMMITTED = {
    Committed.OK: BlockOutcome.OK,
    Committed.ALREADY: BlockOutcome.HELD,
    Committed.STALE: BlockOutcome.GONE,
    Committed.IO_ERROR: BlockOutcome.IO_ERROR,
    Committed.NO_SPACE: BlockOutcome.NO_SPACE,
}
_OF_WHY = {
    Why.GRANTED: BlockOutcome.CANCELLED,
    Why.FULL: BlockOutcome.NO_SPACE,
    Why.LATER: BlockOutcome.CANCELLED,
    Why.BUDGET: BlockOutcome.REFUSED,
    Why.RESTING: BlockOutcome.CANCELLED,
}
"""Outcome of a block that got no slot. CANCELLED blocks are offered again."""

OnEnd = Callable[[object], None]


class BlockIO(Protocol):
    """I/O of a node: opens the files of a namespace, and moves parts between them and the arena."""

    def open(self, welcome: Welcome) -> str:
        """Open presence table and segments; return the namespace's first folder.

        Raises a `KVCascadeError`.
        """
        ...

    def release_writes(self) -> None:
        """Tell a later writer that no write under the former one is running; idempotent."""
        ...

    def forget_segments(self, numbers: Sequence[int]) -> None:
        """Close what is open of these segments."""
        ...

    def write(
        self,
        keys: Sequence[BlockHash],
        slots: Sequence[int],
        arena_slots: SlotArray,
        on_end: Callable[[BlocksWritten | None], None],
    ) -> None:
        """Write a part. `on_end` gets None if it was cancelled before it began, or if it raised."""
        ...

    def read(
        self,
        keys: Sequence[BlockHash],
        arena_slots: SlotArray,
        on_end: Callable[[BlocksRead | None], None],
    ) -> None:
        """Read a part. `on_end` gets None if the part failed in a way it should not."""
        ...

    def cancel_writes(self) -> None:
        """Cancel the writes that have not begun."""
        ...


@dataclass(slots=True)
class NodeJob:
    """A job of the scheduler that has not been answered."""

    ticket: int
    keys: Sequence[BlockHash]
    arena_slots: SlotArray
    outcomes: list[BlockOutcome]
    left: int
    """Number of blocks without an outcome."""
    created_s: float
    epoch: int | None = None
    """Epoch of the blocks of a put; None if it is that of the last reset."""
    why: Why = Why.GRANTED


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request to the writer that has not been answered: some blocks of a put."""

    job: NodeJob
    positions: Sequence[int]
    sent_s: float


@dataclass(slots=True)
class JobMeans:
    """Functions that the jobs use."""

    send: Callable[[FromNode], None]
    """Sends a message to the writer; drops it if no writer serves this node."""
    answer: Callable[[JobDone | NodeReady], None]
    """Sends a message to the scheduler."""
    io: BlockIO
    clock: Callable[[], float]
    """Monotonic seconds."""
    requests: Iterator[int] = field(default_factory=lambda: count(1))
    """Numbers of requests to the writer."""


class _Jobs:
    """Bookkeeping of both directions."""

    def __init__(self, means: JobMeans, block_bytes: int) -> None:
        self._means = means
        self._per_part = max(1, PART_BYTES // block_bytes)
        self._jobs: dict[int, NodeJob] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def _add(self, order: PutJob | GetJob) -> NodeJob:
        n = len(order.keys)
        job = NodeJob(
            order.ticket,
            [BlockHash(key) for key in order.keys],
            unpack_slots(order.arena_slots),
            [BlockOutcome.CANCELLED] * n,
            n,
            self._means.clock(),
        )
        self._jobs[order.ticket] = job
        if n == 0:
            self._end(job)
        return job

    def _parts(self, positions: Sequence[int]) -> Iterator[Sequence[int]]:
        for start in range(0, len(positions), self._per_part):
            yield positions[start : start + self._per_part]

    def _conclude(
        self, job: NodeJob, positions: Sequence[int], outcomes: Sequence[BlockOutcome]
    ) -> None:
        for position, outcome in zip(positions, outcomes, strict=True):
            job.outcomes[position] = outcome
        job.left -= len(positions)
        if job.left == 0:
            self._end(job)

    def _all(self, job: NodeJob, positions: Sequence[int], outcome: BlockOutcome) -> None:
        if positions:
            self._conclude(job, positions, [outcome] * len(positions))

    def _end(self, job: NodeJob) -> None:
        del self._jobs[job.ticket]
        is_ok = job.outcomes.count(BlockOutcome.OK) == len(job.outcomes)
        codes = b"" if is_ok else pack_outcomes(tuple(job.outcomes))
        time_s = self._means.clock() - job.created_s
        self._means.answer(JobDone(job.ticket, codes, time_s, job.why))


class GetJobs(_Jobs):
    """Reads of blocks into the arena."""

    def __init__(self, means: JobMeans, block_bytes: int) -> None:
        super().__init__(means, block_bytes)
        self._block_bytes = block_bytes
        self._serial = 0
        self._unreported_bytes = 0
        """Bytes read that the writer's totals lack."""
        self._reported_s = 0.0

    def begin(self, order: GetJob, *, may_read: bool) -> None:
        """Start a job. Without `may_read`, every block is GONE at once."""
        job = self._add(order)
        if not may_read:
            self._all(job, range(len(job.keys)), BlockOutcome.GONE)
            return
        for part in self._parts(range(len(job.keys))):
            self._begin_part(job, part)

    def forget(self) -> None:
        """Let every read in flight end as GONE: the namespace is being reset."""
        self._serial += 1

    def report_bytes(self) -> None:
        """Tell the writer the bytes that were read, if it is time. Call it while there is one."""
        now_s = self._means.clock()
        if self._unreported_bytes and now_s - self._reported_s >= READ_REPORT_INTERVAL_S:
            self._means.send(Read(self._unreported_bytes))
            self._reported_s, self._unreported_bytes = now_s, 0

    def _begin_part(self, job: NodeJob, part: Sequence[int]) -> None:
        serial = self._serial

        def end(done: BlocksRead | None) -> None:
            if done is None:
                self._all(job, part, BlockOutcome.IO_ERROR)
            elif serial != self._serial:
                self._all(job, part, BlockOutcome.GONE)
            else:
                self._note(done)
                self._conclude(job, part, done.outcomes)

        span = slice(part[0], part[-1] + 1)
        self._means.io.read(job.keys[span], job.arena_slots[span], end)

    def _note(self, done: BlocksRead) -> None:
        self._unreported_bytes += done.outcomes.count(BlockOutcome.OK) * self._block_bytes
        if done.bad:
            keys, slots, checksums = zip(*done.bad, strict=True)
            self._means.send(Bad(list(keys), pack_slots(slots), pack_checksums(checksums)))


class PutJobs(_Jobs):
    """Writes of blocks from the arena."""

    def __init__(self, means: JobMeans, block_bytes: int) -> None:
        super().__init__(means, block_bytes)
        self._grants: dict[int, _Asked] = {}
        self._commits: dict[int, _Asked] = {}
        self._writing = 0
        self.reset_epoch: int | None = None
        """Epoch that the last reset of this engine began; None if there was none."""
        self._link = 0
        """Serial number of the connection to the writer; parts of an older one are void."""

    @property
    def has_running_io(self) -> bool:
        """True while a thread may still write to a segment."""
        return self._writing > 0

    def oldest_request_s(self) -> float | None:
        """Return the time of the oldest request without an answer; None if there is none."""
        waiting = [*self._grants.values(), *self._commits.values()]
        return min((asked.sent_s for asked in waiting), default=None)

    def begin(self, order: PutJob, *, may_write: bool) -> None:
        """Start a job. Without `may_write`, every block is CANCELLED at once."""
        job = self._add(order)
        job.epoch = order.epoch
        everything = range(len(job.keys))
        if not may_write:
            job.why = Why.LATER
            self._all(job, everything, BlockOutcome.CANCELLED)
            return
        for start in range(0, len(job.keys), MAX_KEYS_PER_MESSAGE):
            part = everything[start : start + MAX_KEYS_PER_MESSAGE]
            request = next(self._means.requests)
            self._grants[request] = _Asked(job, part, self._means.clock())
            self._means.send(Grant(request, [bytes(job.keys[i]) for i in part]))

    def outdate(self) -> None:
        """Let the open jobs whose epoch is not known end as GONE: their blocks are of before the
        reset that is ordered now, and of after the one whose answer is awaited."""
        for job in self._jobs.values():
            if job.epoch is None:
                job.epoch = NO_EPOCH

    def granted(self, message: Granted) -> None:
        """Write the blocks that got slots.

        Slots of a request that was given up, or of blocks of another epoch, are released.
        """
        slots = unpack_slots(message.slots)
        asked = self._grants.pop(message.request, None)
        if asked is None or len(asked.positions) != len(slots):
            self._release(slots[slots >= 0].tolist())
            if asked is not None:
                self._all(asked.job, asked.positions, BlockOutcome.CANCELLED)
            return
        job, here = asked.job, list(zip(asked.positions, slots.tolist(), strict=True))
        if message.epoch != (self.reset_epoch if job.epoch is None else job.epoch):
            self._release(slots[slots >= 0].tolist())
            self._all(job, asked.positions, BlockOutcome.GONE)
            return
        going = [(position, slot) for position, slot in here if slot >= 0]
        held = [position for position, slot in here if slot == ALREADY_SLOT]
        none = [position for position, slot in here if slot < 0 and slot != ALREADY_SLOT]
        if none:
            job.why = message.why
        for part in self._parts(range(len(going))):
            self._begin_part(job, message.epoch, [going[i] for i in part])
        self._all(job, held, BlockOutcome.HELD)
        self._all(job, none, _OF_WHY[message.why])

    def committed(self, message: CommitDone) -> None:
        """Conclude the blocks of a commit."""
        asked = self._commits.pop(message.request, None)
        if asked is None:
            return
        if len(message.outcomes) != len(asked.positions):
            self._all(asked.job, asked.positions, BlockOutcome.IO_ERROR)
            return
        outcomes = [_OF_COMMITTED[Committed(code)] for code in message.outcomes]
        self._conclude(asked.job, asked.positions, outcomes)

    def writer_is_silent(self) -> None:
        """Give up the requests that wait for an answer; late grants are released."""
        self._give_up(self._grants)
        self._give_up(self._commits)

    def writer_is_lost(self) -> None:
        """Give up all requests. Grants are void; nothing is submitted under them any more."""
        self._link += 1
        self.writer_is_silent()
        self._means.io.cancel_writes()

    # -- inside --------------------------------------------------------------------------------

    def _begin_part(self, job: NodeJob, epoch: int, part: Sequence[tuple[int, int]]) -> None:
        link, self._writing = self._link, self._writing + 1
        positions = [position for position, _ in part]
        slots = [slot for _, slot in part]

        def end(done: BlocksWritten | None) -> None:
            self._writing -= 1
            if link != self._link:
                self._all(job, positions, BlockOutcome.CANCELLED)
            elif done is None:  # it was not cancelled, so it raised
                self._release(slots)
                self._all(job, positions, BlockOutcome.IO_ERROR)
            else:
                self._commit(job, epoch, part, done)

        keys = [job.keys[i] for i in positions]
        self._means.io.write(keys, slots, job.arena_slots[positions], end)

    def _commit(
        self, job: NodeJob, epoch: int, part: Sequence[tuple[int, int]], done: BlocksWritten
    ) -> None:
        if done.failed:
            self._release([part[i][1] for i in done.failed], has_failed=done.is_device_failure)
            failed = BlockOutcome.NO_SPACE if done.is_full else BlockOutcome.IO_ERROR
            self._all(job, [part[i][0] for i in done.failed], failed)
        if not done.written:
            return
        positions = [part[i][0] for i in done.written]
        request = next(self._means.requests)
        self._commits[request] = _Asked(job, positions, self._means.clock())
        self._means.send(
            Commit(
                request,
                epoch,
                [bytes(job.keys[i]) for i in positions],
                pack_slots([part[i][1] for i in done.written]),
                pack_checksums(done.checksums),
            )
        )

    def _release(self, slots: Sequence[int], *, has_failed: bool = False) -> None:
        if slots:
            self._means.send(Release(pack_slots(slots), has_failed))

    def _give_up(self, waiting: dict[int, _Asked]) -> None:
        given_up = list(waiting.values())
        waiting.clear()
        for asked in given_up:
            self._all(asked.job, asked.positions, BlockOutcome.CANCELLED)


class ResetJobs:
    """Resets that the scheduler asked for and the writer has not carried out."""

    def __init__(self, means: JobMeans) -> None:
        self._means = means
        self._last = ResetJob(0)
        """The last order. One request to the writer is enough for all that wait."""
        self._tickets: dict[int, list[int]] = {}
        """Tickets by request to the writer; 0 is the request of those that could not be sent."""
        self._shown_s = -math.inf
        """Time of the last sign of life."""

    def __len__(self) -> int:
        return len(self._tickets)

    def begin(self, order: ResetJob, *, may_send: bool) -> None:
        """Ask the writer for a reset. Without `may_send`, it waits for `send_waiting`."""
        self._last = order
        self._tickets.setdefault(0, []).append(order.ticket)
        if may_send:
            self.send_waiting()

    def send_waiting(self) -> None:
        """Ask the writer for the resets that could not be sent."""
        waiting = self._tickets.pop(0, None)
        if waiting is not None:
            request = next(self._means.requests)
            self._tickets[request] = waiting
            self._means.send(Reset(request, self._last.mark, self._last.is_passed_on))

    def answered(self, request: int) -> None:
        """Answer the scheduler: the writer has carried out this request."""
        for ticket in self._tickets.pop(request, ()):
            self._means.answer(JobDone(ticket))

    def writer_is_lost(self) -> None:
        """Let all of them wait for the next writer."""
        tickets = [ticket for some in self._tickets.values() for ticket in some]
        self._tickets = {0: tickets} if tickets else {}

    def show_life(self) -> None:
        """Say now and then that the node waits; a silent one would be ended."""
        now_s = self._means.clock()
        if self._tickets and now_s - self._shown_s >= LIFE_INTERVAL_S:
            self._shown_s = now_s
            self._means.answer(NodeReady())
