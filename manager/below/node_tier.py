"""The tier below behind a node: `NodeTier` implements the port `Below` with messages to a node.

The node moves the blocks and talks to the writer of the path, who decides about slots, eviction and
budget. This process holds no slots and no policy. A lookup is one search in mapped memory.

A reset is sent to the node, and again to the next node if that one dies first. Until it is
answered, nothing is found and reads end as GONE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from ...handlers.node.path_wire import CAN_READ, JobDone, NodeState, ResetJob, UseNote
from ...tiers.base import BlockHash
from ..admission import EnduranceWatch
from ..base import BlockEvent
from ..counters import LinkCounters
from ..state import TierState
from .node_feed import MapTable, NodeFeed
from .node_traffic import STALLED_S, NodeClient, NodeFlow, NodeReads, NodeWrites
from .port import Below, Ended, Put, TierFacts, WriteState

NODE_STOP_S = 1.0
"""Minimum time in seconds that a node gets to end its transfers at a shutdown."""
OnNote = Callable[[Any], None]
MAX_PUT_BYTES = 4 << 30
"""Largest number of bytes of puts in flight."""


@dataclass(frozen=True, slots=True)
class NodeTierOptions:
    """Properties of a tier behind a node."""

    facts: TierFacts
    map_table: MapTable
    """Function that maps a presence table; it runs on `executor`."""
    executor: Executor
    stall_s: float = STALLED_S
    """Time limit for stalled reads in seconds."""
    with_events: bool = True
    wants_chains: bool = False
    """Whether the policy of the tier uses chains."""
    paths: int = 1
    """Number of the tier's paths."""


