"""Shared parts of tiers behind a node: `SingleTier`, its jobs, and the notes of its node.

Each job is one message to the node and one answer. The lock of the caller guards all state here:
the manager's, or that of the secondary tier. The client receives only inside calls of the tier, so
answers and notes land under that lock. `wait` alone is called without it, and receives nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ...handlers.node.node_keeper import JOBS_AT_MOST, MakeJob
from ...handlers.node.path_wire import GetJob, JobDone, unpack_outcomes
from ...logs import get_logger
from ...tiers.base import BlockHash, BlockOutcome
from ...tiers.breaker import Breaker
from ...tiers.nvme.path.path_messages import pack_slots
from ..counters import LinkCounters
from .port import Below, Ended, Put, TierFacts

NODE_STOP_S = 1.0
"""Minimum time in seconds that a node gets to end its transfers at a shutdown."""
STALLED_S = 15.0
"""Time limit in seconds. If transfers in one direction are in flight and none ends for so long,
this counts as a failure."""
PUTS_AT_MOST = JOBS_AT_MOST // 2
"""Largest number of puts in flight. The node takes reads, questions and resets beside them."""
MAX_MARKS = 64
"""Most marks of resets that are kept until they are taken."""
SILENCE = frozenset({BlockOutcome.IO_ERROR, BlockOutcome.NO_SPACE})
"""Outcomes of reads caused by a failing device; every other outcome concerns the block."""
LOST = frozenset({BlockOutcome.CORRUPT, BlockOutcome.GONE})
"""Outcomes of reads after which the block is not in the tier."""
DIED = JobDone(0)
"""Stands for the answer of a node that died."""
_SILENT = "tier %s: its node has ended no transfer for %.0f s; it is stopped, or the device hangs"

_log = get_logger(__name__)


class NodeClient(Protocol):
    """The scheduler's side of a node."""

    def submit(self, make_job: MakeJob, on_end: Callable[[Any], None]) -> bool:
        """Take a job. Return False if it cannot be taken now.

        `make_job` builds the message. Its ticket is a number of the client, not that of the port.
        The message may be sent as late as at the next `flush`, `poll` or `wait_for_news`.

        `on_end` gets the answer, or None if the process died. `poll`, `listen` and `kill` call it,
        and so does a later `submit`, but never the one that took the job.
        """
        ...

    def tell(self, message: Any) -> None:
        """Take a note that has no answer, as `submit`; it is lost if the node is not up."""
        ...

    def flush(self) -> None:
        """Send what was taken; never blocks."""
        ...

    def poll(self) -> None:
        """Receive what came; never blocks."""
        ...

    def listen(self) -> None:
        """Poll for maintenance, unless the last poll was very recent."""
        ...

    def wait_for_news(self, limit_s: float) -> None:
        """Send what was taken. Wait until there may be something to receive, or for a moment.

        It receives nothing. Any thread may call it.
        """
        ...

    def replace(self) -> None:
        """Kill the process, and start another one. Its jobs end while the caller polls, once it is
        dead."""
        ...

    def kill(self) -> bool:
        """Kill the process. Return True if no job is left."""
        ...


class TierFeed(ABC):
    """State that follows the notes of one node. The lock of the tier's caller guards it."""

    def __init__(self) -> None:
        self.counters = LinkCounters()
        """Traffic of the tier, and evictions from it."""
        self.marks: list[int] = []
        """Marks of resets by other engines that were not taken yet."""

    @abstractmethod
    def take(self, note: Any) -> None:
        """Take in a note; None if the process of the node died."""


Feed = TypeVar("Feed", bound=TierFeed)


@dataclass(frozen=True, slots=True)
class TierCore(Generic[Feed]):
    """Parts that the reads and the writes of a tier share."""

    client: NodeClient
    feed: Feed
    clock: Callable[[], float]
    block_bytes: int
    ended: list[Ended] = field(default_factory=list)
    """Jobs that ended and were not reported."""


class JobInFlight(NamedTuple):
    """A `get` or `put` of the port that the node has not answered."""

    ticket: int
    """Number of the job at the port."""
    keys: Sequence[BlockHash]
    started_s: float
    resets: int
    """Number of resets before it, as its direction counts them."""


