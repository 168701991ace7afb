"""`prefix`: an order that keeps a conversation's blocks by the expected time of its next request.

Blocks form a tree, and a block without its ancestors is useless. Blocks that one request used
together are used together again, by the next request of the same conversation. So the unit of
eviction is the *run*: blocks that the same request was the last to use. Each request makes two. The
*shared* run ends at the last block where another conversation branched off. The *tip* is the rest.
If a request continues from the middle of a tip, the remainder is *left behind*. It looks as popular
as the used part, and is dead.

- **Victims** are the runs of least value. `ReuseModel` gives the value: expected uses per time of
  waiting, by kind of run, uses, gap between uses and number of new blocks. Without data the order
  is LRU.
- **Tails leave before heads**, and a run leaves after its descendants: its value is at least that
  of its best descendant. So every block that is present can be used.
- **Ghosts**: the record of a run stays after its blocks were evicted. Some of its blocks are
  remembered with it: the last ones, and some along the way. So a request that continues from blocks
  that were stored again is recognised, and the model learns of returns that came too late.
- **Time** is counted in requests, so that an engine under twice the load forgets no faster.

Blocks are stored before their request ends. Until then they have the value of an average run. If
`note_chain` is never called, the order is LRU by batches.

Values are computed again after a sixteenth more requests, and runs are sorted again when 1/32 of
them are new. Both survive a restart. After a crash only the order by last use remains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..base import SlotMask
from .order import ArraySource, EvictionOrder, heap_arrays, scalars
from .parts.log import Search
from .parts.reuse import (
    AGES,
    HALVE_EVERY,
    LEFT_BEHIND,
    SHARED,
    TIPS,
    UNKNOWN,
    Ints,
    ReuseModel,
    class_of,
    use_class,
)
from .parts.runs import ANCIENT, GAP_SCALE, Runs, Slots

LEARN_SHARE, LEARN_MIN, LEARN_MAX = 1 / 16, 16, 512
"""Share of all requests after which values are computed again, with its limits in requests."""
RANK_SHARE = 1 / 32
"""Share of new runs at which runs are sorted again; until then new runs leave last."""
DEPTH_ROUNDS = 8
"""Number of runs up the tree to which a run's value is passed."""
GHOSTS_PER_RUN = 2
"""Minimum number of remembered blocks per record of a run."""
LAST_KEPT = 2
"""Number of last blocks of an evicted run that are remembered. Blocks at depths with no bits set
but the first two (0, 1, 2, 3, 4, 6, 8, 12, 16...) are remembered as well: few, so that they last,
and enough to see roughly where another request branches off."""
LEFT_ROUNDS = 4
"""Maximum length of a chain of left-behind runs that is followed."""
RUNS_AT_ONCE = 16
"""Number of runs whose slots are read first; each further read takes twice as many."""

_SHARED = class_of(SHARED, None, 0)
"""First class of shared runs."""
_NOW, _LEARNT_AT, _RANKED, _LAST_RANKED = range(4)


class _Part(NamedTuple):
    """Consecutive blocks of a request that belong to one run."""

    place: int
    """Place of the run's record."""
    here: int
    """Number of blocks that were not evicted since the run used them."""
    end: int
    """Depth of the last block, plus one."""
    last_slot: int
    """Slot of the last block."""


