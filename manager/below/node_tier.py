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

from ...handlers.node.path_wire import CAN_READ, JobDone, NodeState, ResetJob, UseNote
from ...tiers.base import BlockHash
from ..admission import EnduranceWatch
from ..base import BlockEvent
from ..state import TierState
from .node_feed import MapTable, NodeFeed
from .node_traffic import STALLED_S, NodeClient, NodeFlow, NodeReads, NodeWrites
from .port import Put, TierFacts, WriteState
from .single_tier import OnNote, SingleTier

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


class NodeTier(SingleTier[NodeFeed, NodeWrites]):
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
        feed = NodeFeed(
            facts.name, facts.medium, options.map_table, options.executor, options.with_events
        )
        client = client_of(feed.take)
        super().__init__(client, feed, facts, feed.departures, clock)
        flow = NodeFlow(client, feed, self.links[0], clock, facts.block_bytes)
        most = max(1, min(facts.capacity, MAX_PUT_BYTES // facts.block_bytes))
        self.reads = NodeReads(flow, options.stall_s)
        self.writes = NodeWrites(flow, most, has_one_path=options.paths == 1)
        self._medium = facts.medium
        self._coming = self.writes.coming
        self._wants_chains = options.wants_chains
        self._watch = EnduranceWatch(facts.name, self.feed.day_totals, clock)

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

    def take_lost(self) -> list[BlockHash]:
        lost = self.feed.lost
        if lost:
            self.feed.lost = []
        return lost

    def take_events(self) -> list[BlockEvent]:
        return self.feed.events.take()

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
        self._listen()
        question = self.feed.events.question()
        if question is not None:
            self._client.tell(question)
        if self.feed.is_reporter:  # the others would say the same
            self._watch.check()
        self._client.flush()
        return 1 if self.feed.was_reset() else 0

    def reset(self, mark: int = 0) -> None:
        self._reset_to(mark, is_own=True)

    def pass_on(self, mark: int) -> None:
        self._reset_to(mark, is_own=False)

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

    def _reset_to(self, mark: int, *, is_own: bool) -> None:
        self.feed.begin_reset(is_own=is_own)
        self._coming.clear()
        self._begin_reset(lambda ticket: ResetJob(ticket, mark, not is_own))
        self._client.flush()

    def _after_reset(self, done: JobDone) -> None:
        self.feed.end_reset()