class NodeTier(Below):
    """One tier, whose blocks a node moves."""

    def __init__(
        self,
        client_of: Callable[[OnNote], NodeClient],
        options: NodeTierOptions,
        clock: Callable[[], float],
    ) -> None:
        """`client_of` makes the client of the node; it calls its argument with the node's notes.

        `clock` returns monotonic seconds.
        """
        facts = options.facts
        self.tiers = (facts,)
        self.links = (LinkCounters(),)
        self.feed = NodeFeed(
            facts.name, facts.medium, options.map_table, options.executor, options.with_events
        )
        self.departures = (self.feed.departures,)
        client = client_of(self.feed.take)
        flow = NodeFlow(client, self.feed, self.links[0], clock, facts.block_bytes)
        most = max(1, min(facts.capacity, MAX_PUT_BYTES // facts.block_bytes))
        self.reads = NodeReads(flow, options.stall_s)
        self.writes = NodeWrites(flow, most, has_one_path=options.paths == 1)
        self._client = client
        self._clock = clock
        self._medium = facts.medium
        self._coming = self.writes.coming
        self._wants_chains = options.wants_chains
        self._watch = EnduranceWatch(facts.name, self.feed.day_totals, clock)
        self._resets_due = 0
        """Number of resets that no node has carried out."""
        self._reset_mark = 0
        """Mark of the last one."""
        self._is_reset_sent = False

    # -- keys ------------------------------------------------------------------------------

    def may_hold(self, key: BlockHash, media: frozenset[str] | None = None) -> int:
        if media is not None and self._medium not in media:
            return 0
        if self.feed.find(key) < 0:
            return 0
        return 0 if key in self._coming else 1

    def get(self, ticket: int, tier: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> None:
        assert tier == 1, "there is one tier"
        self.reads.get(ticket, keys, slots)

    def put(self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> Sequence[Put]:
        return self.writes.put(ticket, keys, slots)

    def touch(self, keys: Sequence[BlockHash]) -> None:
        self._client.tell(UseNote(list(keys)))

    def settle(self, keys: Sequence[BlockHash]) -> None:
        self._client.tell(UseNote(list(keys), is_settle=True))

    def chain(self, keys: Sequence[BlockHash]) -> bool:
        if self._wants_chains:
            self._client.tell(UseNote(list(keys), is_chain=True))
        return self._wants_chains

    # -- outcomes --------------------------------------------------------------------------

    def poll(self) -> Sequence[Ended]:
        reads, writes = self.reads, self.writes
        if reads.jobs or writes.jobs:
            self._client.poll()
        self.feed.process()
        reads.breaker.look_at_clock()
        writes.breaker.look_at_clock()
        counters = self.links[0]
        counters.promote_openings = reads.breaker.openings
        counters.demote_openings = writes.breaker.openings
        if not (reads.ended or writes.ended):
            return ()
        ended = [*reads.ended, *writes.ended]
        reads.ended.clear()
        writes.ended.clear()
        return ended

    def take_lost(self) -> list[BlockHash]:
        lost = self.feed.lost
        if lost:
            self.feed.lost = []
        return lost

    def take_events(self) -> list[BlockEvent]:
        events = self.feed.events.take()
        self._ask_for_keys()
        return events

    # -- whether it takes anything -----------------------------------------------------------

    def room(self, n: int) -> int:
        return self.writes.room(n)

    @property
    def takes_puts(self) -> bool:
        return not self.writes.is_open

    @property
    def is_blocked(self) -> bool:
        return self.writes.breaker.is_resting or self.feed.state is NodeState.OFF

    def rests(self, tier: int) -> bool:
        return self.reads.breaker.is_open or self.feed.state not in CAN_READ

    def write_state(self) -> WriteState:
        breaker, feed = self.writes.breaker, self.feed
        may_recover = self.writes.may_recover and feed.state is not NodeState.OFF
        return WriteState(breaker.is_stalled, breaker.rest_left_s, may_recover)

    # -- upkeep ------------------------------------------------------------------------------

    def maintain(self) -> int:
        """See `Below`. Jobs and notes of the step are sent together here."""
        self._client.listen()
        self.feed.process()
        if self._resets_due and not self._is_reset_sent:
            self._send_reset()
        self._ask_for_keys()
        if self.feed.is_reporter:  # the others would say the same
            self._watch.check()
        self._client.flush()
        return 1 if self.feed.was_reset() else 0

    def reset(self, mark: int = 0) -> None:
        self.feed.begin_reset()
        self._reset_mark = mark
        self._coming.clear()
        self._resets_due += 1
        self._send_reset()
        self._client.flush()

    def take_marks(self) -> Sequence[int]:
        marks = self.feed.marks
        if marks:
            self.feed.marks = []
        return marks

    def wait(self, tickets: set[int], limit_s: float) -> None:
        reads, writes = self.reads.open_tickets, self.writes.open_tickets
        mine = {ticket for ticket in tickets if ticket in reads or ticket in writes}
        if mine:
            self._client.wait(lambda: mine.isdisjoint(reads) and mine.isdisjoint(writes), limit_s)

    def shutdown(self, deadline_s: float) -> bool:
        left_s = max(NODE_STOP_S, deadline_s - self._clock())
        has_ended = self._client.wait(self._is_quiet, left_s) or self._client.kill()
        self.feed.process()
        return has_ended

    def state(self) -> list[TierState]:
        (facts,), figures = self.tiers, self.feed.figures
        return [
            TierState(
                facts.name,
                facts.medium,
                facts.block_bytes,
                blocks=self.feed.blocks,
                capacity_blocks=facts.capacity,
                dirty_blocks=0,
                waiting_blocks=sum(len(job.keys) for job in self.reads.jobs.values()),
                demote_jobs=len(self.writes.jobs),
                is_blocked=not self.takes_puts,
                budget_left_bytes=None if figures is None else figures.budget_left_bytes,
                day=self.feed.day_totals(),
                is_reporter=self.feed.is_reporter,
            )
        ]

    # -- inside ------------------------------------------------------------------------------

    def _is_quiet(self) -> bool:
        return not (self.writes.open_tickets or self.reads.open_tickets)

    def _ask_for_keys(self) -> None:
        question = self.feed.events.question()
        if question is not None:
            self._client.tell(question)

    def _send_reset(self) -> None:
        due, mark = self._resets_due, self._reset_mark

        def end(done: JobDone | None) -> None:
            self.feed.end(lambda answer: self._end_reset(due, answer), done)

        self._is_reset_sent = self._client.submit(lambda ticket: ResetJob(ticket, mark), end)

    def _end_reset(self, due: int, done: JobDone | None) -> None:
        if done is None:
            self._is_reset_sent = False  # `maintain` sends it to the next node
        elif due == self._resets_due:
            self._resets_due, self._is_reset_sent = 0, False
            self.feed.end_reset()