class Traffic(ABC, Generic[Feed]):
    """Jobs of one direction. The lock of the tier's caller guards them."""

    def __init__(self, core: TierCore[Feed], breaker: Breaker) -> None:
        self._core = core
        self.breaker = breaker
        self.jobs: dict[int, JobInFlight] = {}
        self.unwritten_blocks = 0
        """Number of blocks of puts that failed or never began."""

    def _submit(
        self, ticket: int, keys: Sequence[BlockHash], make_job: MakeJob, resets: int = 0
    ) -> bool:
        """Start a job. Return False if the node cannot take it now."""
        job = self.jobs[ticket] = JobInFlight(ticket, keys, self._core.clock(), resets)
        if self._core.client.submit(make_job, partial(self._end, job)):
            self.breaker.started()
            return True
        del self.jobs[ticket]
        return False

    def _end(self, job: JobInFlight, done: JobDone | None) -> None:
        """Conclude a job. After an interrupt, a job may end twice. Raises `WireError`."""
        n = len(job.keys)
        if done is None:
            done, outcomes = DIED, [BlockOutcome.IO_ERROR] * n
        else:
            outcomes = unpack_outcomes(done.outcomes, n)
        if self.jobs.pop(job.ticket, None) is not None:
            self._land(job, outcomes, done)

    def _count_put(
        self, job: JobInFlight, outcomes: list[BlockOutcome], done: JobDone
    ) -> tuple[int, int, int]:
        """Count a put that ended. Return its numbers of OK, IO_ERROR and NO_SPACE."""
        core, counters = self._core, self._core.feed.counters
        stored, failed, no_space = outcomes.count(BlockOutcome.OK), 0, 0
        if stored < len(outcomes):
            failed = outcomes.count(BlockOutcome.IO_ERROR)
            no_space = outcomes.count(BlockOutcome.NO_SPACE)
            counters.demote_held_blocks += outcomes.count(BlockOutcome.HELD)
            counters.demote_no_space_blocks += no_space
            counters.demote_failed_blocks += failed
            self.unwritten_blocks += failed + outcomes.count(BlockOutcome.CANCELLED)
        counters.demote_s += done.time_s
        counters.demote_latencies_s.append(core.clock() - job.started_s)
        counters.demoted_blocks += stored
        counters.demoted_bytes += stored * core.block_bytes
        return stored, failed, no_space

    @abstractmethod
    def _land(self, job: JobInFlight, outcomes: list[BlockOutcome], done: JobDone) -> None:
        """Count a job that ended, and report it; `done` is `DIED` if the node died."""


class NodeReads(Traffic[Feed]):
    """All reads from the tier."""

    def __init__(self, core: TierCore[Feed], stall_s: float) -> None:
        """If reads are in flight and none ends for `stall_s` seconds, this counts as a failure."""
        super().__init__(core, Breaker(core.clock, stall_s))

    def get(self, ticket: int, keys: Sequence[BlockHash], make_job: MakeJob | None) -> None:
        """Start reading blocks. Without `make_job`, all of them end as CANCELLED."""
        if make_job is None or not self._submit(ticket, keys, make_job):
            self._core.feed.counters.promote_failed_blocks += len(keys)
            cancelled = [BlockOutcome.CANCELLED] * len(keys)
            self._core.ended.append(Ended(ticket, True, 1, cancelled))

    def _land(self, job: JobInFlight, outcomes: list[BlockOutcome], done: JobDone) -> None:
        core, counters = self._core, self._core.feed.counters
        arrived = outcomes.count(BlockOutcome.OK)
        if arrived < len(outcomes):
            corrupt, gone = outcomes.count(BlockOutcome.CORRUPT), outcomes.count(BlockOutcome.GONE)
            counters.promote_corrupt_blocks += corrupt
            counters.promote_gone_blocks += gone
            counters.promote_failed_blocks += len(outcomes) - arrived - corrupt - gone
        counters.promote_s += done.time_s
        counters.promote_latencies_s.append(core.clock() - job.started_s)
        counters.promoted_blocks += arrived
        counters.promoted_bytes += arrived * core.block_bytes
        self.breaker.ended(arrived == 0 and SILENCE.issuperset(outcomes))
        size_bytes = arrived * core.block_bytes
        core.ended.append(Ended(job.ticket, True, 1, outcomes, size_bytes, done.time_s))


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


