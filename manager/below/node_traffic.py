"""Reads and writes of one tier behind a node: jobs in flight, breakers and counters.

Used under the manager's lock. Each job is one message to the node and one answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ...handlers.node.path_wire import GetJob, JobDone, PutJob, unpack_outcomes
from ...tiers.base import BlockHash, BlockOutcome
from ...tiers.breaker import Breaker
from ...tiers.nvme.path.path_messages import Why
from ..counters import LinkCounters
from .node_feed import NodeFeed
from .node_inbox import NodeInbox
from .port import Ended, Put

STALLED_S = 15.0
"""Time limit in seconds. If transfers in one direction are in flight and none ends for so long,
this counts as a failure."""
SILENCE = frozenset({BlockOutcome.IO_ERROR, BlockOutcome.NO_SPACE})
"""Outcomes of reads caused by a failing device; every other outcome concerns the block."""
LOST = frozenset({BlockOutcome.CORRUPT, BlockOutcome.GONE})
"""Outcomes of reads after which the block is not in the tier."""
NO_ROOM_PAUSE_S = 0.05
"""Time for which no put is started after one that found no room."""
DIED = JobDone(0)
"""Stands for the answer of a node that died."""


class NodeClient(Protocol):
    """The scheduler's side of a node."""

    def submit(self, order: Callable[[int], Any], on_end: Callable[[Any], None]) -> bool:
        """Take a job, built from its ticket. Return False if it cannot be taken now.

        It may be sent as late as at the next `flush`, `poll` or `wait`.

        `on_end` gets the answer, or None if the process died. It may be called by any thread that
        calls a method of this class.
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

    def wait(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        """Poll until the condition holds or the time is over. Return True if it holds."""
        ...

    def kill(self) -> bool:
        """Kill the process. Return True if no job is left."""
        ...


Feed = TypeVar("Feed", bound=NodeInbox)


@dataclass(frozen=True, slots=True)
class NodeFlow(Generic[Feed]):
    """Parts that the reads and the writes of a tier share."""

    client: NodeClient
    feed: Feed
    counters: LinkCounters
    clock: Callable[[], float]
    block_bytes: int


class Going(NamedTuple):
    """One job in flight."""

    ticket: int
    keys: Sequence[BlockHash]
    started_s: float


class Traffic(ABC, Generic[Feed]):
    """Jobs of one direction."""

    def __init__(self, flow: NodeFlow[Feed], breaker: Breaker) -> None:
        self._flow = flow
        self.breaker = breaker
        self.jobs: dict[int, Going] = {}
        self.open_tickets: set[int] = set()
        """Tickets without an answer from the node. Any thread that waits removes some."""
        self.ended: list[Ended] = []
        """Jobs that ended and were not reported."""

    def _submit(self, going: Going, order: Callable[[int], Any]) -> bool:
        ticket = going.ticket
        self.jobs[ticket] = going
        self.open_tickets.add(ticket)
        if self._flow.client.submit(order, partial(self._arrived, going)):
            self.breaker.started()
            return True
        del self.jobs[ticket]
        self.open_tickets.discard(ticket)
        return False

    def _arrived(self, going: Going, done: JobDone | None) -> None:
        """Queue the end of a job; any thread."""
        self._flow.feed.end(partial(self._end, going), done)
        self.open_tickets.discard(going.ticket)

    def _end(self, going: Going, done: JobDone | None) -> None:
        """Conclude a job, under the manager's lock."""
        del self.jobs[going.ticket]
        n = len(going.keys)
        if done is None:
            self._land(going, [BlockOutcome.IO_ERROR] * n, DIED)
        else:
            self._land(going, unpack_outcomes(done.outcomes, n), done)

    @abstractmethod
    def _land(self, going: Going, outcomes: list[BlockOutcome], done: JobDone) -> None:
        """Count a job that ended, and report it; `done` is `DIED` if the node died."""


