"""`prefix`: blocks of conversations, kept by when their conversation is expected to go on.

Blocks form a tree, and a block without its ancestors is useless. What one request used together
comes back together, with the next request of the same conversation, so the unit here is the *run*:
the blocks that one request was the last to use. Each request makes two: the *shared* part, up to
the last block where another conversation branched off, and its own *tip*. When a request goes on
only from within a tip, the rest is *left behind*: it looks as popular as the rest, and is dead.

- **What leaves**: the run of the least value (`ReuseModel`: expected uses per time of waiting,
  learnt from what came back, by kind of run, uses, gap between uses and number of new blocks).
  Popularity counts only as far as it has predicted returns; before anything is known, this is LRU.
- **In which order**: tails before heads, and no run before those that hang on it: a run is worth
  at least what its dearest descendant is worth. So whatever is here can be used.
- **What is remembered**: records of runs stay as ghosts when their blocks have left, and are found
  by the last blocks of their request, so that the model also learns of returns that came too
  late. Without ghosts a small tier would never find out what it should have kept.
- **Time** is counted in requests: an engine under twice the load forgets no faster.

Blocks come in before their request has ended, when nothing is known of it: till then they are worth
as much as a run on average. Where `note_chain` is never called, this is LRU by batches.

Values are computed anew once a sixteenth of what was seen is new, and the order of runs once 1/32
of them are; both are kept over a restart, so that a restart changes nothing. After a crash
the order by last use is what remains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..base import SlotMask
from .log import Search
from .order import TIP_BLOCKS, ArraySource, EvictionOrder, heap_arrays, scalars
from .reuse import (
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
from .runs import ANCIENT, GAP_SCALE, Runs, Slots

LEARN_SHARE, LEARN_MIN, LEARN_MAX = 1 / 16, 16, 512
"""Values are computed anew after this share of the requests so far, within these limits."""
RANK_SHARE = 1 / 32
"""Runs are ordered anew when this share of them is new; till then the new ones leave last."""
DEPTH_ROUNDS = 8
"""How far up the tree the value of a run reaches, in runs."""
RUNS_AT_ONCE = 16
"""Runs whose slots are looked up in one go; twice as many each time."""

_NO_TIP, _SHARED = class_of(LEFT_BEHIND, None, 0), class_of(SHARED, None, 0)
"""Classes from which on a run is no tip, and from which on it is shared."""
_NOW, _LEARNT_AT, _RANKED, _LAST_RANKED = range(4)


class _Part(NamedTuple):
    """Blocks of a request that the same one used before."""

    place: int
    """Of the run that they belong to."""
    blocks: int
    end: int
    """Depth of the last one, plus one."""
    last_slot: int


class PrefixOrder(EvictionOrder):
    """Runs by their expected use: about 81 bytes a slot, ghosts included; 2.5 MB in small tiers."""

    wants_tags = True
    wants_chains = True

    def __init__(self, capacity: int, arrays: ArraySource = heap_arrays) -> None:
        super().__init__(capacity, arrays)
        runs = self._runs = Runs("prefix", capacity, arrays)
        self._model = ReuseModel("prefix", arrays)
        entries = 1 << (TIP_BLOCKS * runs.size - 1).bit_length()
        self._tip_mask = np.uint64(entries - 1)
        self._tip_tag = arrays("prefix_tip_tag", entries, np.uint64)
        self._tip_run = arrays("prefix_tip_run", entries, np.int64)
        """Hash tables without collisions resolved: the later one stays."""
        self._ranking = arrays("prefix_ranking", runs.size, np.int32)
        self._state_array = arrays("prefix_state", 4, np.int64)
        self._state = scalars(self._state_array)

    # ---- what happened -------------------------------------------------------------------

    def insert(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        place = self._runs.add(self._state[_NOW])
        ghost = self._ghost_of(tags)
        if ghost:
            self._runs.parent[place] = ghost
            self._end(ghost % self._runs.size, came_back=True, requests=1)
        self._runs.put(np.asarray(slots, np.int32), (place, len(slots)))

    def touch(self, slots: Sequence[int]) -> None:
        # A block that a chain told of is used when a chain tells of it again, and not before.
        batch = np.asarray(_distinct(slots), np.int32)
        batch = batch[self._runs.class_[self._runs.run_of[batch]] == UNKNOWN]
        if len(batch):
            self._runs.put(batch, (self._runs.add(self._state[_NOW]), len(batch)))

    def settle(self, slots: Sequence[int]) -> None:
        self.touch(slots)

    def chain(self, slots: Sequence[int], blocks: int, tip_tags: Sequence[int]) -> None:
        now = self._state[_NOW] = self._state[_NOW] + 1
        runs, chain = self._runs, np.asarray(slots, np.int32)
        begin = self._depth_of_first(slots)
        end, blocks = begin + len(slots), begin + blocks
        parts = self._owners(chain, begin)
        before, known = self._take_over(parts, blocks)
        root, uses, gap = self._continued(before, known)
        tip = runs.add(now)
        self._describe(tip, TIPS + use_class(uses), uses, gap, blocks - known)
        runs.first[tip], runs.depth[tip] = root, blocks
        root_end = min(max(root, begin), end)
        made = [(tip, end - root_end)]
        if root_end > begin:
            owner = next(part.place for part in parts if part.end >= root_end)
            # Blocks that were away are new here; their conversation is not.
            owner = before if runs.class_of[owner] == UNKNOWN and before >= 0 else owner
            uses, gap = self._used_again(owner)
            shared = runs.add(now)
            self._describe(shared, SHARED + use_class(uses - 1), uses, gap, 0)
            runs.depth[shared] = root_end
            runs.anchor_of[tip] = slots[root_end - begin - 1] + 1
            made.append((shared, root_end - begin))
        runs.put(chain[::-1], *made)
        runs.depth_of[chain] = np.arange(begin, end)
        if begin:  # its first blocks were not told of: they still come before these
            above = runs.slots(np.array([parts[0].place]))
            runs.anchor_of[made[-1][0]] = int(above[0]) + 1 if len(above) else 0
        self._remember_tip(tip, blocks, tip_tags)
        self._learn_if_due()

    def remove(self, slots: Sequence[int]) -> None:
        self._runs.discard(np.asarray(slots, np.int32))

    def evicted(self, slots: Sequence[int], tags: Sequence[int]) -> None:
        runs, batch = self._runs, np.asarray(slots, np.int32)
        owners = dict.fromkeys(runs.run_of[batch].tolist())
        runs.discard(batch)
        for place in owners:
            # Without a tip there is nothing to know it by when it comes back.
            if not runs.live_of[place] and runs.class_of[place] >= _NO_TIP:
                self._end(place, came_back=False)

    # ---- who leaves ----------------------------------------------------------------------

    def victims(
        self,
        limit: int,
        wanted: Callable[[int], bool],
        mask: SlotMask | None = None,
        window: int | None = None,
    ) -> list[int]:
        return list(islice(self._candidates(Search(wanted, mask, window)), max(limit, 0)))

    def _candidates(self, search: Search) -> Iterator[int]:
        runs = self._runs
        for places in self._ranked():
            if search.left <= 0:
                return
            slots = runs.slots(places)[: search.left]
            search.left -= len(slots)
            if search.mask is not None:
                slots = slots[search.mask[slots]]
            yield from filter(search.wanted, slots.tolist())

    def _ranked(self) -> Iterator[Ints]:
        """Places of all runs that hold slots, the first to leave first, some at a time."""
        runs, state = self._runs, self._state
        if runs.next_number - 1 - state[_LAST_RANKED] > state[_RANKED] * RANK_SHARE:
            ranking = self._rank()
            self._ranking[: len(ranking)] = ranking
            state[_RANKED], state[_LAST_RANKED] = len(ranking), runs.next_number - 1
        if runs.live_of[ANCIENT]:
            yield np.array([ANCIENT])
        at, n = 0, RUNS_AT_ONCE
        while at < state[_RANKED]:
            places = self._ranking[at : min(at + n, state[_RANKED])].astype(np.int64)
            is_same = runs.number[places] <= state[_LAST_RANKED]
            yield places[is_same & (runs.live[places] > 0)]
            at, n = at + n, 2 * n
        first = max(state[_LAST_RANKED] + 1, runs.next_number - runs.size + 1)
        later = np.arange(first, runs.next_number) % runs.size
        yield later[(runs.live[later] > 0) & (later != ANCIENT)]

    def _rank(self) -> Ints:
        runs = self._runs
        held = np.flatnonzero(runs.live)
        held = held[held != ANCIENT]
        ages = self._state[_NOW] - runs.made_at[held] + 1
        value = np.zeros(runs.size)
        value[held] = self._model.value(runs.class_[held], ages)
        hanging = held[runs.anchor[held] > 0]
        above = runs.run_of[runs.anchor[hanging] - 1]
        for _ in range(DEPTH_ROUNDS):
            before = value[above]
            np.maximum.at(value, above, np.nextafter(value[hanging], np.inf))
            if np.array_equal(before, value[above]):
                break
        return np.asarray(held[np.lexsort((runs.number[held], value[held]))])

    # ---- what a request tells ------------------------------------------------------------

    def _depth_of_first(self, slots: Sequence[int]) -> int:
        """Depth at which a chain begins: what the engine had kept itself is not told of."""
        runs = self._runs
        is_known = bool(slots) and runs.class_of[int(runs.run_of[slots[0]])] != UNKNOWN
        return int(runs.depth_of[slots[0]]) if is_known else 0

    def _owners(self, chain: Slots, begin: int) -> list[_Part]:
        """The runs along a chain whose first block has depth `begin`."""
        if not len(chain):
            return []
        owners = self._runs.run_of[chain]
        stops = [*(np.flatnonzero(owners[1:] != owners[:-1]) + 1).tolist(), len(chain)]
        starts = [0, *stops[:-1]]
        return [
            _Part(int(owners[start]), stop - start, begin + stop, int(chain[stop - 1]))
            for start, stop in zip(starts, stops, strict=True)
        ]

    def _take_over(self, parts: list[_Part], blocks: int) -> tuple[int, int]:
        """A request used these: what does that say of those who used them before?

        Returns the place of the run that it goes on from (-1: none), and how many of its blocks
        were known before.
        """
        runs = self._runs
        before, known, is_new = -1, 0, False
        for part in parts:
            if runs.class_of[part.place] == UNKNOWN:
                is_new = True
                ghost = runs.at(runs.parent[part.place])
                if ghost is not None:
                    before, known = ghost, runs.depth[ghost]
            elif not is_new:
                self._use(part)
                before, known = part.place, part.end
        return before, min(known, blocks)

    def _use(self, part: _Part) -> None:
        """A part of a run was used."""
        runs, owner = self._runs, part.place
        if self._is_shared(owner):
            if part.end < runs.depth[owner]:
                runs.anchor_of[owner] = part.last_slot + 1
            else:
                self._end(owner, came_back=True)
            return
        self._end(owner, came_back=True)
        left = runs.depth[owner] - part.end
        if left > 0 and part.blocks < runs.live_of[owner]:
            rest = runs.add(self._state[_NOW])
            runs.first[rest], runs.depth[rest] = runs.first[owner], runs.depth[owner]
            self._describe(rest, LEFT_BEHIND, runs.uses[owner], runs.gap_scaled[owner], left)
            runs.anchor_of[rest] = part.last_slot + 1
            runs.move_all(owner, rest)

    def _continued(self, before: int, known: int) -> tuple[int, int, int]:
        """Of a request that goes on from a run: the depth where its tip begins, uses and gap."""
        runs = self._runs
        if before < 0 or self._is_shared(before) or known <= runs.first[before]:
            return known, 0, 0
        uses, gap = self._used_again(before)
        is_whole = known >= runs.depth[before] - 1
        return runs.first[before] if is_whole else known, uses, gap

    def _used_again(self, place: int) -> tuple[int, int]:
        """Uses of a run, this one included, and the scaled mean of the gap between them."""
        runs = self._runs
        gap = round(GAP_SCALE * math.log2(1 + self._state[_NOW] - runs.made_at_of[place]))
        uses = runs.uses[place] + 1
        return uses, gap if uses == 1 else (runs.gap_scaled[place] + gap) // 2

    def _describe(self, place: int, kind: int, uses: int, gap_scaled: int, blocks: int) -> None:
        runs = self._runs
        runs.uses[place], runs.gap_scaled[place] = uses, gap_scaled
        runs.class_of[place] = class_of(kind, gap_scaled / GAP_SCALE if uses else None, blocks)

    def _remember_tip(self, tip: int, blocks: int, tags: Sequence[int]) -> None:
        """The last blocks of a request, as far as they are its own, lead to its tip."""
        for back, tag in enumerate(reversed(tags)):
            if blocks - back > self._runs.first[tip]:
                entry = tag & int(self._tip_mask)
                self._tip_tag[entry], self._tip_run[entry] = tag, self._runs.number_of[tip]

    # ---- learning ------------------------------------------------------------------------

    def _ghost_of(self, tags: Sequence[int]) -> int:
        """Number of the latest run whose request ended with one of these blocks; 0: none."""
        wanted = np.asarray(tags, np.uint64)
        entries = wanted & self._tip_mask
        found = self._tip_run[entries[self._tip_tag[entries] == wanted]]
        number = int(found.max()) if len(found) else 0
        return number if self._runs.at(number) is not None else 0

    def _end(self, place: int, came_back: bool, requests: int = 0) -> None:
        """A run came back, or cannot be seen to come back any more.

        `requests`: those that have begun and are counted when they end.
        """
        runs = self._runs
        if runs.ended_of[place] == 0:
            age = max(1, self._state[_NOW] + requests - runs.made_at_of[place])
            runs.ended_of[place] = age
            if came_back:
                self._model.note_return(runs.class_of[place], age)

    def _learn_if_due(self) -> None:
        state = self._state
        now, last = state[_NOW], state[_LEARNT_AT]
        if now - last < min(max(now * LEARN_SHARE, LEARN_MIN), LEARN_MAX):
            return
        if now // HALVE_EVERY > last // HALVE_EVERY:
            self._model.halve()
        self._look_at_aged()
        self._model.learn()
        state[_LEARNT_AT] = now

    def _look_at_aged(self) -> None:
        """Count the runs that have come into each class of age since this was last done."""
        runs = self._runs
        oldest, stop = max(1, runs.next_number - runs.size + 1), runs.next_number
        for age_class, age in enumerate(AGES[:-1].tolist()):
            start = max(int(runs.looked_at[age_class]), oldest)
            until = self._first_made_after(self._state[_NOW] - age, start, stop)
            runs.looked_at[age_class] = until
            places = np.arange(start, until) % runs.size
            ended = runs.ended_at_age[places]
            waiting = places[(ended == 0) | (ended >= age)]
            self._model.note_aged(age_class, runs.class_[waiting])

    def _first_made_after(self, time: int, start: int, stop: int) -> int:
        """The first run number from `start` on that was made after a time, or `stop`."""
        runs = self._runs
        while start < stop:
            middle = (start + stop) // 2
            if runs.made_at_of[middle % runs.size] <= time:
                start = middle + 1
            else:
                stop = middle
        return start

    # ---- the rest ------------------------------------------------------------------------

    def _is_shared(self, place: int) -> bool:
        return _SHARED <= self._runs.class_of[place] < UNKNOWN

    def clear(self) -> None:
        self._forget_learnt()
        self._runs.clear()

    def reconcile(self, present: npt.NDArray[np.integer]) -> None:
        self._forget_learnt()
        self._runs.rebuild(present)

    def _forget_learnt(self) -> None:
        self._model.clear()
        self._tip_tag[:] = 0
        self._tip_run[:] = 0
        self._state_array[:] = 0

    def __contains__(self, slot: object) -> bool:
        return slot in self._runs.log


def _distinct(slots: Sequence[int]) -> list[int]:
    """Slots without repetition, each where it stood last."""
    return list(dict.fromkeys(reversed(slots)))[::-1]