class PrefixOrder(EvictionOrder):
    """Runs by their expected use: about 89 bytes a slot, ghosts included; 2.1 MB in small tiers."""

    wants_tags = True
    wants_chains = True
    state_bytes = 2304 << 10
    state_bytes_per_slot = 105

    def __init__(self, capacity: int, arrays: ArraySource = heap_arrays) -> None:
        super().__init__(capacity, arrays)
        self._runs = Runs("prefix", capacity, arrays)
        records = self._records = self._runs.records
        self._model = ReuseModel("prefix", arrays)
        entries = 1 << (GHOSTS_PER_RUN * records.size - 1).bit_length()
        self._ghost_mask = np.uint64(entries - 1)
        self._ghost_tag = arrays("prefix_ghost_tag", entries, np.uint64)
        self._ghost_run = arrays("prefix_ghost_run", entries, np.int64)
        """Run numbers of evicted blocks by tag: a hash table where later entries replace others."""
        self._was_of = arrays("prefix_was_of", capacity, np.int64)
        """Run of each slot's block before the block was evicted and stored again; 0: none."""
        self._values = np.zeros(records.size)
        """Scratch space of `_rank`, by place."""
        self._ranking = arrays("prefix_ranking", records.size, np.int32)
        self._state_array = arrays("prefix_state", 4, np.int64)
        self._state = scalars(self._state_array)

    # ---- what happened -------------------------------------------------------------------

    def insert(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        batch, wanted = np.asarray(slots, np.int32), np.asarray(tags, np.uint64)
        entries = wanted & self._ghost_mask
        is_known = self._ghost_tag[entries] == wanted
        self._was_of[batch] = np.where(is_known, self._ghost_run[entries], 0)
        self._runs.put(batch, (self._runs.add(self._state[_NOW]), len(batch)))

    def touch(self, slots: Sequence[int]) -> None:
        # A block of an ended request is used only when a later request ends that has the block.
        batch = np.asarray(_distinct(slots), np.int32)
        batch = batch[self._records.class_.array[self._runs.run_of[batch]] == UNKNOWN]
        if len(batch):
            self._runs.put(batch, (self._runs.add(self._state[_NOW]), len(batch)))

    def settle(self, slots: Sequence[int]) -> None:
        self.touch(slots)

    def chain(self, slots: Sequence[int], blocks: int) -> None:
        now = self._state[_NOW] = self._state[_NOW] + 1
        runs, records, chain = self._runs, self._records, np.asarray(slots, np.int32)
        begin = runs.depth_of_first(slots)
        end, blocks = begin + len(slots), begin + blocks
        parts = self._owners(chain, begin)
        before, known = self._take_over(parts, blocks)
        root, uses, gap = self._continued(before, known)
        tip = runs.add(now)
        self._describe(tip, TIPS + use_class(uses), uses, gap, blocks - known)
        records.first.of[tip], records.depth.of[tip] = root, blocks
        root_end = min(max(root, begin), end)
        made = [(tip, end - root_end)]
        if root_end > begin:
            owner = next(part.place for part in parts if part.end >= root_end)
            uses, gap = self._used_again(owner)
            shared = runs.add(now)
            self._describe(shared, SHARED + use_class(uses - 1), uses, gap, 0)
            records.depth.of[shared] = root_end
            records.anchor.of[tip] = slots[root_end - begin - 1] + 1
            made.append((shared, root_end - begin))
        runs.put(chain[::-1], *made)
        runs.depth_of[chain] = np.arange(begin, end)
        if begin:  # the first blocks are missing in `slots`, but precede these
            above = runs.slots(np.array([parts[0].place]))
            records.anchor.of[made[-1][0]] = int(above[0]) + 1 if len(above) else 0
        self._learn_if_due()

    def remove(self, slots: Sequence[int]) -> None:
        self._runs.discard(np.asarray(slots, np.int32))

    def evicted(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        runs, records, batch = self._runs, self._records, np.asarray(slots, np.int32)
        owners, depth = runs.run_of[batch], runs.depth_of[batch]
        is_kept = _is_landmark(depth) | (records.depth.array[owners] - depth <= LAST_KEPT)
        is_kept &= records.class_.array[owners] != UNKNOWN  # those stored again are remembered
        kept = np.flatnonzero(is_kept)
        if len(kept):
            left = np.asarray(tags, np.uint64)[kept]
            entries = left & self._ghost_mask
            self._ghost_tag[entries] = left
            self._ghost_run[entries] = records.number.array[owners[kept]]
        runs.discard(batch)

    # ---- who leaves ----------------------------------------------------------------------

    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        found = self._runs.search(self._ranked(), Search(wanted, mask, window))
        return list(islice(found, max(limit, 0)))

    def _ranked(self) -> Iterator[Ints]:
        """Yield the places of all runs with slots in order of eviction, some at a time."""
        runs, records, state = self._runs, self._records, self._state
        if records.next_number - 1 - state[_LAST_RANKED] > state[_RANKED] * RANK_SHARE:
            ranking = self._rank()
            self._ranking[: len(ranking)] = ranking
            state[_RANKED], state[_LAST_RANKED] = len(ranking), records.next_number - 1
        if runs.live.of[ANCIENT]:
            yield np.array([ANCIENT])
        at, n = 0, RUNS_AT_ONCE
        while at < state[_RANKED]:
            places = self._ranking[at : min(at + n, state[_RANKED])].astype(np.int64)
            is_same = records.number.array[places] <= state[_LAST_RANKED]
            yield places[is_same & (runs.live.array[places] > 0)]
            at, n = at + n, 2 * n
        first = max(state[_LAST_RANKED] + 1, records.next_number - records.size + 1)
        later = np.arange(first, records.next_number) % records.size
        yield later[(runs.live.array[later] > 0) & (later != ANCIENT)]

    def _rank(self) -> Ints:
        runs, records = self._runs, self._records
        held = runs.held()
        ages = self._state[_NOW] - records.made_at.array[held] + 1
        value = self._values
        value[held] = self._model.value(records.class_.array[held], ages)
        hanging = held[records.anchor.array[held] > 0]
        above = runs.run_of[records.anchor.array[hanging] - 1]
        for _ in range(DEPTH_ROUNDS):
            least = np.nextafter(value[hanging], np.inf)
            is_raised = np.flatnonzero(least > value[above])
            if not len(is_raised):
                break
            np.maximum.at(value, above[is_raised], least[is_raised])
        return np.asarray(held[np.argsort(value[held], kind="stable")])

    # ---- what a request tells ------------------------------------------------------------

    def _owners(self, chain: Slots, begin: int) -> list[_Part]:
        """Return the runs that used a chain last; the chain's first block has depth `begin`.

        A block that came in again counts for the run that it belonged to before it left. Few of the
        blocks that left are remembered, but a run that used a block used all blocks before it too.
        """
        runs, records, latest = self._runs, self._records, 0
        steps: list[list[int]] = []
        """Last step first: the end of a part, the place of its run, and its blocks still here."""
        for place, start, stop in reversed(runs.segments(chain)):
            is_known = records.class_.of[place] != UNKNOWN
            if is_known:
                uses = [(stop, records.number.of[place])]
            else:
                uses = self._remembered(chain, start, stop)
                if not latest:
                    steps.append([stop, place, stop - start])
            for end, number in uses:
                if number > latest:
                    latest = number
                    if steps and steps[-1][0] == end:
                        steps.pop()
                    steps.append([end, number % records.size, 0])
            if is_known and records.number.of[place] == latest:
                steps[-1][2] += stop - start
        return [
            _Part(place, here, begin + end, int(chain[end - 1]))
            for end, place, here in reversed(steps)
        ]

    def _remembered(self, chain: Slots, start: int, stop: int) -> list[tuple[int, int]]:
        """Return `(end, number)` of runs that blocks belonged to before they left, last first."""
        was = self._was_of[chain[start:stop]]
        at = np.flatnonzero(was)[::-1]
        found: list[tuple[int, int]] = []
        if len(at):
            records = self._records
            for index, number in zip(at.tolist(), was[at].tolist(), strict=True):
                for _ in range(LEFT_ROUNDS):
                    place = number % records.size
                    if records.number.of[place] != number or records.rest.of[place] <= 0:
                        break
                    number = records.rest.of[place]
                if records.number.of[number % records.size] == number:
                    found.append((start + index + 1, number))
        return found

    def _take_over(self, parts: list[_Part], blocks: int) -> tuple[int, int]:
        """Note the use of parts of earlier runs by a request.

        Returns the place of the run that the request continues (-1: none), and its number of
        blocks that earlier runs had.
        """
        before, known = -1, 0
        for part in parts:
            if self._records.class_.of[part.place] == UNKNOWN:
                break
            self._use(part)
            before, known = part.place, part.end
        return before, min(known, blocks)

    def _use(self, part: _Part) -> None:
        """Note the use of a part of a run."""
        runs, records, owner = self._runs, self._records, part.place
        if self._is_shared(owner):
            if part.end < records.depth.of[owner]:
                records.anchor.of[owner] = part.last_slot + 1
            else:
                self._came_back(owner)
            return
        is_first = records.ended_at_age.of[owner] == 0
        self._came_back(owner)
        left = records.depth.of[owner] - part.end
        if left > 0 and (is_first or part.here < runs.live.of[owner]):
            rest = runs.add(self._state[_NOW])
            records.rest.of[owner] = records.number.of[rest]
            records.first.of[rest] = records.first.of[owner]
            records.depth.of[rest] = records.depth.of[owner]
            uses, gap = records.uses.of[owner], records.gap_scaled.of[owner]
            self._describe(rest, LEFT_BEHIND, uses, gap, left)
            records.anchor.of[rest] = part.last_slot + 1
            runs.move_all(owner, rest)

    def _continued(self, before: int, known: int) -> tuple[int, int, int]:
        """Return where a request's tip begins that continues a run, with its uses and gap."""
        records = self._records
        if before < 0 or self._is_shared(before) or known <= records.first.of[before]:
            return known, 0, 0
        uses, gap = self._used_again(before)
        is_whole = known >= records.depth.of[before] - 1
        return records.first.of[before] if is_whole else known, uses, gap

    def _used_again(self, place: int) -> tuple[int, int]:
        """Return a run's uses, this one included, and the scaled mean of the gaps between them."""
        records = self._records
        gap = round(GAP_SCALE * math.log2(1 + self._state[_NOW] - records.made_at.of[place]))
        uses = records.uses.of[place] + 1
        return uses, gap if uses == 1 else (records.gap_scaled.of[place] + gap) // 2

    def _describe(self, place: int, kind: int, uses: int, gap_scaled: int, blocks: int) -> None:
        records = self._records
        records.uses.of[place], records.gap_scaled.of[place] = uses, gap_scaled
        records.class_.of[place] = class_of(kind, gap_scaled / GAP_SCALE if uses else None, blocks)

    # ---- learning ------------------------------------------------------------------------

    def _came_back(self, place: int) -> None:
        """Note the return of a run or a part of it; only the first return counts."""
        records = self._records
        ended_of = records.ended_at_age.of
        if ended_of[place] == 0:
            age = ended_of[place] = max(1, self._state[_NOW] - records.made_at.of[place])
            self._model.note_return(records.class_.of[place], age)

    def _learn_if_due(self) -> None:
        state = self._state
        now, last = state[_NOW], state[_LEARNT_AT]
        if now - last < min(max(now * LEARN_SHARE, LEARN_MIN), LEARN_MAX):
            return
        if now // HALVE_EVERY > last // HALVE_EVERY:
            self._model.halve()
        self._look_at_aged()
        self._model.update_values()
        state[_LEARNT_AT] = now

    def _look_at_aged(self) -> None:
        """Count the runs that reached each class of age since the last call."""
        records = self._records
        oldest, stop = max(1, records.next_number - records.size + 1), records.next_number
        for age_class, age in enumerate(AGES[:-1].tolist()):
            start = max(int(records.looked_at[age_class]), oldest)
            until = records.first_made_after(self._state[_NOW] - age, start, stop)
            records.looked_at[age_class] = until
            places = np.arange(start, until) % records.size
            ended = records.ended_at_age.array[places]
            waiting = places[(ended == 0) | (ended >= age)]
            self._model.note_aged(age_class, records.class_.array[waiting])

    # ---- the rest ------------------------------------------------------------------------

    def _is_shared(self, place: int) -> bool:
        return _SHARED <= self._records.class_.of[place] < UNKNOWN

    def clear(self) -> None:
        self._forget_learnt()
        self._runs.clear()

    def reconcile(self, present: npt.NDArray[np.integer]) -> None:
        self._forget_learnt()
        self._runs.rebuild(present)

    def _forget_learnt(self) -> None:
        self._model.clear()
        self._ghost_tag[:] = 0
        self._ghost_run[:] = 0
        self._was_of[:] = 0
        self._state_array[:] = 0

    def __contains__(self, slot: object) -> bool:
        return slot in self._runs.log


def _distinct(slots: Sequence[int]) -> list[int]:
    """Return slots without repetition, each at its last place."""
    return list(dict.fromkeys(reversed(slots)))[::-1]


def _is_landmark(depths: Slots) -> npt.NDArray[np.bool_]:
    """Return for each depth whether its block is remembered wherever its run ends."""
    lowest_bit = depths & -depths
    return np.asarray((depths == lowest_bit) | (depths == 3 * lowest_bit))