Writes = TypeVar("Writes", bound=Traffic[Any])


class SingleTier(Below, Generic[Feed, Writes]):
    """One tier, whose blocks a node moves. A subclass sets `reads` and `writes`.

    The caller's lock guards all of it; the callbacks of the client run inside its calls.

    A reset is sent to the node, and again to the next node if that one dies before it answered.
    """

    reads: NodeReads[Any]
    writes: Writes
    feed: Feed

    def __init__(
        self,
        client: NodeClient,
        feed: Feed,
        facts: TierFacts,
        clock: Callable[[], float],
    ) -> None:
        """`client` has `feed` take the node's notes. `clock` returns monotonic seconds."""
        self.tiers = (facts,)
        self.links = (feed.counters,)
        self.feed = feed
        self._medium = facts.medium
        self._client = client
        self._clock = clock
        self._core = TierCore(client, feed, clock, facts.block_bytes)
        self._resets_due = 0
        """Number of resets that no node has carried out."""
        self._make_reset: MakeJob | None = None
        """Function that builds the message of the last reset from its ticket."""
        self._is_reset_sent = False

    def get(self, ticket: int, tier: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> None:
        assert tier == 1, "there is one tier"
        make_job = partial(GetJob, keys=list(keys), arena_slots=pack_slots(slots))
        self.reads.get(ticket, keys, make_job)

    def poll(self) -> Sequence[Ended]:
        reads, writes, counters = self.reads, self.writes, self.links[0]
        if reads.jobs or writes.jobs:
            self._client.poll()
        for traffic in (reads, writes):
            if traffic.jobs and traffic.breaker.look_at_clock():
                _log.warning(_SILENT, self.tiers[0].name, traffic.breaker.stall_s)
        counters.promote_openings = reads.breaker.openings
        counters.demote_openings = writes.breaker.openings
        if not self._core.ended:
            return ()
        ended = self._core.ended.copy()
        self._core.ended.clear()
        return ended

    @property
    def unwritten_blocks(self) -> int:
        return self.writes.unwritten_blocks

    def take_marks(self) -> Sequence[int]:
        marks, self.feed.marks = self.feed.marks, []
        return marks

    def wait(self, limit_s: float) -> bool:
        is_busy = bool(self.reads.jobs or self.writes.jobs)
        if is_busy:
            self._client.wait_for_news(limit_s)
        return is_busy

    def shutdown(self, deadline_s: float) -> bool:
        self._client.poll()
        least_s = self._clock() + NODE_STOP_S
        busy = [each for each in (self.reads, self.writes) if each.jobs]
        # A device that hangs would take the time of the other tiers, too.
        hangs = all(each.breaker.is_stalled for each in busy)
        deadline_s = least_s if hangs else max(deadline_s, least_s)
        while self.reads.jobs or self.writes.jobs:
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                return self._client.kill()
            self._client.wait_for_news(left_s)
            self._client.poll()
        return True

    # -- inside ------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Take in what the node said, and send a reset that no node has."""
        self._client.listen()
        if self._resets_due and not self._is_reset_sent:
            self._send_reset()

    def _begin_reset(self, make_job: MakeJob) -> None:
        self._make_reset = make_job
        self._resets_due += 1
        self._send_reset()

    def _send_reset(self) -> None:
        due, make_reset = self._resets_due, self._make_reset
        assert make_reset is not None, "a reset is due"
        self._is_reset_sent = self._client.submit(make_reset, partial(self._end_reset, due))

    def _end_reset(self, due: int, done: Any) -> None:
        if done is None:
            self._is_reset_sent = False  # `maintain` sends it to the next node
        elif due == self._resets_due:
            self._resets_due, self._is_reset_sent = 0, False
            self._after_reset(done)

    @abstractmethod
    def _after_reset(self, done: Any) -> None:
        """Find blocks again: the node has carried out the last reset."""
