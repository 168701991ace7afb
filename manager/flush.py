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
from itertools import chain
from typing import Any

from ..tiers.base import BlockHash
from .below.port import Below, FlushMeans
from .demotion import Demoter
from .flow import Flow
from .holds import Holds
from .level import Level
from .workers import WorkerTransfers

RESTS_AT_MOST = 2
"""In a row, without a block written meanwhile. The process that moves blocks is up again after one;
a device that fails three times is not waited for."""
MAX_REFRESHED_BLOCKS = 1 << 17
"""Of a tier that ends with its process the hottest, at 5 µs each where the collector was frozen and
15 where it was not; the others are as hot below as when they were written there."""
ROOM_POLL_S = 0.001
"""Between two looks at whether a tier that grows has room by now."""
PASSES_PER_LINK = 2
"""A level that found no room below is flushed again once the next one has made some."""


class Closing:
    """Flushes and stops a cascade."""

    def __init__(
        self,
        flow: Flow,
        demoter: Demoter,
        workers: WorkerTransfers,
        holds: Holds,
        pause: Callable[[float], None],
    ) -> None:
        """`pause` waits for seconds of the clock."""
        self._flow = flow
        self._demoter = demoter
        self._workers = workers
        self._holds = holds
        self._pause = pause
        self._is_shut_down = False

    def means(
        self,
        lock: AbstractContextManager[Any],
        collect: Callable[[], None],
        tend: Callable[[], None],
    ) -> FlushMeans:
        """For `flush_dirty` and `shutdown`; for the arguments see `FlushMeans`."""
        return FlushMeans(lock, collect, tend, self._in_use, self._flow.clock, self._pause)

    def flush_dirty(self, means: FlushMeans, deadline_s: float) -> bool:
        """Write every dirty block down that would be lost, until `deadline_s` on the clock.

        True if none is left, nor on its way.
        """
        flow, below = self._flow, self._flow.below
        for _ in range(PASSES_PER_LINK * len(below.tiers)):
            before = _written(below)
            flush_level(self._demoter, below, means, deadline_s)
            below.flush(means, deadline_s)
            if len(below.tiers) == 1 or _written(below) == before:
                break
        with means.lock:
            means.collect()
            states = below.state()
            losable = [] if flow.top.is_lasting else [flow.top.dirt.dirty_blocks]
            for facts, state in zip(below.tiers, states, strict=True):
                if not facts.is_lasting:
                    losable.append(state.dirty_blocks)
            return not any(losable) and not any(state.demote_jobs for state in states)

    def shutdown(self, means: FlushMeans, deadline_s: float) -> bool:
        """Flush, and stop all transfers; idempotent. False if transfers are still under way."""
        flow = self._flow
        if not self._is_shut_down:  # else no handler takes anything: it would be waited for in vain
            self.flush_dirty(means, deadline_s)
        self._is_shut_down = True
        with means.lock:
            if not flow.top.is_lasting and not flow.is_single:
                flow.below.touch(hottest(flow.top, self._in_use()))
            means.end_step()  # nothing of them is held while the rest takes its time
        return flow.below.shutdown(deadline_s)

    def _in_use(self) -> list[BlockHash]:
        """Blocks of the first tier that workers load or requests hold, tails before heads."""
        in_use = dict.fromkeys(chain(self._workers.loads, self._holds.blocks()))
        return list(reversed(in_use))


def _written(below: Below) -> int:
    return sum(link.demoted_blocks for link in below.links)


def flush_level(demoter: Demoter, below: Below, means: FlushMeans, deadline_s: float) -> None:
    """Write the dirty blocks of one level to the port below it; tiers behind it may make room."""
    counters = demoter.counters
    # As many as would be lost and no more, for blocks that a smaller tier below evicts are dirty
    # again; those that fail are sent anew.
    limit = demoter.losable_blocks - counters.demote_failed_blocks
    sent = rests = written = 0
    order: list[BlockHash] = []
    while (left_s := deadline_s - means.clock()) > 0:
        with means.lock:
            means.collect()
            if not order:
                limit_now = limit + counters.demote_failed_blocks - sent
                order = demoter.search.most_useful(limit_now, means.in_use())
            left = demoter.demote(order)
            sent += len(order) - left
            order = order[len(order) - left :]
            if counters.demoted_blocks > written:
                written, rests = counters.demoted_blocks, 0
            state, waiting = below.write_state(), demoter.job_ids
            is_making_room = demoter.may_find_room and state.is_making_room
            means.end_step()
        may_recover = state.may_recover and 0 < state.rest_left_s < left_s
        if (waiting and not state.is_stalled) or (not waiting and is_making_room):
            below.wait(waiting, left_s)
        elif not waiting and rests < RESTS_AT_MOST and may_recover:
            rests += 1
            below.wait(set(), state.rest_left_s)  # the tiers behind the port go on meanwhile
            with means.lock:
                rest_left_s = below.write_state().rest_left_s
            means.pause(rest_left_s)
        elif not waiting and demoter.may_find_room:
            means.pause(ROOM_POLL_S)
        else:
            return


def hottest(level: Level, in_use: Sequence[BlockHash]) -> list[BlockHash]:
    """Blocks that are hot in a level that ends with the process, the hottest first.

    They shall be hot below when the next process starts there. `in_use`: pinned blocks, tails
    before heads. A tier that lasts keeps its own recency, and may hold millions of blocks.
    """
    idle = [block_hash for block_hash, _ in level.policy.coldest(len(level.policy))]
    return [*idle, *in_use][-MAX_REFRESHED_BLOCKS:][::-1]
