"""Several tiers behind one port, each of which may hold any block: `BelowChain`.

The tiers are inclusive. A put writes from the slots of the first tier to the nearest tier below. At
the same time it writes to each lower tier that lacks the block and admits it. Nothing moves between
tiers, and an eviction loses the copy of one tier only. Reads come from the nearest tier that may
hold the block. A chain uses nothing of its tiers but the port.

A put ends when all its parts have ended, because its slots must keep their bytes until then. The
blocks in flight to each lower tier are limited, so that a slow tier does not hold all slots of the
first tier. A block beyond the limit is not written to that tier. It is offered again once no tier
holds it.

If the nearest tier takes nothing for a moment, a block goes to the lower tiers that take every
block. A tier that would leave blocks out by a rule of its own waits for the nearest one.

Each reset has a mark. If another engine resets one tier, nothing is found in any tier until all of
them were reset. The engine that began the reset resets all its tiers. If some are not reset in
time, this chain passes the mark on. A tier carries out a mark once, so passing on ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ...tiers.base import BlockHash, BlockOutcome, new_reset_mark
from ..admission import AdmissionFunction, PastUses
from ..base import BlockEvent
from ..counters import LinkCounters
from ..state import TierState
from .port import ASKING, Below, Ended, Put, TierFacts, WriteState

LOWER_SHARE = 8
"""The blocks in flight to one lower tier take at most this part of the first tier: an eighth."""
ABSENT_AFTER_S = 60.0
"""Time in seconds. If the nearest tier takes no block for so long, the lower tiers decide alone."""
PASS_ON_AFTER_S = 1.0
"""Time in seconds that a reset of one tier by another engine has to reach the others by itself."""
MAX_MARKS = 64
"""Number of marks of resets that are remembered."""


@dataclass(frozen=True, slots=True)
class ChainedTier:
    """One port of a chain: it has one tier."""

    port: Below
    admission: AdmissionFunction | None
    """Admission to the tier; None: every block. For the nearest tier the caller applies it."""


@dataclass(slots=True)
class _Part:
    """The part of a put that one port writes."""

    at: Sequence[int]
    """Positions of its keys among the keys of the put."""
    ended: Ended | None = None


@dataclass(slots=True)
class _Put:
    """A put in flight: its parts by number of the port, nearest first."""

    parts: dict[int, _Part]
    blocks: int
    """Number of blocks that any tier started."""
    open_parts: int
    keys: Sequence[BlockHash] = ()
    rested: frozenset[int] = frozenset()
    """Positions of blocks that the nearest tier would have taken if it did not rest."""
    has_seen_loss: bool = False
    """True if a tier lost blocks since the begin: this put's may be among them."""

    def end_part(self, number: int, ended: Ended) -> int:
        """Note the end of a part. Return its number of blocks."""
        part = self.parts[number]
        part.ended = ended
        self.open_parts -= 1
        return len(part.at)

    def merged(self, ticket: int) -> Ended:
        """Return one end for the whole put.

        The outcome of a block is OK if any tier stored it. Otherwise it is that of the nearest tier
        that tried. If the nearest of all rested, a refused block is offered again.
        """
        ends = [part.ended for part in self.parts.values() if part.ended is not None]
        size_bytes = sum(ended.size_bytes for ended in ends)
        time_s = max(ended.time_s for ended in ends)
        return Ended(ticket, False, 1, self._outcomes(ends), size_bytes, time_s)

    def _outcomes(self, ends: Sequence[Ended]) -> Sequence[BlockOutcome]:
        for ended in ends:
            if list(ended.outcomes).count(BlockOutcome.OK) == self.blocks:
                return ended.outcomes
        became: dict[int, BlockOutcome] = {}
        for part in reversed(self.parts.values()):
            assert part.ended is not None, "every part has ended"
            for at, outcome in zip(part.at, part.ended.outcomes, strict=True):
                if became.get(at) is not BlockOutcome.OK:
                    became[at] = outcome
        for at in self.rested:
            if became.get(at) is BlockOutcome.REFUSED:
                became[at] = BlockOutcome.IO_ERROR
        return [became[at] for at in sorted(became)]


