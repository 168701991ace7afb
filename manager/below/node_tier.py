"""A tier on disk: `NodeTier` implements the port `Below` with messages to a node.

The node moves the blocks and talks to the writer of the path, which decides about slots, eviction
and budget. This process holds no slots and no policy. A lookup is one search in mapped memory.

Until a reset is answered, nothing is found and reads end as GONE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from functools import partial

from ...handlers.node.path_wire import JobDone, NodeState, PutJob, ResetJob
from ...tiers.base import BlockHash, BlockOutcome
from ...tiers.breaker import Breaker
from ...tiers.nvme.path.path_messages import Touch, Why, pack_slots
from ..admission import EnduranceWatch
from ..base import BlockEvent
from ..core import MAX_JOBS_IN_FLIGHT
from ..state import TierState
from .node_feed import NodeFeed
from .port import Ended, Put, TierFacts, WriteState
from .single_tier import (
    PUTS_AT_MOST,
    STALLED_S,
    JobInFlight,
    NodeClient,
    NodeReads,
    SingleTier,
    TierCore,
    Traffic,
    answers_to_put,
)

NO_ROOM_PAUSE_S = 0.05
"""Time for which no put is started after one that found no room."""
FULL_LIMIT_S = 1.0
"""Time for which a tier counts as full after its writer had no room, and made none. The first tier
may drop blocks meanwhile that are not below."""
FAILURES_OF_SEVERAL_PATHS = MAX_JOBS_IN_FLIGHT + 1
"""Consecutive failed writes that let a tier of several paths rest. If one path fails, the writer
rests it, and at most the writes in flight fail."""
MAX_OVER_BUDGET = 1 << 17
"""Most blocks that are remembered because the write budget kept them out."""
MAX_PUT_BYTES = 4 << 30
"""Largest number of bytes of puts in flight."""


class NodeWrites(Traffic[NodeFeed]):
    """All writes into the tier."""

    def __init__(self, core: TierCore[NodeFeed], max_blocks: int, *, has_one_path: bool) -> None:
        """At most `max_blocks` are in flight."""
        failures = 1 if has_one_path else FAILURES_OF_SEVERAL_PATHS
        super().__init__(core, Breaker(core.clock, STALLED_S, failures))
        self._max_blocks = max_blocks
        self._has_one_path = has_one_path
        self._no_room_until_s = core.clock()
        self._why = Why.GRANTED
        self.full_until_s = -math.inf
        """Time until which the tier counts as full: the writer had no room, and made none."""
        self.coming: set[BlockHash] = set()
        """Blocks whose write is in flight; lookups do not find them."""
        self.over_budget: dict[BlockHash, None] = {}
        """Blocks that were not written because the budget was spent; oldest first."""
        self._resets = 0
        """Number of resets. Jobs that were begun before the last one end as GONE."""
        self.may_recover = True
        """True if the last failure came from the device or the node, not from lack of room."""

    def room(self, n: int) -> int:
        """Return how many of `n` blocks may be started."""
        if len(self.jobs) >= PUTS_AT_MOST or self._core.clock() < self._no_room_until_s:
            return 0
        return min(n, self._max_blocks - len(self.coming))

    def outdate(self) -> None:
        """Let no write in flight stand for a block that is stored after a reset."""
        self._resets += 1
        self.coming.clear()
        self.over_budget.clear()

    def budget_blocks(self) -> float:
        """Return how many more blocks the write budget allows."""
        figures = self._core.feed.figures
        if figures is None or figures.budget_left_bytes is None:
            return math.inf
        return max(0, figures.budget_left_bytes // self._core.block_bytes - len(self.coming))

    def put(self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> Sequence[Put]:
        """Start writing as many blocks as may be in flight. Call it only while `takes_puts`."""
        core, coming, n = self._core, self.coming, len(keys)
        for key in keys if self.over_budget else ():
            self.over_budget.pop(key, None)
        find = core.feed.find
        new = [at for at, key in enumerate(keys) if key not in coming and find(key) < 0]
        room, answer = self.room(len(new)), Put.FULL if self._why is Why.FULL else Put.LATER
        if room > (left := self.budget_blocks()):
            room, answer = int(left), Put.OVER_BUDGET
            self._note_over_budget([keys[at] for at in new[room:]])
        started = new[:room]
        if len(started) < n:
            keys, slots = [keys[at] for at in started], [slots[at] for at in started]
        packed, epoch = pack_slots(slots), core.feed.epoch
        make_job = partial(PutJob, keys=list(keys), arena_slots=packed, epoch=epoch)
        if started and self._submit(ticket, keys, make_job, self._resets):
            coming.update(keys)
        elif started:
            self.breaker.trip()
            self.may_recover = True
            started, answer = [], Put.NOT_TAKEN
        return answers_to_put(n, new, started, answer)

    def _land(self, job: JobInFlight, outcomes: list[BlockOutcome], done: JobDone) -> None:
        core = self._core
        if job.resets == self._resets:
            self.coming.difference_update(job.keys)
        stored, failed, no_space = self._count_put(job, outcomes, done)
        if stored < len(outcomes):
            refused = BlockOutcome.REFUSED
            keys = [k for k, o in zip(job.keys, outcomes, strict=True) if o is refused]
            self._note_over_budget(keys)
        core.feed.blocks += stored
        self._why = done.why
        is_full = done.why is Why.FULL and not (stored or self.coming)
        self.full_until_s = core.clock() + FULL_LIMIT_S if is_full else -math.inf
        if self._why is not Why.GRANTED:
            self._no_room_until_s = core.clock() + NO_ROOM_PAUSE_S
        is_resting = self._why is Why.RESTING
        self.breaker.ended(is_resting or self._is_failure(stored, failed, no_space))
        if is_resting:  # whichever engine met the fault: the next one to try meets it, too
            self.breaker.trip()
        self.may_recover = no_space == 0
        size_bytes = stored * core.block_bytes
        core.ended.append(Ended(job.ticket, False, 1, outcomes, size_bytes, done.time_s))

    def _note_over_budget(self, keys: Sequence[BlockHash]) -> None:
        self._core.feed.counters.demote_over_budget_blocks += len(keys)
        self.over_budget |= dict.fromkeys(keys)
        while len(self.over_budget) > MAX_OVER_BUDGET:
            del self.over_budget[next(iter(self.over_budget))]

    def _is_failure(self, stored: int, failed: int, no_space: int) -> bool:
        """Return True if blocks could not be written.

        With several paths, a write that stored some blocks is none: another path takes the rest.
        """
        if stored and not self._has_one_path:
            return False
        # A full disk fails like any other one; a full tier says so before anything is written.
        return failed > 0 or (no_space > 0 and self._why not in (Why.FULL, Why.BUDGET))


class NodeTier(SingleTier[NodeFeed, NodeWrites]):
    """One tier of a path."""

    def __init__(
        self,
        client: NodeClient,
        feed: NodeFeed,
        facts: TierFacts,
        clock: Callable[[], float],
        *,
        stall_s: float = STALLED_S,
        wants_chains: bool = False,
        paths: int = 1,
    ) -> None:
        """`client` has `feed` take the node's notes. `clock` returns monotonic seconds.

        `stall_s`: time limit for stalled reads in seconds. `wants_chains`: the policy of the tier
        uses chains. `paths`: number of the tier's paths.
        """
        super().__init__(client, feed, facts, clock)
        most = max(1, min(facts.capacity, MAX_PUT_BYTES // facts.block_bytes))
        self.reads = NodeReads(self._core, stall_s)
        self.writes = NodeWrites(self._core, most, has_one_path=paths == 1)
        self._coming = self.writes.coming
        self._wants_chains = wants_chains
        self._watch = EnduranceWatch(facts.name, self.feed.day_totals, clock)

    # -- keys ------------------------------------------------------------------------------

    def may_hold(
        self, key: BlockHash, media: frozenset[str] | None = None, owner: object = None
    ) -> int:
        if media is not None and self._medium not in media:
            return 0
        return 0 if self.feed.find(key) < 0 or key in self._coming else 1

    def put(self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> Sequence[Put]:
        if not self.takes_puts:
            return [Put.RESTING] * len(keys)
        return self.writes.put(ticket, keys, slots)

    def touch(self, keys: Sequence[BlockHash]) -> None:
        self._client.tell(Touch(list(keys)))

    def note_request(self, keys: Sequence[BlockHash], counted: Container[BlockHash]) -> None:
        """Report the blocks of a request that ended, in prefix order, for another manager's jobs.

        The use of the blocks in `counted` was counted when they were stored or loaded.
        """
        if self._wants_chains:
            notes = [Touch(list(keys), is_chain=True)]
        else:
            stored: list[bytes] = [key for key in keys if key in counted]
            used: list[bytes] = [key for key in keys if key not in counted]
            notes = [Touch(stored, is_settle=True), Touch(used)]
        for note in notes:
            if note.keys:
                self._client.tell(note)

    def wants_again(self, key: BlockHash) -> bool:
        """See `Below`. True if only the budget kept the block out, and it is no longer spent."""
        writes = self.writes
        return key in writes.over_budget and writes.budget_blocks() > 0

    # -- outcomes --------------------------------------------------------------------------

    def take_lost(self) -> list[BlockHash]:
        lost, self.feed.lost = self.feed.lost, []
        return lost

    def take_events(self) -> list[BlockEvent]:
        return self.feed.events.take()

    # -- whether it takes anything -----------------------------------------------------------

    def room(self, n: int) -> int:
        return self.writes.room(n)

    @property
    def takes_puts(self) -> bool:
        return self.feed.can_write and not self.writes.breaker.is_open

    @property
    def is_blocked(self) -> bool:
        writes, is_off = self.writes, self.feed.state is NodeState.OFF
        return writes.breaker.is_resting or self._clock() < writes.full_until_s or is_off

    def rests(self, tier: int) -> bool:
        return self.reads.breaker.is_open or not self.feed.can_read

    def write_state(self) -> WriteState:
        breaker, feed = self.writes.breaker, self.feed
        may_recover = self.writes.may_recover and feed.state is not NodeState.OFF
        was_served = feed.folder is not None and feed.state not in (NodeState.OFF, NodeState.SILENT)
        is_joining = was_served and not feed.can_write
        return WriteState(breaker.is_stalled, breaker.rest_left_s, may_recover, is_joining)

    # -- upkeep ------------------------------------------------------------------------------

    def maintain(self) -> bool:
        """See `Below`. Jobs and notes of the step are sent together here."""
        self._listen()
        if self.feed.presence.wanted is not None:
            self.feed.map_on()
        events = self.feed.events
        if events.listed_to is not None and (question := events.question()) is not None:
            self._client.tell(question)
        # The engines that do not report would say the same.
        if self._clock() >= self._watch.due_s and self.feed.is_reporter:
            self._watch.check()
        self._client.flush()
        was_reset = self.feed.was_reset()
        if was_reset:
            self.writes.outdate()
        return was_reset

    def reset(self, mark: int = 0) -> None:
        self._reset_to(mark, is_own=True)

    def pass_on(self, mark: int) -> None:
        self._reset_to(mark, is_own=False)

    def abandon(self) -> None:
        """Kill the node. Its jobs fail while the caller polls, once it is dead."""
        self._client.replace()

    def state(self) -> list[TierState]:
        (facts,), figures = self.tiers, self.feed.figures
        return [
            TierState(
                facts.name,
                facts.medium,
                facts.block_bytes,
                blocks=self.feed.blocks,
                capacity_blocks=facts.capacity if figures is None else figures.capacity_blocks,
                dirty_blocks=0,
                waiting_blocks=sum(len(job.keys) for job in self.reads.jobs.values()),
                demote_jobs=len(self.writes.jobs),
                is_blocked=not self.takes_puts,
                budget_left_bytes=None if figures is None else figures.budget_left_bytes,
                day=self.feed.day_totals(),
                is_reporter=self.feed.is_reporter,
                is_path_reporter=figures is not None and figures.is_path_reporter,
            )
        ]

    # -- inside ------------------------------------------------------------------------------

    def _reset_to(self, mark: int, *, is_own: bool) -> None:
        self.feed.begin_reset(is_own=is_own)
        self.writes.outdate()
        self._begin_reset(lambda ticket: ResetJob(ticket, mark, not is_own))
        self._client.flush()

    def _after_reset(self, done: JobDone) -> None:
        self.feed.end_reset()
