"""Writing down all that is dirty while there is time: what a shutdown does.

A write that fails makes the tier below rest for some seconds, which is right while requests are
served and would lose everything here: so a flush waits until the tier may be tried again, where
that can help. It does not help where there is no room, or where a transfer never ends.

What workers load and waiting requests hold is written like the rest: an engine that is stopped at
work shall not lose what it used last. Blocks that were used often come first, and heads of prompts
before their ends: if time runs out, what was written is of use.

Of a tier that lasts, only what makes room for the blocks above is written: its own are not lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..tiers.base import BlockHash
from .demotion import Demoter
from .flow import Clock
from .level import Level

RESTS_AT_MOST = 2
"""In a row, without a block written meanwhile. The process that moves blocks is up again after one;
a device that fails three times is not waited for."""
MAX_REFRESHED_BLOCKS = 1 << 17
"""Of a tier that ends with its process the hottest, at 5 µs each where the collector was frozen and
15 where it was not; the others are as hot below as when they were written there."""
ROOM_POLL_S = 0.001
"""Between two looks at whether a tier that grows has room by now."""
PASSES_PER_LINK = 2
"""A link that found no room below is tried again once the next one has made some."""


@dataclass(frozen=True, slots=True)
class FlushMeans:
    """What the manager lends to a flush."""

    lock: AbstractContextManager[Any]
    """Held while anything is looked at, never while waiting."""
    collect: Callable[[], None]
    """Takes in what ended, on every link."""
    end_step: Callable[[], None]
    """Upkeep of the tiers: what others did is seen, and nothing is held while waiting. Who held
    pages of a shared index until its own copies ended kept all from committing theirs."""
    in_use: Callable[[], list[BlockHash]]
    """Pinned blocks of the first tier, tails before heads."""
    clock: Clock
    pause: Callable[[float], None]
    """Waits for so many seconds of the clock."""


def flush_all(demoters: Sequence[Demoter], means: FlushMeans, deadline_s: float) -> None:
    """Write what is dirty on every link, top first, until `deadline_s` on the clock. May block."""
    for _ in range(PASSES_PER_LINK * len(demoters)):
        before = _written(demoters)
        for index in range(len(demoters)):
            _flush(demoters[index:], means, deadline_s)
        if len(demoters) == 1 or _written(demoters) == before:
            return


def _written(demoters: Sequence[Demoter]) -> int:
    return sum(demoter.counters.demoted_blocks for demoter in demoters)


def _flush(demoters: Sequence[Demoter], means: FlushMeans, deadline_s: float) -> None:
    """The first of these links; the others, below it, may make room for what it sends."""
    demoter = demoters[0]
    counters = demoter.counters
    # As many as would be lost and no more, for what a smaller tier below evicts is dirty again;
    # those that fail are sent anew.
    limit = demoter.losable_blocks - counters.demote_failed_blocks
    sent = rests = written = 0
    order: list[BlockHash] = []
    while (left_s := deadline_s - means.clock()) > 0:
        with means.lock:
            means.collect()
            if not order:
                limit_now = limit + counters.demote_failed_blocks - sent
                order = demoter.most_useful(limit_now, means.in_use())
            left = demoter.demote(order)
            sent += len(order) - left
            order = order[len(order) - left :]
            if counters.demoted_blocks > written:
                written, rests = counters.demoted_blocks, 0
            waited_for = demoters if demoter.may_find_room else demoters[:1]
            busy = next((one for one in waited_for if one.jobs_in_flight), None)
            waiting = set() if busy is None else busy.job_ids
            means.end_step()
        if busy is not None and not busy.is_stalled:
            busy.wait(waiting, left_s)
        elif busy is None and rests < RESTS_AT_MOST and demoter.may_recover_within(left_s):
            rests += 1
            means.pause(demoter.rest_left_s)
        elif busy is None and demoter.may_find_room:
            means.pause(ROOM_POLL_S)
        else:
            return


def refresh_recency_below(levels: Sequence[Level], in_use: Sequence[BlockHash]) -> None:
    """What is hot at the top shall be hot below when the next process starts there.

    `in_use`: pinned blocks of the first level, tails before heads. A tier that lasts keeps its own
    recency, and may hold millions of blocks. Under the lock.
    """
    for upper, lower in zip(levels, levels[1:], strict=False):
        if not upper.is_lasting:
            idle = [block_hash for block_hash, _ in upper.policy.coldest(len(upper.policy))]
            pinned = in_use if upper is levels[0] else ()
            hottest = [*idle, *pinned][-MAX_REFRESHED_BLOCKS:]
            lower.policy.touch(reversed(hottest))
