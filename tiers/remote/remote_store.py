"""`RemoteStore`: blocks by key in a remote engine, for one owner that never waits.

The owner is one thread. It looks blocks up (`ask`), reads (`get`), writes (`put`), and collects the
outcomes (`poll`). Calls of the engine run on an executor. One deadline covers lookup and read: an
owner that waited for a lookup gives its read the remaining time. The owner chooses and bounds what
it writes, as with `OfferRule`.

A payload arrives in private memory, is verified, and is then copied into the destination. The copy
is made under a lock of its read, and never after the read has ended, because the destination may
then hold another block.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ...config.remote import WriteWhen
from ..base import BlockHash
from ..breaker import Breaker
from .base import RemoteEngine, RemoteOutcome
from .lane import FEWEST_CALLS, CallLimit, Errand, Lane, TokenBucket
from .lookups import LookupJob, RemoteCore, RemoteLookups
from .objects import ObjectFormat
from .presence import PresenceMemory
from .reads import Reads, RemoteRead
from .remote_counters import RemoteCounters, Verb
from .remote_job import RemoteJob
from .shared_generation import SharedGeneration
from .uploads import UploadJob, Uploads

_Job = TypeVar("_Job", bound=RemoteJob)

LOOKUPS_AT_A_TIME = 2
BYTES_AT_A_TIME = 128 << 20
"""Limit on the payload of concurrent reads, and on that of concurrent writes, above `FEWEST_CALLS`
calls: each of them may have a copy in memory."""
NAMES_PER_CALL_MAX = 64
"""Limit on the blocks of one call, however small they are."""
SLOW_SHARE = 4
"""A call is slow after this part of the time that the engine gives one request, and brief before
this part of a deadline."""
CLOSE_ROUND_S = 0.005
"""Time between two looks at what is under way while the store closes."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Limits of a store, and of the rule by which its owner writes."""

    deadline_s: float = 2.0
    """Longest time that an answer takes, and a read unless its caller says less."""
    renew_after_s: float = 0.0
    """Time after which `OfferRule` wants a block that is there and in use again, lest it expire."""
    reads_at_a_time: int = 4
    """Limit on concurrent reads, see `CallLimit`."""
    writes_at_a_time: int = 2
    """Limit on concurrent writes."""
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    when: WriteWhen = WriteWhen.SECOND_TOUCH
    """Use at which `OfferRule` wants a block."""
    queue_bytes: int = 256 << 20
    """Limit of `OfferRule` on the payload bytes of blocks that wait to be written or are being
    written."""
    queue_s: float = 10.0
    """Longest time that a block waits to be written."""

    @property
    def threads(self) -> int:
        """Number of threads that an executor for the store needs."""
        return LOOKUPS_AT_A_TIME + self.reads_at_a_time + self.writes_at_a_time


@dataclass(frozen=True, slots=True)
class RemoteEnded:
    """The end of one call of `ask`, `get` or `put`; each is reported once."""

    ticket: int
    kind: Verb
    """`LOOKUP`, `READ` or `WRITE`."""
    outcomes: Sequence[RemoteOutcome]
    """One outcome for each block of the call."""


@dataclass(frozen=True, slots=True)
class RemoteState:
    """Work under way in a store."""

    generation: int | None
    """None while it is unknown."""
    mark: int
    """Mark of the last reset by any host, as far as known; 0 if there was none."""
    own_mark: int | None
    """Mark of the last reset of this store, or else of the one before its start."""
    is_reset_pending: bool
    """True from `reset` until the server is told."""
    resting: frozenset[Verb]
    """Directions whose breaker is open."""
    openings: Mapping[Verb, int]
    """Number of openings of each direction's breaker."""


