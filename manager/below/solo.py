"""One tier below, in this process: `SoloTier` implements the port `Below` over a `Backend`.

`SoloTier` owns the slots, eviction policy, room, growth, write budget and breakers of the tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...tiers.base import BlockHash
from ..admission import EnduranceWatch, PastUses
from ..base import BlockEvent
from ..counters import LinkCounters
from ..flow import Link
from ..level import Tier, Transfer
from ..state import TierState
from .port import Below, Ended, FlushMeans, Put, TierFacts, WriteState
from .tier_books import TierBooks
from .tier_reads import TierReads
from .tier_writes import STALLED_S, SpecOf, TierWrites, arena_slots

HANDLER_STOP_S = 1.0
"""Minimum time in seconds that a handler gets to end its transfers at a shutdown."""


class SoloTier(Below):
    """One tier and its two handlers."""

    def __init__(
        self,
        tier: Tier,
        link: Link,
        clock: Callable[[], float],
        *,
        stall_s: float = STALLED_S,
        with_events: bool = True,
        is_last: bool = True,
        spec_of: SpecOf = arena_slots,
        past: PastUses | None = None,
    ) -> None:
        """`clock` returns monotonic seconds; `stall_s` is the time limit for stalled reads.

        `spec_of` gives the location of the blocks of a `put` in the tier above. A tier that is not
        the last one evicts only settled blocks: the tier below holds them or does not need them.
        For `past` see `UseCounts`.
        """
        self.links = (LinkCounters(),)
        self.books = TierBooks(
            tier, is_last, clock, self.links[0], [] if with_events else None, past
        )
        self.level = self.books.level
        self.departures = (self.books.departures,)
        self.writes = TierWrites(self.books, link.down, spec_of)
        self.reads = TierReads(self.books, link.up, stall_s)
        level = self.level
        self.tiers = (
            TierFacts(level.name, level.medium, level.block_size, level.capacity, level.is_lasting),
        )
        self._find = level.policy.get
        self._watch = _watch_of(tier, clock)
        self.maintain()  # an idle engine takes no step, which would maintain it

    # -- keys ------------------------------------------------------------------------------

    def may_hold(self, key: BlockHash, media: frozenset[str] | None = None) -> int:
        if media is not None and self.level.medium not in media:
            return 0
        status = self._find(key)
        return 1 if status is not None and status.ref_cnt >= 0 else 0

    def get(self, ticket: int, tier: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> None:
        assert tier == 1, "there is one tier"
        self.reads.get(ticket, keys, slots)

    def put(self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> Sequence[Put]:
        return self.writes.put(ticket, keys, slots)

    def touch(self, keys: Sequence[BlockHash]) -> None:
        self.level.policy.touch(keys)

    def settle(self, keys: Sequence[BlockHash]) -> None:
        self.level.policy.settle(keys)

    def chain(self, keys: Sequence[BlockHash]) -> bool:
        policy = self.level.policy
        if policy.wants_chains:
            policy.note_chain(keys)
        return policy.wants_chains

    # -- outcomes --------------------------------------------------------------------------

    def poll(self) -> Sequence[Ended]:
        reads, writes = self.reads, self.writes
        if not (reads.way.jobs or reads.refused or writes.way.jobs):
            return ()
        return [*reads.collect(), *writes.collect()]

    def take_lost(self) -> list[BlockHash]:
        lost = self.books.lost
        if lost:
            self.books.lost = []
        return lost

    def take_events(self) -> list[BlockEvent]:
        events = self.books.events
        if events is None:
            return []
        self.books.emit_moved()
        taken = events[:]
        events.clear()
        return taken

    def announce(self, tier: int, keys: Sequence[BlockHash]) -> None:
        self.books.emit([key for key in keys if self.level.owns(key)], removed=False)

    # -- whether it takes anything -----------------------------------------------------------

    def room(self, n: int) -> int:
        backend = self.level.backend
        free = backend.get_num_free_blocks()
        return n if free >= n or backend.get_num_possible_blocks() <= free else free

    @property
    def takes_puts(self) -> bool:
        return not self.writes.way.breaker.is_open

    @property
    def is_blocked(self) -> bool:
        return self.writes.way.breaker.is_resting

    def rests(self, tier: int) -> bool:
        return self.reads.way.breaker.is_open

    def write_state(self) -> WriteState:
        breaker = self.writes.way.breaker
        return WriteState(breaker.is_stalled, breaker.rest_left_s, self.writes.may_recover)

    # -- upkeep ------------------------------------------------------------------------------

    def keep_ahead(self) -> None:
        """Do nothing: one tier writes to no lower tier."""

    def maintain(self) -> int:
        if not self.tend():
            return 0
        self.forget(is_own=False)
        return 1

    def tend(self) -> bool:
        """Maintain the tier. Return True if another process reset it; the caller then calls
        `forget`."""
        if self._watch is not None:
            self._watch.check()
        return self.level.maintain()

    def reset(self, mark: int = 0) -> None:
        self.forget(is_own=True)

    def forget(self, others: Sequence[Transfer] = (), *, is_own: bool) -> None:
        """Drop every block, after a reset by this process or by another one.

        `others`: transfers to a tier below that use slots of this one.
        """
        jobs: list[Transfer] = [*self.writes.way.jobs.values(), *self.reads.way.jobs.values()]
        self.books.forget([*jobs, *others], is_own=is_own)

    def wait(self, tickets: set[int], limit_s: float) -> None:
        self.writes.way.wait(tickets, limit_s)
        self.reads.way.wait(tickets, limit_s)

    def flush(self, means: FlushMeans, deadline_s: float) -> None:
        """Do nothing: the last tier writes to no lower tier."""

    def shutdown(self, deadline_s: float) -> bool:
        has_ended = True
        for way in (self.writes.way, self.reads.way):
            left_s = max(HANDLER_STOP_S, deadline_s - self.books.clock())
            has_ended = way.handler.shutdown(left_s) and has_ended
        return has_ended

    def state(self) -> list[TierState]:
        level, tier = self.level, self.books.tier
        budget, totals = tier.write_budget, tier.day_totals
        return [
            TierState(
                level.name,
                level.medium,
                level.block_size,
                blocks=len(level.policy),
                capacity_blocks=level.capacity,
                dirty_blocks=level.dirt.dirty_blocks,
                waiting_blocks=sum(len(job.keys) for job in self.reads.way.jobs.values()),
                demote_jobs=len(self.writes.way.jobs),
                is_blocked=self.is_blocked,
                budget_left_bytes=None if budget is None else budget.left_bytes(),
                day=None if totals is None else totals(),
            )
        ]


def _watch_of(tier: Tier, clock: Callable[[], float]) -> EnduranceWatch | None:
    if tier.day_totals is None:
        return None
    return EnduranceWatch(tier.name, tier.day_totals, clock)