class _LowerTier:
    """A port below the nearest one: what it admits, and how much is in flight to it."""

    def __init__(self, tier: ChainedTier, limit_blocks: int) -> None:
        self.port = tier.port
        self.in_flight = 0
        self._limit_blocks = limit_blocks
        admits, capacity = tier.admission, tier.port.tiers[0].capacity
        self._rule = None if admits is None else (admits, PastUses(capacity))
        """Admission, and the use counts of the blocks that it refused; None: it takes all."""

    @property
    def counters(self) -> LinkCounters:
        """Traffic into the tier."""
        return self.port.links[0]

    @property
    def takes_all(self) -> bool:
        """False if a rule may leave out blocks that it is offered now."""
        return self._rule is None and self.port.takes_all

    def room(self, n: int) -> int:
        """Return how many of `n` blocks may be written to it now."""
        return min(self.port.room(n), max(0, self._limit_blocks - self.in_flight))

    def offer(
        self,
        ticket: int,
        keys: Sequence[BlockHash],
        slots: Sequence[int],
        among: Sequence[int],
        decided: Sequence[int],
    ) -> tuple[list[int], list[int]]:
        """Write the admitted blocks that it lacks, as many as may be in flight.

        `among` are positions. `decided` are those of the blocks that the nearest tier will not take
        later. Return those of the started blocks, and those that need no other write.
        """
        may_hold, no_use = self.port.may_hold, [Put.ALREADY]
        if not self.takes_all:
            among, no_use = decided, [Put.ALREADY, Put.UNWANTED]
        wanted = [at for at in among if not may_hold(keys[at])]
        held = [] if len(wanted) == len(among) else sorted(set(among).difference(wanted))
        if self._rule is not None:
            wanted = [at for at in wanted if self._admits(keys[at], *self._rule)]
        room = self.room(len(wanted)) if wanted and self.port.takes_puts else 0
        self.counters.demote_missed_blocks += len(wanted) - room
        wanted = wanted[:room]
        if not wanted:
            return [], held
        answers = self.port.put(ticket, [keys[at] for at in wanted], [slots[at] for at in wanted])
        if answers.count(Put.STARTED) < len(answers):
            given = list(zip(wanted, answers, strict=True))
            wanted = [at for at, answer in given if answer is Put.STARTED]
            held += [at for at, answer in given if answer in no_use]
            missed = (Put.STARTED, Put.ALREADY, Put.UNWANTED, Put.OVER_BUDGET)
            self.counters.demote_missed_blocks += sum(a not in missed for a in answers)
        self.in_flight += len(wanted)
        return wanted, held

    def _admits(self, key: BlockHash, admits: AdmissionFunction, past: PastUses) -> bool:
        """Return whether it takes a block. Each offer counts as a use."""
        uses = past.of(key) + 1
        is_admitted = admits(key, uses)
        if not is_admitted:
            past.note(key, uses)
            self.counters.demote_refused_blocks += 1
        return is_admitted


@dataclass(slots=True)
class _Resets:
    """Resets by other engines that not every tier has seen."""

    ports: Sequence[Below]
    clock: Callable[[], float]
    known: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_MARKS))
    """Marks that all tiers have, or were sent."""
    unnamed: dict[int, float] = field(default_factory=dict)
    """By number of the port: time until which the mark of a reset may stay unknown."""
    seen: dict[int, tuple[set[int], float]] = field(default_factory=dict)
    """By mark: numbers of the ports that had it, and the time at which it is passed on."""
    are_open: bool = False
    """True while a block of before a reset may still be in a tier."""

    def begin(self, mark: int) -> None:
        """Reset every tier."""
        self.known.append(mark)
        self.unnamed.clear()
        self.seen.clear()
        self.are_open = False
        for port in self.ports:
            port.reset(mark)

    def note(self, number: int) -> None:
        """Note that another engine reset a tier; its mark may be unknown."""
        self.unnamed[number] = self.clock() + PASS_ON_AFTER_S
        self.are_open = True

    def proceed(self) -> None:
        """Take in marks, and pass those on that have not reached every tier in time."""
        now_s = self.clock()
        for number, port in enumerate(self.ports):
            for mark in port.take_marks():
                self._see(mark, number, now_s + PASS_ON_AFTER_S)
        for number in [number for number, until_s in self.unnamed.items() if until_s <= now_s]:
            self._see(new_reset_mark(), number, now_s)
        for mark, (numbers, until_s) in list(self.seen.items()):
            missing = [port for at, port in enumerate(self.ports) if at not in numbers]
            if missing and now_s < until_s:
                continue
            del self.seen[mark]
            self.known.append(mark)
            for port in missing:
                port.pass_on(mark)
        self.are_open = bool(self.unnamed or self.seen)

    def _see(self, mark: int, number: int, until_s: float) -> None:
        self.unnamed.pop(number, None)
        if mark not in self.known:
            self.seen.setdefault(mark, (set(), until_s))[0].add(number)


