"""The remote tier below: `RemoteTier` implements the port `Below` with messages to a node.

Nothing is known of a block until the server was asked. `may_hold` answers from memory, and unknown
blocks are asked for at the end of the step. A block whose write, read or question failed is a miss.
One deadline covers question and read: nothing here makes the engine wait longer.

The tier never holds up the tiers above. A block that it does not take now is UNWANTED, so that it
may be evicted above. The block is offered again at its next use.

Until a reset is answered, nothing is found and reads end as GONE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...handlers.node.path_wire import JobDone, PutJob
from ...handlers.node.remote.remote_wire import FetchJob, RemoteResetJob, ResetDone
from ...tiers.base import BlockHash, BlockOutcome, new_reset_mark
from ...tiers.breaker import Breaker
from ...tiers.nvme.path.path_messages import pack_slots
from ...tiers.remote.remote_store import StoreOptions
from ...tiers.remote.uploads import Offer, OfferRule
from ..base import BlockEvent
from ..core import MAX_JOBS_IN_FLIGHT
from ..state import TierState
from .port import LOAD_RATIO_MAX_REMOTE, Ended, Put, TierFacts, WriteState
from .remote_feed import Questions, RemoteFeed
from .single_tier import (
    LOST,
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

MEDIUM = "REMOTE"
UNBOUNDED_BLOCKS = 1 << 40
"""Capacity of a tier that has none of its own."""
_THERE = (BlockOutcome.OK, BlockOutcome.HELD)
_UNSENT = (Offer.FULL, Offer.RESTING)


def remote_facts(name: str, block_bytes: int) -> TierFacts:
    """Return the facts of a remote tier."""
    return TierFacts(
        name, MEDIUM, block_bytes, UNBOUNDED_BLOCKS, LOAD_RATIO_MAX_REMOTE, is_elsewhere=True
    )


class RemoteTier(SingleTier[RemoteFeed, "_RemoteWrites"]):
    """One tier on a server, whose blocks a node moves.

    The server keeps its own order of eviction, by its own reads, so uses are not reported.
    """

    def __init__(
        self,
        client: NodeClient,
        feed: RemoteFeed,
        facts: TierFacts,
        limits: StoreOptions,
        clock: Callable[[], float],
        *,
        stall_s: float,
        with_events: bool = True,
        new_mark: Callable[[], int] = new_reset_mark,
    ) -> None:
        """`client` has `feed` take the node's notes. `clock` returns monotonic seconds.

        `limits`: those of the node's store. `stall_s`: time limit for stalled reads in seconds.
        `new_mark` returns the mark of a reset that begins now.
        """
        super().__init__(client, feed, facts, clock)
        self._memory = memory = feed.memory
        self._known_until_s = memory.until.get
        self._questions = Questions(client, feed, clock, limits.deadline_s, self._may_ask)
        self._ask = self._questions.ask
        self.reads = _RemoteReads(self._core, stall_s)
        rule = OfferRule(
            limits.when, limits.queue_bytes, facts.block_bytes, memory, limits.renew_after_s, clock
        )
        self.writes = _RemoteWrites(self._core, rule, self._note_stored)
        self._with_events = with_events
        self._new_mark = new_mark
        self._events: list[BlockEvent] = []
        self._blocks = 0
        """Number of blocks that this engine stored since the last reset."""
        self._reset = (0, True)
        """Mark of the resets that are due, and whether one of them is this engine's own."""

    # -- keys ------------------------------------------------------------------------------

    def may_hold(
        self, key: BlockHash, media: frozenset[str] | None = None, owner: object = None
    ) -> int:
        if media is not None and self._medium not in media:
            return 0
        until_s = self._known_until_s(key)
        if until_s is not None:  # as `PresenceMemory.of` does, without its call
            now_s = self._clock()
            if until_s >= now_s:
                return 1
            if -until_s >= now_s:
                return 0
        return 0 if owner is None else self._ask(key, owner)

    def wants_again(self, key: BlockHash) -> bool:
        return self.writes.rule.may_want(key)

    def get(self, ticket: int, tier: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> None:
        assert tier == 1, "there is one tier"
        limit_s, packed = self._questions.left_s(keys), pack_slots(slots)
        make_job = partial(FetchJob, keys=list(keys), arena_slots=packed, limit_s=limit_s)
        self.reads.get(ticket, keys, make_job if limit_s > 0 else None)

    def put(self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> Sequence[Put]:
        self.feed.has_blocks = True
        return self.writes.put(ticket, keys, slots, may_send=self._may_send)

    # -- outcomes --------------------------------------------------------------------------

    def poll(self) -> Sequence[Ended]:
        """See `Below`. Requests also wait for answers that are neither reads nor writes."""
        if self._questions.asked and not (self.reads.jobs or self.writes.jobs):
            self._client.poll()
        return super().poll()

    def take_events(self) -> list[BlockEvent]:
        events, self._events = self._events, []
        return events

    # -- whether it takes anything -----------------------------------------------------------

    def room(self, n: int) -> int:
        return n

    @property
    def takes_puts(self) -> bool:
        return True

    @property
    def takes_all(self) -> bool:
        return self._may_send and self.writes.rule.takes_all and not self.writes.breaker.is_open

    @property
    def is_blocked(self) -> bool:
        return len(self.writes.jobs) >= MAX_JOBS_IN_FLIGHT

    def rests(self, tier: int) -> bool:
        return self.reads.breaker.is_open or self.feed.has_failed

    def latency_s(self, tier: int) -> float:
        return self.feed.latency_s

    def write_state(self) -> WriteState:
        return WriteState(self.writes.breaker.is_stalled)

    # -- upkeep ------------------------------------------------------------------------------

    def maintain(self) -> bool:
        self._listen()
        self._questions.send()
        was_reset = self.feed.was_reset()
        if was_reset:
            self._forget()
        return was_reset

    def reset(self, mark: int = 0) -> None:
        self._reset_to(mark or self._new_mark(), is_new=True)

    def pass_on(self, mark: int) -> None:
        self._reset_to(mark, is_new=False)

    def state(self) -> list[TierState]:
        (facts,) = self.tiers
        return [
            TierState(
                facts.name,
                facts.medium,
                facts.block_bytes,
                blocks=self._blocks,
                capacity_blocks=facts.capacity,
                dirty_blocks=0,
                waiting_blocks=sum(len(job.keys) for job in self.reads.jobs.values()),
                demote_jobs=len(self.writes.jobs),
                is_blocked=self.writes.breaker.is_open or not self.feed.is_up,
                is_reporter=False,  # nobody knows how many blocks a server holds
                remote=self.feed.totals(),
                remote_calls_s=self.feed.calls_s,
            )
        ]

    # -- inside ------------------------------------------------------------------------------

    @property
    def _may_send(self) -> bool:
        return self._is_reset_sent if self._resets_due else self.feed.mark is not None

    def _may_ask(self) -> bool:
        return not (self._resets_due or self.reads.breaker.is_open)

    def _reset_to(self, mark: int, *, is_new: bool) -> None:
        if self._resets_due:
            mark, is_new = max(mark, self._reset[0]), is_new or self._reset[1]
        self._reset = mark, is_new
        self._forget()
        self._events.clear()
        self.feed.begin_reset(is_new=is_new)
        known = self.feed.known
        self._begin_reset(lambda ticket: RemoteResetJob(ticket, mark, is_new, known))

    def _after_reset(self, done: ResetDone) -> None:
        self.feed.end_reset(done.mark)

    def _forget(self) -> None:
        """Forget what older blocks became; their transfers under way leave nothing behind."""
        self._memory.clear()
        self._questions.clear()
        self._blocks = 0

    def _note_stored(self, keys: Sequence[BlockHash]) -> None:
        self._blocks += len(keys)
        if self._with_events and keys:
            self._events.append(BlockEvent(tuple(keys), self._medium, False, self.tiers[0].name))


class _RemoteReads(NodeReads[RemoteFeed]):
    """All reads from the tier. A block that was not there is absent for some seconds."""

    def _land(self, job: JobInFlight, outcomes: list[BlockOutcome], done: JobDone) -> None:
        super()._land(job, outcomes, done)
        lost = [k for k, outcome in zip(job.keys, outcomes, strict=True) if outcome in LOST]
        memory = self._core.feed.memory
        memory.note(memory.epoch, (), lost)


class _RemoteWrites(Traffic[RemoteFeed]):
    """All writes into the tier."""

    def __init__(
        self,
        core: TierCore[RemoteFeed],
        rule: OfferRule,
        on_stored: Callable[[Sequence[BlockHash]], None],
    ) -> None:
        super().__init__(core, Breaker(core.clock, STALLED_S))
        self.rule = rule
        self._memory = core.feed.memory
        self._on_stored = on_stored

    def put(
        self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int], *, may_send: bool
    ) -> Sequence[Put]:
        """Start writing the blocks that the rule wants."""
        is_open = may_send and not self.breaker.is_open
        offers = [self.rule.answer(key, is_open) for key in keys]
        self._core.feed.unsent.update(offer.value for offer in offers if offer in _UNSENT)
        queued = Offer.QUEUED
        started = [at for at, offer in enumerate(offers) if offer is queued]
        if started and not self._start(
            ticket, [keys[at] for at in started], [slots[at] for at in started]
        ):
            started = []
        new = [at for at, offer in enumerate(offers) if offer is not Offer.HELD]
        return answers_to_put(len(keys), new, started, Put.UNWANTED)

    def _start(self, ticket: int, keys: list[BlockHash], slots: list[int]) -> bool:
        packed, mark, epoch = pack_slots(slots), self._core.feed.mark, self._memory.epoch
        make_job = partial(PutJob, keys=list(keys), arena_slots=packed, epoch=mark)
        if len(self.jobs) < PUTS_AT_MOST and self._submit(ticket, keys, make_job, epoch):
            return True
        self.rule.end(keys, (), epoch)
        self._core.feed.unsent[Offer.RESTING.value] += len(keys)
        return False

    def _land(self, job: JobInFlight, outcomes: list[BlockOutcome], done: JobDone) -> None:
        epoch = job.resets
        held = [k for k, o in zip(job.keys, outcomes, strict=True) if o in _THERE]
        self.rule.end(job.keys, held, epoch)
        stored, failed, _ = self._count_put(job, outcomes, done)
        size_bytes = stored * self._core.block_bytes
        self.breaker.ended(failed > 0)
        if epoch == self._memory.epoch:
            self._on_stored(held)
        else:  # a reset came meanwhile
            outcomes = [BlockOutcome.GONE] * len(outcomes)
        given = [o if o in _THERE else BlockOutcome.REFUSED for o in outcomes]
        self._core.ended.append(Ended(job.ticket, False, 1, given, size_bytes, done.time_s))