class NodeReads(Traffic[Feed]):
    """All reads from the tier."""

    def __init__(self, flow: NodeFlow[Feed], stall_s: float) -> None:
        """If reads are in flight and none ends for `stall_s` seconds, this counts as a failure."""
        super().__init__(flow, Breaker(flow.clock, stall_s))

    def get(self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """Start reading blocks."""
        going = Going(ticket, keys, self._flow.clock())
        order = self._order(keys, array("i", slots).tobytes())
        if order is None or not self._submit(going, order):
            self._flow.counters.promote_failed_blocks += len(keys)
            self.ended.append(Ended(ticket, True, 1, [BlockOutcome.CANCELLED] * len(keys)))

    def _order(self, keys: Sequence[BlockHash], slots: bytes) -> Callable[[int], Any] | None:
        """Return what builds the message of a job from its ticket; None: do not start it."""
        return lambda number: GetJob(number, list(keys), slots)

    def _land(self, going: Going, outcomes: list[BlockOutcome], done: JobDone) -> None:
        flow, counters = self._flow, self._flow.counters
        arrived = outcomes.count(BlockOutcome.OK)
        if arrived < len(outcomes):
            corrupt, gone = outcomes.count(BlockOutcome.CORRUPT), outcomes.count(BlockOutcome.GONE)
            counters.promote_corrupt_blocks += corrupt
            counters.promote_gone_blocks += gone
            counters.promote_failed_blocks += len(outcomes) - arrived - corrupt - gone
        counters.promote_s += done.time_s
        counters.promote_latencies_s.append(flow.clock() - going.started_s)
        counters.promoted_blocks += arrived
        counters.promoted_bytes += arrived * flow.block_bytes
        self.breaker.ended(arrived == 0 and SILENCE.issuperset(outcomes))
        size_bytes = arrived * flow.block_bytes
        self.ended.append(Ended(going.ticket, True, 1, outcomes, size_bytes, done.time_s))


class NodeWrites(Traffic[NodeFeed]):
    """All writes into the tier."""

    def __init__(self, flow: NodeFlow[NodeFeed], max_blocks: int, *, has_one_path: bool) -> None:
        """At most `max_blocks` are in flight."""
        super().__init__(flow, Breaker(flow.clock, STALLED_S, failures_to_open=1))
        self._max_blocks = max_blocks
        self._has_one_path = has_one_path
        self._no_room_until_s = flow.clock()
        self._why = Why.GRANTED
        self.coming: set[BlockHash] = set()
        """Blocks whose write is in flight; lookups do not find them."""
        self.may_recover = True
        """True if the last failure came from the device or the node, not from lack of room."""

    @property
    def is_open(self) -> bool:
        """True while nothing may be written."""
        return self.breaker.is_open or not self._flow.feed.can_write

    def room(self, n: int) -> int:
        """Return how many of `n` blocks may be started."""
        if self._flow.clock() < self._no_room_until_s:
            return 0
        return min(n, self._max_blocks - len(self.coming))

    def put(self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> Sequence[Put]:
        """Start writing as many blocks as may be in flight."""
        if self.is_open:
            return [Put.RESTING] * len(keys)
        find, coming = self._flow.feed.find, self.coming
        new = [at for at, key in enumerate(keys) if key not in coming and find(key) < 0]
        if not new:
            return [Put.ALREADY] * len(keys)
        room, answer = self.room(len(new)), Put.FULL if self._why is Why.FULL else Put.LATER
        left_bytes = self._budget_left_bytes()
        if room and left_bytes is not None and left_bytes < room * self._flow.block_bytes:
            room, answer = left_bytes // self._flow.block_bytes, Put.OVER_BUDGET
            self._flow.counters.demote_over_budget_blocks += len(new) - room
        started = new[:room]
        if started and not self._start(ticket, keys, slots, started):
            started, answer = [], Put.NOT_TAKEN
        return answers_to_put(len(keys), new, started, answer)

    def _budget_left_bytes(self) -> int | None:
        figures = self._flow.feed.figures
        if figures is None or figures.budget_left_bytes is None:
            return None
        return max(0, figures.budget_left_bytes - len(self.coming) * self._flow.block_bytes)

    def _start(
        self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int], started: list[int]
    ) -> bool:
        if len(started) < len(keys):
            keys, slots = [keys[at] for at in started], [slots[at] for at in started]
        going = Going(ticket, keys, self._flow.clock())
        packed, epoch = array("i", slots).tobytes(), self._flow.feed.epoch
        if self._submit(going, lambda number: PutJob(number, list(keys), packed, epoch)):
            self.coming.update(keys)
            return True
        self.breaker.trip()
        self.may_recover = True
        return False

    def _land(self, going: Going, outcomes: list[BlockOutcome], done: JobDone) -> None:
        flow, counters = self._flow, self._flow.counters
        self.coming.difference_update(going.keys)
        stored, failed, no_space = outcomes.count(BlockOutcome.OK), 0, 0
        if stored < len(outcomes):
            failed = outcomes.count(BlockOutcome.IO_ERROR)
            no_space = outcomes.count(BlockOutcome.NO_SPACE)
            refused = outcomes.count(BlockOutcome.REFUSED)
            counters.demote_held_blocks += outcomes.count(BlockOutcome.HELD)
            counters.demote_no_space_blocks += refused + no_space
            counters.demote_failed_blocks += failed
        counters.demote_s += done.time_s
        counters.demote_latencies_s.append(flow.clock() - going.started_s)
        counters.demoted_blocks += stored
        counters.demoted_bytes += stored * flow.block_bytes
        flow.feed.blocks += stored
        self._why = done.why
        if self._why is not Why.GRANTED:
            self._no_room_until_s = flow.clock() + NO_ROOM_PAUSE_S
        self.breaker.ended(self._is_failure(failed, no_space))
        self.may_recover = no_space == 0
        size_bytes = stored * flow.block_bytes
        self.ended.append(Ended(going.ticket, False, 1, outcomes, size_bytes, done.time_s))

    def _is_failure(self, failed: int, no_space: int) -> bool:
        """Return True if blocks could not be written, and the tier has no other place to try.

        The writer rests a path whose writes fail, and grants slots in the others. If it grants none
        because all rest, it says so.
        """
        if not self._has_one_path:
            return self._why is Why.RESTING
        # A full disk fails like any other one; a full tier says so before anything is written.
        return failed > 0 or (no_space > 0 and self._why not in (Why.FULL, Why.BUDGET))


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
