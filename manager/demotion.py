"""Demotion: write dirty blocks to the tier below, ahead of demand.

The demoter writes the coldest dirty blocks of the first tier in batches. After the write, the block
is settled: it stays readable, and its eviction costs nothing. A block whose write failed stays
dirty. It is written again later if it is still in the first tier.

If the tier below evicts a block, the block above becomes dirty again. In every write mode it is
written again once it is among the coldest. Its age does not cause a second write. Otherwise an idle
engine above a smaller tier would write for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from ..tiers.base import BlockHash, BlockOutcome, Pairs, slot_of
from .admission import AdmissionFunction
from .below.port import NOT_WANTED, Ended, Put
from .core import MAX_JOBS_IN_FLIGHT, Clock, ManagerCore, batch_blocks
from .counters import LinkCounters
from .first_tier import FirstTier, Transfer

MAX_SETTLED = 512
"""Largest number of blocks that one step settles without a write, at a few microseconds each. After
a restart, or with strict admission, most blocks of the tier are such."""
_NO_USE = frozenset({Put.ALREADY, Put.UNWANTED})
"""Answers of the port to blocks that need no write now."""
_LATER = (Put.LATER, Put.FULL, Put.RESTING, Put.NOT_TAKEN)
"""Answers of the port to blocks that it may take in another job."""
AGING_PER_SLOT = 2
"""Limit on the entries per slot of the queue of stored blocks."""


class Aging:
    """Queue of stored blocks, each once, with the times of their last stores, oldest first.

    If the queue is full, its oldest blocks are due at once, unless they were written or evicted
    meanwhile.
    """

    def __init__(self, clock: Clock, top: FirstTier, age_s: float) -> None:
        """Blocks are due once they are `age_s` old."""
        self._clock = clock
        self._top = top
        self._age_s = age_s
        self.stored: OrderedDict[BlockHash, float] = OrderedDict()
        """Blocks with the times of their stores, oldest first."""
        self.due: OrderedDict[BlockHash, None] = OrderedDict()
        """Blocks to write now. Some may have been written or evicted meanwhile."""

    def note(self, block_hashes: Sequence[BlockHash]) -> None:
        """Append blocks that are dirty from now on."""
        now_s, stored = self._clock(), self.stored
        for block_hash in block_hashes:
            stored.pop(block_hash, None)
            stored[block_hash] = now_s
        for _ in range(len(stored) - AGING_PER_SLOT * self._top.capacity):
            self._make_due(stored.popitem(last=False)[0])

    def take_due(self, n: int) -> list[BlockHash]:
        """Remove and return up to `n` due blocks."""
        due_s = self._clock() - self._age_s
        due = list(islice(self.due, n))
        for block_hash in due:
            del self.due[block_hash]
        aged: list[BlockHash] = []
        for block_hash, stored_s in islice(self.stored.items(), n - len(due)):
            if stored_s > due_s:
                break
            aged.append(block_hash)
        for block_hash in aged:
            del self.stored[block_hash]
        return list(dict.fromkeys(due + aged)) if due else aged

    def put_back(self, block_hashes: Sequence[BlockHash]) -> None:
        """Return due blocks that could not be written yet, before all others."""
        for block_hash in reversed(block_hashes):
            self.due[block_hash] = None
            self.due.move_to_end(block_hash, last=False)

    def clear(self) -> None:
        """Forget all blocks, because the first tier was reset."""
        self.stored.clear()
        self.due.clear()

    def _make_due(self, block_hash: BlockHash) -> None:
        """Add a block if it is dirty. If there are more due blocks than slots, look at two others,
        and drop those that are clean or gone."""
        due, is_dirty = self.due, self._top.is_dirty
        if is_dirty(block_hash):
            due[block_hash] = None
        if len(due) > self._top.capacity:
            for _ in range(2):
                first, _ = due.popitem(last=False)
                if is_dirty(first):
                    due[first] = None


class ColdSearch:
    """Find dirty blocks: the coldest, or the most useful ones."""

    def __init__(self, top: FirstTier) -> None:
        self._top = top
        self._ahead = MAX_JOBS_IN_FLIGHT * batch_blocks(top.block_size)
        self._found: list[BlockHash] = []
        """Blocks that the last search found beyond the limit of its caller, coldest first."""

    def next_cold(self, limit: int, window: int | None) -> Pairs:
        """Return up to `limit` of the coldest dirty blocks; an empty list if there are no more.

        A search in a window skips all clean blocks first, so it collects blocks for several jobs.
        The next calls return the blocks left over, if they are still dirty.
        """
        while self._found:
            part, self._found = self._found[:limit], self._found[limit:]
            if cold := self.dirty_among(part):
                return cold
        ahead, mask = limit if window is None else self._ahead, self._top.dirt.dirty_mask
        found = self._top.policy.coldest(ahead, mask=mask, window=window)
        self._found = [block_hash for block_hash, _ in found[limit:]]
        return found[:limit]

    def dirty_among(self, block_hashes: Iterable[BlockHash]) -> Pairs:
        """Return those blocks that are in the first tier, ready and dirty."""
        get, dirty = self._top.policy.get, self._top.dirt.dirty
        return [
            (block_hash, status)
            for block_hash in block_hashes
            if (status := get(block_hash)) is not None
            and status.ref_cnt >= 0
            and dirty[status.block_id]
        ]

    def most_useful(self, n: int, in_use: Sequence[BlockHash]) -> list[BlockHash]:
        """Return up to `n` dirty blocks, the most useful for the next start first.

        `in_use`: pinned blocks, tails before heads. Searches do not find pinned blocks.
        """
        top = self._top
        if n <= 0:
            return []
        idle = top.policy.coldest(len(top.policy), mask=top.dirt.dirty_mask)
        hottest_first = [*reversed(self.dirty_among(in_use)), *reversed(idle)]
        return top.uses.by_use([*dict(hottest_first).items()])[:n]


class Demoter:
    """Write dirty blocks of the first tier to the port below it. Used under the manager's lock."""

    def __init__(
        self, core: ManagerCore, admits: AdmissionFunction | None, aging: Aging | None
    ) -> None:
        """`admits` decides whether a block is written; None: all are.

        `aging` has the blocks to write at a certain age; None: a block is written when cold.

        A scan starts if fewer of the coldest slots are clean than the low watermark says, and ends
        at the high one.
        """
        top, options = core.top, core.options
        self._top = top
        self._core = core
        self._below = core.below
        self._admits = admits
        self.aging = aging
        """Blocks to write once they are due. After a write that failed, they come back."""
        self.search = ColdSearch(top)
        self.batch_blocks = batch_blocks(top.block_size)
        """Most blocks of one job."""
        self._window = max(1, round(options.high_watermark * top.capacity))
        slack = round((options.high_watermark - options.low_watermark) * top.capacity)
        self._slack = max(1, slack)
        self._taken_at_scan = -self._slack
        """Slots that the first tier had allocated when the last scan ended."""
        self._started_by_scan = 0
        self.jobs: dict[int, Transfer] = {}
        """Writes in flight, by ticket."""
        self.was_cut_short = False
        """True if the last scan ended because it had settled too many blocks."""
        self.may_find_room = False
        """True if the last scan ended for lack of room below, and room is being made."""

    @property
    def counters(self) -> LinkCounters:
        """Traffic into the tier below."""
        return self._below.links[0]

    def maintain(self) -> None:
        """Start the writes that are due: of cold blocks, and of blocks of a certain age."""
        if self._top.taken_blocks - self._taken_at_scan >= self._slack:
            self._keep_ahead()
        aging = self.aging
        if aging is None or not (aging.stored or aging.due):
            return
        free_jobs = MAX_JOBS_IN_FLIGHT - self._counted_jobs
        if free_jobs <= 0 or not self._below.takes_puts or self._below.is_blocked:
            return
        due = aging.take_due(free_jobs * self.batch_blocks)
        left = self.demote(due) if due else 0
        if left:
            aging.put_back(due[-left:])

    def _keep_ahead(self) -> None:
        """Clean the coldest blocks, because the low watermark may have been passed.

        There is one scan for each `high - low` slots taken, so the cost per store is constant. A
        scan writes at most as many blocks as the window has. Without this limit, an idle engine
        above a smaller tier would write for ever, because evictions there make blocks dirty again.
        A scan that settles many blocks continues in the next step.
        """
        top = self._top
        if self._core.is_single:
            return
        window = self._window - top.backend.get_num_free_blocks()
        left = window - self._started_by_scan
        started = self.demote_coldest(left, window) if left > 0 else 0
        self._started_by_scan += started
        may_go_on = self.was_cut_short or self.may_find_room
        is_idle = self._counted_jobs < MAX_JOBS_IN_FLIGHT and not may_go_on
        if left <= started or (not started and is_idle):
            self._taken_at_scan, self._started_by_scan = top.taken_blocks, 0

    def demote_coldest(self, n: int, window: int | None = None) -> int:
        """Start writing up to `n` of the coldest dirty blocks. Return the number started.

        Blocks that the tier below holds, or that admission refuses, are settled instead. These may
        be nearly all blocks of the tier. A scan therefore ends after `MAX_SETTLED` settled blocks
        (`was_cut_short`). Without a `window` it searches all blocks, not only so many of the
        coldest, and ends after `n` settled blocks if that is more.
        """
        max_settled = MAX_SETTLED if window is not None else max(n, MAX_SETTLED)
        started = settled = 0
        self.was_cut_short = self.may_find_room = False
        while started < n and not self.was_cut_short:
            limit = self._next_size(min(n - started, max_settled - settled))
            if not limit:
                break
            cold = self.search.next_cold(limit, window)
            sent = self._send(cold)
            if sent is None or not cold:
                break
            started += sent
            settled += len(cold) - sent
            self.was_cut_short = started < n and settled >= max_settled
        return started

    def clean_ahead(self, n: int) -> bool:
        """Write `n` more of the coldest blocks. Return True if some slots will be clean soon."""
        if self._core.is_single:
            return False
        self.demote_coldest(n)
        if self.was_cut_short or self.may_find_room:
            return True
        if self.jobs and not self._below.write_state().is_stalled:
            return True
        # settled blocks can be evicted at once
        return self._top.has_victim(may_drop_dirty=False)

    def demote(self, block_hashes: Sequence[BlockHash]) -> int:
        """Start writing those blocks that are in the first tier, ready and dirty.

        Return the number of blocks left for another call. They are the last ones of the list.
        """
        self.may_find_room = False
        left = len(block_hashes)
        while left and (size := self._next_size(left)):
            start = len(block_hashes) - left
            part = block_hashes[start : start + size]
            if self._send(self.search.dirty_among(reversed(part))) is None:
                break
            left -= size
        return left

    def land(self, ended: Ended) -> Transfer:
        """Take in the outcomes of a write that ended. Return its job.

        The tier below may store a block and evict it again before the last block of the job is
        written. It then was marked dirty already, and stays so.
        """
        job = self.jobs.pop(ended.ticket)
        if job.is_orphan:
            self._top.release(job.statuses)
            return job
        settled: list[int] = []
        failed: list[int] = []
        again: list[BlockHash] = []
        ok, dirty, may_hold = BlockOutcome.OK, self._top.dirt.dirty, self._below.may_hold
        for block_hash, source, outcome in zip(
            job.hashes, job.statuses, ended.outcomes, strict=True
        ):
            source.ref_cnt -= 1
            slot = source.block_id
            if outcome is ok or outcome in NOT_WANTED:
                if not dirty[slot] or may_hold(block_hash) > 0:
                    settled.append(slot)
            else:
                failed.append(slot)
                again.append(block_hash)
        self._top.dirt.set_settled(settled)
        self._top.dirt.set_dirty(failed)
        if again and self.aging is not None:
            self.aging.note(again)
        return job

    def orphan(self) -> list[Transfer]:
        """Mark all writes in flight as orphans, because the first tier was reset. Return them."""
        if self.aging is not None:
            self.aging.clear()
        for job in self.jobs.values():
            job.is_orphan = True
        return list(self.jobs.values())

    def _next_size(self, n: int) -> int:
        """Return how many of `n` blocks the next job may contain; 0: try again in a later step."""
        if self._counted_jobs >= MAX_JOBS_IN_FLIGHT or not self._below.takes_puts:
            return 0
        room = self._below.room(min(n, self.batch_blocks))
        self.may_find_room = room == 0
        return room

    @property
    def _counted_jobs(self) -> int:
        """Number of writes in flight that count against the limit. A slow tier must hold up no
        other one, nor must the nearest one while it hangs."""
        return 0 if self._below.has_stand_in else len(self.jobs) - self._below.late_puts

    def _send(self, cold: Pairs) -> int | None:
        """Start one job. Return the number of blocks in it; None: no job can start now.

        `cold` has the coldest block first. The port gets the blocks in the opposite order, which is
        prefix order.
        """
        wanted = self._filter(cold)
        if not wanted:
            return 0
        wanted.reverse()
        hashes, statuses = map(list, zip(*wanted, strict=True))
        ticket = next(self._core.tickets)
        for status in statuses:  # after an interrupt in `put`, the node may read these slots
            status.ref_cnt += 1
        job = self.jobs[ticket] = Transfer(hashes, statuses, self._core.clock())
        answers = self._below.put(ticket, hashes, list(map(slot_of, statuses)))
        if answers.count(Put.STARTED) < len(answers):
            for status in statuses:
                status.ref_cnt -= 1
            wanted = self._sort(wanted, answers)
            if not wanted:
                del self.jobs[ticket]
                return None if _NO_USE.isdisjoint(answers) else 0
            job.hashes, job.statuses = map(list, zip(*wanted, strict=True))
            for status in job.statuses:
                status.ref_cnt += 1
        self._top.dirt.set_arriving(list(map(slot_of, job.statuses)))
        return len(wanted)

    def _sort(self, wanted: Pairs, answers: Sequence[Put]) -> Pairs:
        """Settle or defer the blocks that the port refused. Return those whose write started."""
        by_answer: dict[Put, Pairs] = {answer: [] for answer in Put}
        for pair, answer in zip(wanted, answers, strict=True):
            by_answer[answer].append(pair)
        self.may_find_room = Put.LATER in answers and not by_answer[Put.STARTED]
        all_come_back = not by_answer[Put.STARTED] and _NO_USE.isdisjoint(answers)
        if self.aging is not None and not all_come_back:
            for answer in _LATER:
                self.aging.note([block_hash for block_hash, _ in by_answer[answer]])
        for answer in (*_NO_USE, Put.OVER_BUDGET):
            self._top.dirt.set_settled([s.block_id for _, s in by_answer[answer]])
        return by_answer[Put.STARTED]

    def _filter(self, cold: Pairs) -> Pairs:
        """Settle blocks that are below already or that admission refuses; return the others."""
        wanted: Pairs = []
        settled: list[int] = []
        below, admits = self._below, self._admits
        uses = self._top.uses
        for block_hash, status in cold:
            slot = status.block_id
            if below.may_hold(block_hash) == 1 and not below.wants_again(block_hash):
                settled.append(slot)
            elif admits is None or admits(block_hash, uses.of(slot)):
                wanted.append((block_hash, status))
            else:
                settled.append(slot)
                uses.note_refused(block_hash, slot)
                self.counters.demote_refused_blocks += 1
        if settled:
            self._top.dirt.set_settled(settled)
        return wanted
