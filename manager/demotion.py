"""Writing dirty blocks down, ahead of demand.

The demoter takes the coldest dirty blocks of a level in batches, and puts them below. When the copy
has landed, the block above is settled: it stays readable until its slot is needed, and then leaves
at no cost. A block that could not be written stays dirty and is offered again while it is still
there.

A block that the tier below evicts later is dirty again, and is written once more when it is among
the coldest here, in every write mode. Age alone does not queue it a second time: where the tier
below is the smaller one, an idle engine would go on writing for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..tiers.base import BlockHash, BlockOutcome
from .admission import Admission
from .below.port import Below, Ended, Put
from .below.tier_writes import NOT_WANTED
from .counters import LinkCounters
from .flow import MAX_JOBS_IN_FLIGHT, Clock, batch_blocks
from .level import Level, Pairs, Transfer

MAX_SETTLED = 512
"""Blocks that one step may find not to need writing, at a few microseconds each: after a restart,
or where little is admitted, that is most of the tier."""
AGING_PER_SLOT = 2
"""Stored blocks per slot whose age is known: enough unless nothing could be written meanwhile."""


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of a level that are kept clean: a search starts below `low` and ends at `high`."""

    low: float
    high: float


class Aging:
    """Stored blocks and when they were stored, oldest first.

    Blocks beyond the limit are written as they leave.
    """

    def __init__(self, clock: Clock, slots: int, age_s: float) -> None:
        """Blocks are due once they are `age_s` old; `slots` of the level."""
        self._clock = clock
        self._age_s = age_s
        self._stored: deque[tuple[float, BlockHash]] = deque(maxlen=AGING_PER_SLOT * slots)

    def __len__(self) -> int:
        return len(self._stored)

    def note(self, block_hashes: Iterable[BlockHash]) -> None:
        """These blocks are dirty from now on."""
        now_s = self._clock()
        self._stored.extend((now_s, block_hash) for block_hash in block_hashes)

    def take_due(self, n: int) -> list[BlockHash]:
        """Up to `n` blocks that are due, each once."""
        due_s = self._clock() - self._age_s
        due: list[BlockHash] = []
        while len(due) < n and self._stored and self._stored[0][0] <= due_s:
            due.append(self._stored.popleft()[1])
        return list(dict.fromkeys(due))

    def put_back(self, block_hashes: Sequence[BlockHash]) -> None:
        """These blocks were due, and could not be written yet."""
        due_s = self._clock() - self._age_s
        self._stored.extendleft((due_s, block_hash) for block_hash in reversed(block_hashes))

    def clear(self) -> None:
        """The level was reset."""
        self._stored.clear()


class ColdSearch:
    """Finds the coldest dirty blocks of a level, and says when a look ahead is due."""

    def __init__(self, level: Level, marks: Watermarks, slots: int) -> None:
        """Watermarks are shares of `slots`."""
        self._level = level
        self._ahead = MAX_JOBS_IN_FLIGHT * batch_blocks(level.block_size)
        self._window = max(1, round(marks.high * slots))
        self._slack = max(1, round((marks.high - marks.low) * slots))
        self._taken_at_scan = -self._slack
        self._started_by_scan = 0
        self._found: list[BlockHash] = []
        """Blocks that the last search found beyond the job it was for, coldest first."""

    @property
    def is_due(self) -> bool:
        """True if the low watermark may have been crossed since the last look ended."""
        return self._level.taken_blocks - self._taken_at_scan >= self._slack

    def window(self) -> tuple[int, int]:
        """How many of the coldest blocks shall be clean, and how many this look may still write."""
        window = self._window - self._level.backend.get_num_possible_blocks()
        return window, window - self._started_by_scan

    def note_started(self, n: int) -> None:
        """The look wrote so many blocks."""
        self._started_by_scan += n

    def end(self) -> None:
        """The look is over."""
        self._taken_at_scan = self._level.taken_blocks
        self._started_by_scan = 0

    def next_cold(self, limit: int, window: int | None) -> Pairs:
        """Up to `limit` of the coldest dirty blocks; none if there are no more.

        A search in a window first passes all that is clean already. So it is for several jobs, and
        the blocks that one of them leaves over come first next time, if they are still dirty.
        """
        while self._found:
            part, self._found = self._found[:limit], self._found[limit:]
            if cold := self.dirty_among(part):
                return cold
        ahead, mask = limit if window is None else self._ahead, self._level.dirt.dirty_mask
        found = self._level.policy.coldest(ahead, mask=mask, window=window)
        self._found = [block_hash for block_hash, _ in found[limit:]]
        return found[:limit]

    def dirty_among(self, block_hashes: Iterable[BlockHash]) -> Pairs:
        """Those of the blocks that are here, ready and dirty."""
        level = self._level
        found = ((block_hash, level.policy.get(block_hash)) for block_hash in block_hashes)
        return [
            (block_hash, status)
            for block_hash, status in found
            if status is not None and status.ref_cnt >= 0 and level.dirt.is_dirty(status.block_id)
        ]

    def most_useful(self, n: int, in_use: Sequence[BlockHash]) -> list[BlockHash]:
        """Up to `n` dirty blocks, those first that are worth most at the next start.

        No search finds pinned blocks: `in_use` names them, tails before heads.
        """
        level = self._level
        if n <= 0:
            return []
        idle = level.policy.coldest(len(level.policy), mask=level.dirt.dirty_mask)
        hottest_first = [*reversed(self.dirty_among(in_use)), *reversed(idle)]
        return level.uses.by_use([*dict(hottest_first).items()])[:n]


