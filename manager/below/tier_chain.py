"""Several tiers behind one port: `TierChain` puts one tier above another port.

Writes enter the first tier. Before it evicts a block, the block is written to the rest. Reads go
from every tier directly into the slots of the caller. A promoted block is not written to the tiers
between.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...tiers.base import BlockHash
from ..admission import Admission, PastUses
from ..base import BlockEvent
from ..demotion import Demoter, Watermarks
from ..flow import Clock, Link
from ..flush import flush_level, hottest
from ..level import Tier
from ..state import TierState
from .port import Below, Ended, FlushMeans, NoTierBelow, Put, WriteState
from .solo import SoloTier
from .tier_writes import SpecOf, arena_slots, slots_of

MAX_AHEAD_BLOCKS = 32 << 10
"""Maximum number of slots of which the watermarks of a lower tier are shares. Only the tier above
and promoted blocks wait there. Each search also passes over clean blocks, at 0.1 µs a block."""


@dataclass(frozen=True, slots=True)
class BelowOptions:
    """Options of the tiers below that come from the manager's own options."""

    clock: Clock
    stall_s: float
    """Time limit for stalled reads in seconds."""
    marks: Watermarks
    with_events: bool


class TierChain(Below):
    """One tier, and a port below it."""

    def __init__(
        self, first: SoloTier, rest: Below, admission: Admission, options: BelowOptions
    ) -> None:
        """`admission` decides which blocks are written to the rest."""
        self._first = first
        self._rest = rest
        self.tiers = (*first.tiers, *rest.tiers)
        self.links = (*first.links, *rest.links)
        self.departures = (*first.departures, *rest.departures)
        self.demoter = Demoter(
            first.level,
            rest,
            admission,
            itertools.count(1),
            options.clock,
            options.marks,
            slots=min(first.level.capacity, MAX_AHEAD_BLOCKS),
            forwards_lost=True,
        )

    # -- keys ------------------------------------------------------------------------------

    def may_hold(self, key: BlockHash, media: frozenset[str] | None = None) -> int:
        if self._first.may_hold(key, media):
            return 1
        found = self._rest.may_hold(key, media)
        return found + 1 if found else 0

    def get(self, ticket: int, tier: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> None:
        if tier == 1:
            self._first.get(ticket, 1, keys, slots)
        else:
            self._rest.get(ticket, tier - 1, keys, slots)

    def put(self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> Sequence[Put]:
        answers = self._first.put(ticket, keys, slots)
        full = answers.count(Put.FULL)
        if full and self.demoter.clean_ahead(full):
            return [Put.LATER if answer is Put.FULL else answer for answer in answers]
        return answers

    def touch(self, keys: Sequence[BlockHash]) -> None:
        self._first.touch(keys)

    def settle(self, keys: Sequence[BlockHash]) -> None:
        self._first.settle(keys)

    def chain(self, keys: Sequence[BlockHash]) -> bool:
        return self._first.chain(keys)

    # -- outcomes --------------------------------------------------------------------------

    def poll(self) -> Sequence[Ended]:
        ended = list(self._first.poll())
        for each in self._rest.poll():
            if each.is_get:
                ended.append(replace(each, tier=each.tier + 1))
            else:
                self.demoter.land(each)
        return ended

    def take_lost(self) -> list[BlockHash]:
        lost = self._first.take_lost()
        if lost:
            self._rest.touch(lost[::-1])
        return lost + self.demoter.take_lost()

    def take_events(self) -> list[BlockEvent]:
        return [*self._first.take_events(), *self._rest.take_events()]

    def announce(self, tier: int, keys: Sequence[BlockHash]) -> None:
        if tier == 1:
            self._first.announce(1, keys)
        else:
            self._rest.announce(tier - 1, keys)

    # -- whether it takes anything -----------------------------------------------------------

    def room(self, n: int) -> int:
        return self._first.room(n)

    @property
    def takes_puts(self) -> bool:
        return self._first.takes_puts

    @property
    def is_blocked(self) -> bool:
        return self._first.is_blocked

    def rests(self, tier: int) -> bool:
        return self._first.rests(1) if tier == 1 else self._rest.rests(tier - 1)

    def write_state(self) -> WriteState:
        is_making_room = self.demoter.is_moving or self._rest.write_state().is_making_room
        return replace(self._first.write_state(), is_making_room=is_making_room)

    # -- upkeep ------------------------------------------------------------------------------

    def keep_ahead(self) -> None:
        self._rest.keep_ahead()
        self.demoter.keep_ahead()

    def maintain(self) -> int:
        """Maintain the tiers from the bottom up.

        A process that resets begins at the top. If a lower tier was reset and this one was not seen
        reset, this process must forget this tier.
        """
        depth = self._rest.maintain()
        if not self._first.tend() and not depth:
            return 0
        self._first.forget(self.demoter.orphan(), is_own=False)
        return depth + 1

    def reset(self, mark: int = 0) -> None:
        self._first.forget(self.demoter.orphan(), is_own=True)
        self._rest.reset()

    def wait(self, tickets: set[int], limit_s: float) -> None:
        if tickets:
            self._first.wait(tickets, limit_s)
        elif self.demoter.is_moving:
            self._rest.wait(self.demoter.job_ids, limit_s)
        else:
            self._rest.wait(set(), limit_s)

    def flush(self, means: FlushMeans, deadline_s: float) -> None:
        flush_level(self.demoter, self._rest, means, deadline_s)
        if not self._first.level.is_lasting:
            with means.lock:
                self._rest.touch(hottest(self._first.level, ()))
        self._rest.flush(means, deadline_s)

    def shutdown(self, deadline_s: float) -> bool:
        has_ended = [part.shutdown(deadline_s) for part in (self._first, self._rest)]
        return all(has_ended)

    def state(self) -> list[TierState]:
        return [*self._first.state(), *self._rest.state()]


def below_of(tiers: Sequence[Tier], links: Sequence[Link], options: BelowOptions) -> Below:
    """Return one port for these tiers, nearest first.

    `links[i]` belongs to `tiers[i]`: its writes come from the tier above, and its reads go to the
    first tier of the cascade.
    """
    if not tiers:
        return NoTierBelow()
    solos: list[SoloTier] = []
    spec_of: SpecOf = arena_slots
    for at, (tier, link) in enumerate(zip(tiers, links, strict=True)):
        under = tiers[at + 1] if at + 1 < len(tiers) else None
        solos.append(
            SoloTier(
                tier,
                link,
                options.clock,
                stall_s=options.stall_s,
                with_events=options.with_events,
                is_last=under is None,
                spec_of=spec_of,
                past=None if under is None else past_uses(under.admission, under.backend.capacity),
            )
        )
        spec_of = slots_of(solos[-1].level)
    below: Below = solos[-1]
    for at in range(len(solos) - 2, -1, -1):
        below = TierChain(solos[at], below, tiers[at + 1].admission, options)
    return below


def past_uses(admission: Admission, capacity: int) -> PastUses | None:
    """Return use counts of blocks that the tier refused, for the level above it."""
    return PastUses(capacity) if admission.counts_uses else None