def most_per_call(engine: RemoteEngine, payload_bytes: int) -> int:
    """Return the largest number of blocks of one read or write."""
    together = min(NAMES_PER_CALL_MAX, engine.bytes_per_call // payload_bytes)
    return max(engine.names_per_call, together)


class RemoteStore:
    """One namespace in one engine. Methods are for the owner's thread; only `close` waits."""

    def __init__(
        self,
        engine: RemoteEngine,
        objects: ObjectFormat,
        executor: Executor,
        options: StoreOptions,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        on_ended: Callable[[], None] = lambda: None,
        *,
        was_reset: bool = False,
    ) -> None:
        """The executor needs `options.threads` threads; its owner shuts it down after `close`.

        `clock` returns monotonic seconds, `wall_clock` Unix time. `on_ended` is called, on any
        thread, when `poll` has something new. `was_reset`: the owner was reset since its start,
        when it had another store.
        """
        self._options = options
        self._clock = clock
        self._on_ended = on_ended
        memory, counters = PresenceMemory(clock), RemoteCounters()

        def asked(outcome: RemoteOutcome, requests: int, took_s: float) -> None:
            counters.note(Verb.GENERATION, [outcome], requests=requests, took_s=took_s)

        generation = SharedGeneration(
            engine,
            objects.counter_name,
            objects.marks_name,
            clock,
            wall_clock,
            memory.forget_all,
            asked,
            was_reset=was_reset,
            may_begin=options.when is not WriteWhen.OFF,
        )
        self._core = RemoteCore(engine, objects, generation, memory, counters, clock)
        self._lookups, self._uploads = RemoteLookups(self._core), Uploads(self._core)
        self._reads = Reads(self._core, options.deadline_s / SLOW_SHARE)

        stall_s = max(options.deadline_s, engine.timeout_s)
        # A write that ends well may take its limit, and a request that began within it.
        write_s = max(stall_s, engine.timeout_s * (engine.names_per_call + 1))

        call_bytes = objects.payload_bytes * most_per_call(engine, objects.payload_bytes)
        most = max(FEWEST_CALLS, BYTES_AT_A_TIME // call_bytes)

        def lane(calls: int, rate: float | None, late: RemoteOutcome, stall_s: float) -> Lane:
            limit = CallLimit(min(calls, most), engine.timeout_s / SLOW_SHARE)
            breaker = Breaker(clock, stall_s)
            return Lane(executor, clock, limit, breaker, TokenBucket(rate, clock), late)

        reads, writes = options.reads_at_a_time, options.writes_at_a_time
        self._asking = lane(LOOKUPS_AT_A_TIME, None, RemoteOutcome.TIMED_OUT, stall_s)
        self._reading = lane(reads, options.read_bytes_per_s, RemoteOutcome.DROPPED, stall_s)
        self._writing = lane(writes, options.write_bytes_per_s, RemoteOutcome.DROPPED, write_s)
        self._gathered: list[LookupJob] = []
        """Lookups of this step."""
        self._awaited: dict[tuple[Verb, int], RemoteJob] = {}
        """Lookups and reads whose end was not polled, by kind and ticket."""
        self._ended: deque[RemoteEnded] = deque()
        self._is_telling = False

    # -- lookups -----------------------------------------------------------------------------

    def ask(
        self,
        ticket: int,
        keys: Sequence[BlockHash],
        chains: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Look blocks up; `send` makes one batch of what was asked in a step.

        `chains`: numbers of the blocks of each prefix chain, head first. A chain has blocks of one
        KV group. None: all blocks are one chain. A ticket has one lookup at a time.
        """
        ends_s = self._clock() + self._options.deadline_s
        job = LookupJob(ticket, keys, (), ends_s, chains=chains or [range(len(keys))])
        self._awaited[job.kind, ticket] = job
        if keys and self._asking.is_open:
            self._gathered.append(job)
        else:
            self._give_up_lookups([job], RemoteOutcome.RESTING)

    def send(self) -> None:
        """Ask what was gathered, in one batch. Call it at the end of each step."""
        jobs, self._gathered = self._gathered, []
        if jobs:
            self._asking.add(
                Errand(
                    max(job.ends_s for job in jobs),
                    0,
                    partial(self._answer, jobs),
                    partial(self._give_up_lookups, jobs),
                    lambda: not any(job.left for job in jobs),
                )
            )
        self._pump()

    def _answer(self, jobs: Sequence[LookupJob]) -> RemoteOutcome:
        worst = self._lookups.answer(jobs)
        self._report(*jobs)
        return worst

    def _give_up_lookups(self, jobs: Sequence[LookupJob], outcome: RemoteOutcome) -> None:
        for job in jobs:
            self._core.give_up(job, range(len(job.keys)), outcome)
        self._report(*jobs)

    # -- reads -------------------------------------------------------------------------------

    def get(
        self,
        ticket: int,
        keys: Sequence[BlockHash],
        destinations: Sequence[memoryview],
        limit_s: float | None = None,
    ) -> None:
        """Read blocks into contiguous memory of the payload's length each, or a multiple of it.

        The read takes `limit_s` at most; None: a whole deadline, because nobody waited before it.

        The destinations are the store's until the read has ended. A block whose outcome is not `OK`
        left its destination as it was. A ticket has one read at a time.
        """
        left_s = self._options.deadline_s if limit_s is None else limit_s
        job = RemoteRead(ticket, keys, destinations, self._clock() + left_s)
        self._awaited[job.kind, ticket] = job
        reads = self._reads
        self._begin(self._reading, job, reads.read, reads.give_up, partial(reads.is_over, job))

    # -- writes ------------------------------------------------------------------------------

    def put(
        self,
        ticket: int,
        keys: Sequence[BlockHash],
        payloads: Sequence[memoryview],
        mark: int | None = None,
    ) -> None:
        """Write blocks in prefix order, while their bytes are in memory.

        `mark` is the mark of the last reset before the blocks were stored. None stands for the last
        `reset` of this store, or for the last one before its start. After a later reset the blocks
        are dropped.

        Payloads must not change until `poll` has reported the ticket.
        """
        ends_s, epoch = self._clock() + self._options.queue_s, self._core.memory.epoch
        job = UploadJob(ticket, keys, payloads, ends_s, epoch=epoch, mark=mark)
        uploads = self._uploads
        is_stale = partial(uploads.is_stale, job)
        self._begin(self._writing, job, uploads.write, self._core.give_up, is_stale)

    # -- jobs --------------------------------------------------------------------------------

    def _begin(
        self,
        lane: Lane,
        job: _Job,
        work: Callable[[_Job, range], RemoteOutcome],
        give_up: Callable[[_Job, range, RemoteOutcome], None],
        is_over: Callable[[], bool],
    ) -> None:
        """Add a job to a lane in parts that suit the engine, or give it up; see `Errand`."""
        n, engine = len(job.keys), self._core.engine
        if not (n and lane.is_open):
            give_up(job, range(n), RemoteOutcome.RESTING)
            self._report(job)
            return
        most = most_per_call(engine, self._core.objects.payload_bytes)
        part = max(engine.names_per_call, min(most, math.ceil(n / lane.calls)))
        for start in range(0, n, part):
            numbers = range(start, min(start + part, n))

            def run(numbers: range = numbers) -> RemoteOutcome:
                worst = work(job, numbers)
                self._report(job)
                return worst

            def drop(outcome: RemoteOutcome, numbers: range = numbers) -> None:
                give_up(job, numbers, outcome)
                self._report(job)

            n_bytes = len(numbers) * self._core.objects.payload_bytes
            lane.add(Errand(job.ends_s, n_bytes, run, drop, is_over))

    def _report(self, *jobs: RemoteJob) -> None:
        """Report the ends of jobs that have ended, and were not reported. Any thread."""
        for job in jobs:
            outcomes = job.take_end()
            if outcomes is not None:
                self._ended.append(RemoteEnded(job.ticket, job.kind, outcomes))
                self._on_ended()

    # -- outcomes and upkeep -------------------------------------------------------------------

    def poll(self) -> list[RemoteEnded]:
        """Return what ended since the last call; what is past its deadline ends now."""
        self._pump()
        self._expire()
        found: list[RemoteEnded] = []
        while self._ended:
            ended = self._ended.popleft()
            self._awaited.pop((ended.kind, ended.ticket), None)
            found.append(ended)
        return found

    def reset(self, mark: int = 0, *, is_new: bool = True, known: int | None = None) -> None:
        """Make every older block unreachable, for all hosts as soon as the server is told.

        Until it is told, this store neither reads nor writes. For the rest see `SharedGeneration`.
        """
        self._core.memory.clear()
        self._core.generation.reset(mark, is_new=is_new, known=known)
        self._core.memory.clear()  # answers of the older generation may have come in between
        self._give_up_awaited(RemoteOutcome.ABSENT)
        self._writing.drop_all()
        self.read_generation()

    @property
    def counters(self) -> RemoteCounters:
        """Totals since the start."""
        return self._core.counters

    def state(self) -> RemoteState:
        """Return what is under way, for metrics and tools."""
        lanes = {Verb.LOOKUP: self._asking, Verb.READ: self._reading, Verb.WRITE: self._writing}
        return RemoteState(
            self._core.generation.value,
            self._core.generation.mark,
            self._core.generation.own_mark,
            self._core.generation.is_reset_pending,
            frozenset(verb for verb, lane in lanes.items() if not lane.is_open),
            {verb: lane.breaker.openings for verb, lane in lanes.items()},
        )

    def engine_memory(self) -> bytes:
        """Return what the engine of the next process has to know."""
        return self._core.engine.memory()

    def close(self, limit_s: float) -> bool:
        """Begin nothing any more, wait for calls under way, and close the engine.

        Wait at most `limit_s`, the only wait of the store. Nothing is written to a destination any
        more. Return True if all calls have ended; payloads of the others stay borrowed.
        """
        lanes = (self._asking, self._reading, self._writing)
        for lane in lanes:
            lane.close()
        ends_s = time.monotonic() + limit_s
        while not all(lane.is_idle for lane in lanes) and time.monotonic() < ends_s:
            time.sleep(CLOSE_ROUND_S)
        self._give_up_awaited(RemoteOutcome.DROPPED)
        self._core.engine.close()
        return all(lane.is_idle for lane in lanes)

    def _give_up_awaited(self, outcome: RemoteOutcome) -> None:
        for job in self._awaited.values():
            job.give_up(outcome, waits=True)
        self._report(*self._awaited.values())

    def read_generation(self) -> None:
        """Read or raise the generation on a thread, unless that is being done.

        The owner calls it at the start, so that later resets by other hosts are noticed.
        """
        if self._is_telling or not self._asking.is_open:
            return
        self._is_telling = True
        limit_s = self._core.engine.timeout_s

        def tell() -> RemoteOutcome:
            outcome = self._core.generation.refresh(limit_s)
            self._is_telling = False
            return outcome

        def give_up(outcome: RemoteOutcome) -> None:
            self._is_telling = False

        self._asking.add(Errand(self._clock() + limit_s, 0, tell, give_up))

    def _pump(self) -> None:
        for lane in (self._asking, self._reading, self._writing):
            lane.pump()
        generation = self._core.generation
        if generation.is_reset_pending or generation.is_due:
            self.read_generation()

    def _expire(self) -> None:
        """End lookups and reads whose deadline has passed, though their calls go on."""
        now_s = self._clock()
        for job in self._awaited.values():
            if job.ends_s <= now_s and job.give_up(RemoteOutcome.TIMED_OUT, waits=False):
                self._report(job)