class Demoter:
    """Moves dirty blocks from one level to the port below it. Under the manager's lock."""

    def __init__(
        self,
        level: Level,
        below: Below,
        admission: Admission,
        tickets: Iterator[int],
        clock: Clock,
        marks: Watermarks,
        *,
        slots: int,
        aging: Aging | None = None,
        forwards_lost: bool = False,
    ) -> None:
        """Watermarks are shares of `slots`. Blocks that were not written and should be tried again
        go to `aging`: their device failed, or there was room for a part of their job.

        `forwards_lost`: keys that left the port are kept for the caller of `take_lost`.
        """
        self._level = level
        self._below = below
        self._admission = admission
        self._tickets = tickets
        self._clock = clock
        self._aging = aging
        self.search = ColdSearch(level, marks, slots)
        self._batch = batch_blocks(level.block_size)
        self._jobs: dict[int, Transfer] = {}
        self._lost: list[BlockHash] | None = [] if forwards_lost else None
        self.was_cut_short = False
        """True if the last look ended before it came to the last dirty block."""
        self.may_find_room = False
        """True if the last look ended for want of room below, and there will be some."""

    @property
    def counters(self) -> LinkCounters:
        """Traffic into the tier below."""
        return self._below.links[0]

    @property
    def jobs(self) -> list[Transfer]:
        """Copies under way."""
        return list(self._jobs.values())

    @property
    def job_ids(self) -> set[int]:
        """Tickets of the copies under way."""
        return set(self._jobs)

    @property
    def jobs_in_flight(self) -> int:
        """Number of copies under way."""
        return len(self._jobs)

    @property
    def is_moving(self) -> bool:
        """True if copies are under way and they end."""
        return bool(self._jobs) and not self._below.write_state().is_stalled

    @property
    def losable_blocks(self) -> int:
        """Blocks in the level that the tier below has place for; 0 if their medium keeps them."""
        if self._level.is_lasting or not self._below.tiers:
            return 0
        return min(len(self._level.policy), self._below.tiers[0].capacity)

    @property
    def room_blocks(self) -> int:
        """How many blocks could be sent down now."""
        return (MAX_JOBS_IN_FLIGHT - len(self._jobs)) * self._batch if self._may_start() else 0

    def keep_ahead(self) -> None:
        """Make the cold end of the level clean if the low watermark may have been crossed.

        Looks once per `high - low` slots taken, so a store pays for a constant number of looks, and
        writes no more than the window each time: where the tier below is smaller than that, the
        blocks that it evicts are dirty again here, and an idle engine would go on for ever. A look
        that settles many blocks goes on at the next step.
        """
        search = self.search
        if not search.is_due or self._level.is_last:
            return
        window, left = search.window()
        started = self._demote_coldest(left, window, MAX_SETTLED) if left > 0 else 0
        search.note_started(started)
        may_go_on = self.was_cut_short or self.may_find_room
        is_idle = len(self._jobs) < MAX_JOBS_IN_FLIGHT and not may_go_on
        if left <= started or (not started and is_idle):
            search.end()

    def demote_coldest(self, n: int) -> int:
        """Start writing up to `n` of the coldest dirty blocks; returns how many are on their way.

        Blocks that are below already, or not admitted, are settled instead: that may be nearly all
        of the level, so a look ends when it settled `n` blocks, or `MAX_SETTLED`
        (`was_cut_short`).
        """
        return self._demote_coldest(n, None, max(n, MAX_SETTLED))

    def clean_ahead(self, n: int) -> bool:
        """Write `n` more of the coldest blocks down; True if clean slots are on their way."""
        if self._level.is_last:
            return False
        self.demote_coldest(n)
        if self.is_moving or self.was_cut_short or self.may_find_room:
            return True
        # blocks that were found to lie below already can leave at once
        return bool(self._level.policy.coldest(1, (), self._level.dirt.settled_mask))

    def demote_due(self, aging: Aging) -> None:
        """Start writing the blocks that have come of age."""
        due = aging.take_due(self.room_blocks)  # a long queue is not turned over at every step
        left = self.demote(due) if due else 0
        aging.put_back(due[len(due) - left :])

    def demote(self, block_hashes: Sequence[BlockHash]) -> int:
        """Start writing these blocks if they are here, ready and dirty; returns how many are left.

        Those left are at the end of the list: offer them again.
        """
        self.may_find_room = False
        left = len(block_hashes)
        while left and self._may_start() and (size := self._next_size(left)):
            start = len(block_hashes) - left
            part = block_hashes[start : start + size]
            if self._send(self.search.dirty_among(reversed(part))) is None:
                break
            left -= size
        return left

    def land(self, ended: Ended) -> Transfer:
        """A copy ended. Returns its job."""
        job = self._jobs.pop(ended.ticket)
        if job.is_orphan:
            self._level.release(job)
            return job
        settled: list[int] = []
        failed: list[int] = []
        again: list[BlockHash] = []
        for block_hash, source, outcome in zip(
            job.hashes, job.statuses, ended.outcomes, strict=True
        ):
            source.ref_cnt -= 1
            if outcome is BlockOutcome.OK or outcome in NOT_WANTED:
                settled.append(source.block_id)
            else:
                failed.append(source.block_id)
                if outcome is not BlockOutcome.NO_SPACE:
                    again.append(block_hash)
        self._level.dirt.set_settled(settled)
        self._level.dirt.set_dirty(failed)
        if again:
            self._put_off(again)
        return job

    def take_in_lost(self) -> None:
        """Blocks that left the port are dirty again. At once, before anything leaves the level."""
        lost = self._below.take_lost()
        if lost:
            self._level.note_lost_below(lost)
            if self._lost is not None:
                self._lost += lost

    def take_lost(self) -> list[BlockHash]:
        """Keys that left the port since the last call."""
        self.take_in_lost()
        lost, self._lost = self._lost or [], []
        return lost

    def orphan(self) -> list[Transfer]:
        """The level was reset: nothing of its copies is kept when they end."""
        for job in self._jobs.values():
            job.is_orphan = True
        if self._lost:
            self._lost.clear()
        return self.jobs

    def _demote_coldest(self, n: int, window: int | None, max_settled: int) -> int:
        """`window`: look only among that many of the coldest blocks."""
        started = settled = 0
        self.was_cut_short = self.may_find_room = False
        while started < n and self._may_start():
            self.was_cut_short = settled >= max_settled
            if self.was_cut_short:
                break
            limit = self._next_size(n - started)
            if limit == 0:
                break
            cold = self.search.next_cold(limit, window)
            sent = self._send(cold)
            if sent is None or not cold:
                break
            started += sent
            settled += len(cold) - sent
        return started

    def _next_size(self, n: int) -> int:
        """How many of `n` blocks the next job may take; with 0 the rest is for a later step."""
        n = min(n, self._batch)
        room = self._below.room(n)
        self.may_find_room = room == 0
        return room

    def _may_start(self) -> bool:
        return len(self._jobs) < MAX_JOBS_IN_FLIGHT and self._below.takes_puts

    def _put_off(self, block_hashes: Iterable[BlockHash]) -> None:
        if self._aging is not None:
            self._aging.note(block_hashes)

    def _send(self, cold: Pairs) -> int | None:
        """Start one job. Coldest first in, prefix order out. None: no job can start now."""
        wanted = self._filter(cold)
        if not wanted:
            return 0
        wanted.reverse()
        hashes = [block_hash for block_hash, _ in wanted]
        slots = [status.block_id for _, status in wanted]
        ticket = next(self._tickets)
        answers = self._below.put(ticket, hashes, slots)
        if answers.count(Put.STARTED) < len(answers):
            wanted = self._sort(wanted, answers)
        started = len(wanted)
        if started:
            statuses = [status for _, status in wanted]
            for status in statuses:
                status.ref_cnt += 1
            self._level.dirt.set_arriving([status.block_id for status in statuses])
            going = [block_hash for block_hash, _ in wanted]
            self._jobs[ticket] = Transfer(ticket, going, statuses, self._clock())
        self.take_in_lost()  # the port may have made room
        return started if started or Put.ALREADY in answers else None

    def _sort(self, wanted: Pairs, answers: Sequence[Put]) -> Pairs:
        """Some blocks were not taken. Returns those that are on their way."""
        by_answer: dict[Put, Pairs] = {answer: [] for answer in Put}
        for pair, answer in zip(wanted, answers, strict=True):
            by_answer[answer].append(pair)
        self.may_find_room = Put.LATER in answers and not by_answer[Put.STARTED]
        if by_answer[Put.STARTED]:
            self._put_off([block_hash for block_hash, _ in by_answer[Put.LATER]])
        for answer in (Put.ALREADY, Put.OVER_BUDGET):
            self._level.dirt.set_settled([s.block_id for _, s in by_answer[answer]])
        return by_answer[Put.STARTED]

    def _filter(self, cold: Pairs) -> Pairs:
        """Settle blocks that are below already or that admission refuses; return the others."""
        wanted: Pairs = []
        settled: list[int] = []
        may_hold, admits = self._below.may_hold, self._admission.admits
        uses = self._level.uses
        for block_hash, status in cold:
            slot = status.block_id
            if may_hold(block_hash) == 1:
                settled.append(slot)
            elif not admits(block_hash, uses.of(slot)):
                settled.append(slot)
                uses.note_refused(block_hash, slot)
                self.counters.demote_refused_blocks += 1
            else:
                wanted.append((block_hash, status))
        self._level.dirt.set_settled(settled)
        return wanted
