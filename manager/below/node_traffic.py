"""Reads and writes of one tier behind a node: jobs in flight, breakers and counters.

Used under the manager's lock. Each job is one message to the node and one answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from ...handlers.node.path_wire import GetJob, JobDone, PutJob, unpack_outcomes
from ...tiers.base import BlockHash, BlockOutcome
from ...tiers.breaker import Breaker
from ...tiers.nvme.path.path_messages import Why
from ..counters import LinkCounters
from .node_feed import NodeFeed
from .port import Ended, Put
from .tier_reads import SILENCE
from .tier_writes import STALLED_S, answers_to_put

NO_ROOM_PAUSE_S = 0.05
"""Time for which no put is started after one that found no room."""


class NodeClient(Protocol):
    """The scheduler's side of a node."""

    def submit(self, order: Callable[[int], Any], on_end: Callable[[Any], None]) -> bool:
        """Send a job, built from its ticket. Return False if it cannot be taken now.

        `on_end` gets the answer, or None if the process died. It may be called by any thread that
        calls a method of this class.
        """
        ...

    def tell(self, message: Any) -> None:
        """Send a note that has no answer; it is lost if the node is not up."""
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


class JobEnds(Protocol):
    """Queue of the ends of jobs, which the manager's thread works off."""

    def end(self, on_end: Callable[[JobDone | None], None], done: JobDone | None) -> None:
        """Queue the end of a job; any thread."""
        ...


Feed = TypeVar("Feed", bound=JobEnds)


@dataclass(frozen=True, slots=True)
class NodeFlow(Generic[Feed]):
    """Parts that the reads and the writes of a tier share."""

    client: NodeClient
    feed: Feed
    counters: LinkCounters
    clock: Callable[[], float]
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Going:
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
        self._land(going, done)

    @abstractmethod
    def _land(self, going: Going, done: JobDone | None) -> None:
        """Count a job that ended, and report it; `done` is None if the node died."""

    def _outcomes(self, going: Going, done: JobDone | None) -> list[BlockOutcome]:
        n = len(going.keys)
        return [BlockOutcome.IO_ERROR] * n if done is None else unpack_outcomes(done.outcomes, n)


class NodeReads(Traffic[Feed]):
    """All reads from the tier."""

    def __init__(self, flow: NodeFlow[Feed], stall_s: float) -> None:
        """If reads are in flight and none ends for `stall_s` seconds, this counts as a failure."""
        super().__init__(flow, Breaker(flow.clock, stall_s))

    def get(self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """Start reading blocks."""
        going = Going(ticket, keys, self._flow.clock())
        packed = np.array(slots, dtype=np.int32).tobytes()
        if not self._submit(going, lambda number: GetJob(number, list(keys), packed)):
            self._flow.counters.promote_failed_blocks += len(keys)
            self.ended.append(Ended(ticket, True, 1, [BlockOutcome.CANCELLED] * len(keys)))

    def _land(self, going: Going, done: JobDone | None) -> None:
        flow, counters = self._flow, self._flow.counters
        outcomes, time_s = self._outcomes(going, done), 0.0 if done is None else done.time_s
        arrived = outcomes.count(BlockOutcome.OK)
        corrupt, gone = outcomes.count(BlockOutcome.CORRUPT), outcomes.count(BlockOutcome.GONE)
        counters.promote_s += time_s
        counters.promote_latencies_s.append(flow.clock() - going.started_s)
        counters.promoted_blocks += arrived
        counters.promoted_bytes += arrived * flow.block_bytes
        counters.promote_corrupt_blocks += corrupt
        counters.promote_gone_blocks += gone
        counters.promote_failed_blocks += len(outcomes) - arrived - corrupt - gone
        self.breaker.ended(SILENCE.issuperset(outcomes))
        counters.promote_openings = self.breaker.openings
        size_bytes = arrived * flow.block_bytes
        self.ended.append(Ended(going.ticket, True, 1, outcomes, size_bytes, time_s))


class NodeWrites(Traffic[NodeFeed]):
    """All writes into the tier."""

    def __init__(self, flow: NodeFlow[NodeFeed], max_blocks: int) -> None:
        """At most `max_blocks` are in flight."""
        super().__init__(flow, Breaker(flow.clock, STALLED_S, failures_to_open=1))
        self._max_blocks = max_blocks
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
        room, answer = self.room(len(new)), self._refusal
        left_bytes = self._budget_left_bytes()
        if room and left_bytes is not None and left_bytes < room * self._flow.block_bytes:
            room, answer = left_bytes // self._flow.block_bytes, Put.OVER_BUDGET
            self._flow.counters.demote_over_budget_blocks += len(new) - room
        started = new[:room]
        if started and not self._start(ticket, keys, slots, started):
            started, answer = [], Put.NOT_TAKEN
        return answers_to_put(len(keys), new, started, answer)

    @property
    def _refusal(self) -> Put:
        return Put.FULL if self._why is Why.FULL else Put.LATER

    def _budget_left_bytes(self) -> int | None:
        figures = self._flow.feed.figures
        if figures is None or figures.budget_left_bytes is None:
            return None
        return max(0, figures.budget_left_bytes - len(self.coming) * self._flow.block_bytes)

    def _start(
        self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int], started: list[int]
    ) -> bool:
        going = Going(ticket, [keys[at] for at in started], self._flow.clock())
        packed = np.array([slots[at] for at in started], dtype=np.int32).tobytes()
        epoch = self._flow.feed.epoch
        if self._submit(going, lambda number: PutJob(number, list(going.keys), packed, epoch)):
            self.coming.update(going.keys)
            return True
        self.breaker.trip()
        self.may_recover = True
        self._flow.counters.demote_openings = self.breaker.openings
        return False

    def _land(self, going: Going, done: JobDone | None) -> None:
        flow, counters = self._flow, self._flow.counters
        outcomes, time_s = self._outcomes(going, done), 0.0 if done is None else done.time_s
        self.coming.difference_update(going.keys)
        stored = outcomes.count(BlockOutcome.OK)
        counters.demote_s += time_s
        counters.demote_latencies_s.append(flow.clock() - going.started_s)
        counters.demoted_blocks += stored
        counters.demoted_bytes += stored * flow.block_bytes
        counters.demote_held_blocks += outcomes.count(BlockOutcome.HELD)
        no_space = outcomes.count(BlockOutcome.REFUSED) + outcomes.count(BlockOutcome.NO_SPACE)
        counters.demote_no_space_blocks += no_space
        counters.demote_failed_blocks += outcomes.count(BlockOutcome.IO_ERROR)
        flow.feed.blocks += stored
        self._why = Why.GRANTED if done is None else done.why
        if self._why is not Why.GRANTED:
            self._no_room_until_s = flow.clock() + NO_ROOM_PAUSE_S
        self.breaker.ended(BlockOutcome.IO_ERROR in outcomes)
        self.may_recover = BlockOutcome.NO_SPACE not in outcomes
        counters.demote_openings = self.breaker.openings
        size_bytes = stored * flow.block_bytes
        self.ended.append(Ended(going.ticket, False, 1, outcomes, size_bytes, time_s))