class _Absence:
    """Time for which the nearest tier has taken no block."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._took_s = clock()
        self._has_failed = False
        """True if its last write failed: it may take another one only to try."""

    def look(self, takes_puts: bool) -> None:
        """Note whether the tier takes blocks now."""
        if takes_puts and not self._has_failed:
            self._took_s = self._clock()

    def ended(self, outcomes: Sequence[BlockOutcome]) -> None:
        """Note a write into the tier that ended."""
        if BlockOutcome.OK in outcomes:
            self._has_failed = False
        elif not _FAILURES.isdisjoint(outcomes):
            self._has_failed = True

    @property
    def is_long(self) -> bool:
        """Return True if the lower tiers decide alone."""
        return self._clock() - self._took_s > ABSENT_AFTER_S


class BelowChain(Below):
    """Inclusive tiers behind two or more ports."""

    def __init__(
        self, tiers: Sequence[ChainedTier], slots: int, clock: Callable[[], float]
    ) -> None:
        """`tiers`: nearest first. `slots`: those of the first tier. `clock`: monotonic seconds."""
        ports = self._ports = [tier.port for tier in tiers]
        self.tiers: Sequence[TierFacts] = [port.tiers[0] for port in ports]
        self.links = [port.links[0] for port in ports]
        self._nearest = ports[0]
        self._lower = [_LowerTier(tier, max(1, slots // LOWER_SHARE)) for tier in tiers[1:]]
        self._finders = [(tier, port, port.may_hold) for tier, port in enumerate(ports, start=1)]
        self._puts: dict[int, _Put] = {}
        self._left_early: list[BlockHash] = []
        """Blocks that a tier may have lost before another one had ended its part."""
        self._resets = _Resets(ports, clock)
        self._clock = clock
        self._absence = _Absence(clock)

    # -- keys ------------------------------------------------------------------------------

    def may_hold(
        self, key: BlockHash, media: frozenset[str] | None = None, owner: object = None
    ) -> int:
        """See `Below`. A tier that may not be read now counts only if no other holds the block."""
        if self._resets.are_open:
            return 0
        resting = asking = 0
        for tier, port, may_hold in self._finders:
            answer = may_hold(key, media, owner)
            if not answer:
                continue
            if answer == ASKING:
                asking = ASKING
            elif port.rests(1):
                resting, owner = resting or tier, None
            else:
                return tier
        return resting or asking

    def wants_again(self, key: BlockHash) -> bool:
        return any(port.wants_again(key) for port in self._ports)

    def get(self, ticket: int, tier: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> None:
        self._ports[tier - 1].get(ticket, 1, keys, slots)

    def put(self, ticket: int, keys: Sequence[BlockHash], slots: Sequence[int]) -> Sequence[Put]:
        """See `Below`.

        A block that tier 1 takes later is offered again, so lower tiers wait for that. A block is
        STARTED if any tier writes it, else ALREADY if any tier holds it, or if tier 1 will not take
        it and a lower tier leaves it out.
        """
        if not keys:
            return ()
        answers = list(self._nearest.put(ticket, keys, slots))
        parts: dict[int, _Part] = {}
        among: Sequence[int] = range(len(keys))
        decided, rested = among, frozenset[int]()
        if answers.count(Put.STARTED) == len(answers):
            parts[0] = _Part(among)
        else:
            begun = [at for at, answer in enumerate(answers) if answer is Put.STARTED]
            among = [at for at, answer in enumerate(answers) if answer is not Put.LATER]
            if not self._absence.is_long:
                rested = frozenset(at for at in among if answers[at] in _RESTS)
            decided = [at for at in among if at not in rested] if rested else among
            if begun:
                parts[0] = _Part(begun)
        held: set[int] = set()
        for number, lower in enumerate(self._lower, start=1):
            started, held_here = lower.offer(ticket, keys, slots, among, decided)
            held.update(held_here)
            if started:
                parts[number] = _Part(started)
        if among is not parts.get(0, _NO_PART).at:
            for at in held:
                if answers[at] is not Put.STARTED:
                    answers[at] = Put.ALREADY
            for part in parts.values():
                for at in part.at:
                    answers[at] = Put.STARTED
        if parts:
            blocks = answers.count(Put.STARTED)
            self._puts[ticket] = _Put(parts, blocks, len(parts), keys, rested)
            self._count_late()
        return answers

    def touch(self, keys: Sequence[BlockHash], first: int = 0) -> None:
        """Count a use in the nearest port that holds a block, from the port `first` on."""
        for port in self._ports[first:]:
            if not keys:
                return
            port.touch(keys)
            keys = [key for key in keys if not port.may_hold(key)]

    # -- outcomes --------------------------------------------------------------------------

    def poll(self) -> Sequence[Ended]:
        found: list[Ended] = []
        for number, port in enumerate(self._ports):
            for ended in port.poll():
                if ended.is_get:
                    found.append(ended._replace(tier=number + 1))
                    continue
                put = self._puts[ended.ticket]
                blocks = put.end_part(number, ended)
                if number:
                    self._lower[number - 1].in_flight -= blocks
                else:
                    self._absence.ended(ended.outcomes)
                if not put.open_parts:
                    del self._puts[ended.ticket]
                    self._left_early += put.keys if put.has_seen_loss else ()
                    found.append(put.merged(ended.ticket))
        if self._puts or self.late_puts:
            self._count_late()
        return found

    def take_lost(self) -> list[BlockHash]:
        """See `Below`. A block that a lower tier still holds becomes hot there: requests that use
        it were counted above."""
        gone = dict.fromkeys(key for key in self._left_early if not self.may_hold(key))
        self._left_early.clear()
        for number, port in enumerate(self._ports):
            lost = port.take_lost()
            for put in self._puts.values() if lost else ():
                put.has_seen_loss = True
            held = [key for key in reversed(lost) if self.may_hold(key)]
            self.touch(held, number + 1)
            gone.update(dict.fromkeys(lost if not held else set(lost).difference(held)))
        return list(gone)

    def take_events(self) -> list[BlockEvent]:
        return [event for port in self._ports for event in port.take_events()]

    # -- whether it takes anything -----------------------------------------------------------

    def room(self, n: int) -> int:
        """Return the room for `n` blocks in the nearest tier that takes puts."""
        if not self._nearest.takes_puts:
            for lower in self._stand_ins():
                return lower.room(n)
        return self._nearest.room(n)

    @property
    def takes_puts(self) -> bool:
        """See `Below`. What is written before a reset is passed on would be lost with it."""
        if self._resets.are_open:
            return False
        return self._nearest.takes_puts or bool(self._stand_ins())

    @property
    def has_stand_in(self) -> bool:
        return not self._nearest.takes_puts and bool(self._stand_ins())

    @property
    def unwritten_blocks(self) -> int:
        return self._nearest.unwritten_blocks

    @property
    def is_blocked(self) -> bool:
        if not self._nearest.is_blocked:
            return False
        # A tier that is full still takes puts: its blocks are offered to the lower ones, too.
        is_alone = self._absence.is_long or self._nearest.takes_puts
        return all(each.port.is_blocked for each in self._lower if is_alone or each.takes_all)

    def rests(self, tier: int) -> bool:
        return self._ports[tier - 1].rests(1)

    def latency_s(self, tier: int) -> float:
        return self._ports[tier - 1].latency_s(1)

    def write_state(self) -> WriteState:
        """Return the state of the nearest tier that takes writes; if none does, of the first that
        will. Writes stall if every tier with writes in flight stalls."""
        states = [port.write_state() for port in self._ports]
        takers = [each.port for each in self._stand_ins()]
        if self._nearest.takes_puts:
            takers.insert(0, self._nearest)
        taking = [s for s, port in zip(states, self._ports, strict=True) if port in takers]
        recovering = [state for state in states if state.may_recover and state.rest_left_s > 0]
        recovering.sort(key=lambda state: state.rest_left_s)
        writing = {
            number
            for put in self._puts.values()
            for number, part in put.parts.items()
            if part.ended is None
        }
        is_stalled = bool(writing) and all(states[number].is_stalled for number in writing)
        is_joining = any(state.is_joining for state in states)
        first = [*taking, *recovering, states[0]][0]
        return replace(first, is_stalled=is_stalled, is_joining=is_joining)

    # -- upkeep ------------------------------------------------------------------------------

    def maintain(self) -> bool:
        """See `Below`. After a reset of one tier, all tiers are empty or will be reset."""
        was_reset = False
        for number, port in enumerate(self._ports):
            if port.maintain():
                self._resets.note(number)
                was_reset = True
        self._resets.proceed()
        self._absence.look(self._nearest.takes_puts)
        return was_reset

    def reset(self, mark: int = 0) -> None:
        self._resets.begin(mark or new_reset_mark())

    def wait(self, limit_s: float) -> bool:
        """See `Below`. It waits for the nearest tier with transfers in flight."""
        return any(port.wait(limit_s) for port in self._ports)

    def shutdown(self, deadline_s: float) -> bool:
        has_ended = [port.shutdown(deadline_s) for port in self._ports]
        return all(has_ended)

    def state(self) -> list[TierState]:
        return [state for port in self._ports for state in port.state()]

    # -- inside ------------------------------------------------------------------------------

    def _stand_ins(self) -> list[_LowerTier]:
        """Return the lower tiers that take blocks in place of the nearest one."""
        takers = [lower for lower in self._lower if lower.port.takes_puts]
        return takers if self._absence.is_long else [one for one in takers if one.takes_all]

    def _count_late(self) -> None:
        """Count the puts that tier 1 has no part in, or has ended."""
        puts = self._puts.values()
        self.late_puts = sum(put.parts.get(0, _NO_PART).ended is not None for put in puts)


_RESTS = (Put.RESTING, Put.NOT_TAKEN)
"""Answers of a tier that takes no blocks for a while."""
_FAILURES = frozenset({BlockOutcome.IO_ERROR, BlockOutcome.NO_SPACE})
_NO_PART = _Part((), Ended(0, False, 1, ()))
"""Stands for the part of a tier that takes none."""
