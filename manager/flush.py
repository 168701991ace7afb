"""Shutdown: write dirty blocks to the tiers below until a deadline, then stop all transfers.

A failed write makes the tier below rest for some seconds. A flush waits until the tier may be tried
again, because otherwise all remaining blocks would be lost. It does not wait if the tier is full or
if a transfer never ends.

Pinned blocks are written, too: an engine that is stopped at work must not lose the blocks that it
used last. Blocks with many uses come first, and heads of prompts before their tails. If the time
runs out, the written blocks are thus useful.

Blocks in a lasting tier are not lost. They are written only to make room for blocks above.
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
"""Largest number of consecutive rests without a written block. A node restarts within one. A device
that fails three times is given up."""
MAX_REFRESHED_BLOCKS = 1 << 17
"""Largest number of blocks whose recency below a shutdown refreshes, hottest first. Each takes 5 µs
with a frozen garbage collector and 15 µs otherwise. The other blocks keep the recency below that
they had when they were written."""
ROOM_POLL_S = 0.001
"""Seconds between two checks whether a growing tier has room."""
PASSES_PER_LINK = 2
"""Passes of a flush for each tier below. A level that found no room below is flushed again once the
next tier has made some."""


class Closing:
    """Flush and stop a cascade."""

    def __init__(
        self,
        flow: Flow,
        demoter: Demoter,
        workers: WorkerTransfers,
        holds: Holds,
        pause: Callable[[float], None],
    ) -> None:
        """`pause` waits for the given number of seconds of the clock."""
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
        maintain: Callable[[], None],
    ) -> FlushMeans:
        """Return what `flush_dirty` and `shutdown` need. For the parameters see `FlushMeans`."""
        return FlushMeans(lock, collect, maintain, self._in_use, self._flow.clock, self._pause)

    def flush_dirty(self, means: FlushMeans, deadline_s: float) -> bool:
        """Write every dirty block to a tier below that would be lost, until `deadline_s` on the
        clock.

        Return True if no such block is left or in flight.
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
            losable = [flow.top.dirt.dirty_blocks]
            for facts, state in zip(below.tiers, states, strict=True):
                if not facts.is_lasting:
                    losable.append(state.dirty_blocks)
            return not any(losable) and not any(state.demote_jobs for state in states)

    def shutdown(self, means: FlushMeans, deadline_s: float) -> bool:
        """Flush, and stop all transfers; idempotent. Return False if transfers are in flight."""
        flow = self._flow
        if not self._is_shut_down:  # handlers that were stopped accept nothing
            self.flush_dirty(means, deadline_s)
        self._is_shut_down = True
        with means.lock:
            if not flow.is_single:
                flow.below.touch(hottest(flow.top, self._in_use()))
            means.end_step()  # release shared state before the shutdown, which may take long
        return flow.below.shutdown(deadline_s)

    def _in_use(self) -> list[BlockHash]:
        """Return the blocks of the first tier that workers load or requests hold, tails before
        heads."""
        in_use = dict.fromkeys(chain(self._workers.loads, self._holds.blocks()))
        return list(reversed(in_use))


def _written(below: Below) -> int:
    return sum(link.demoted_blocks for link in below.links)


def flush_level(demoter: Demoter, below: Below, means: FlushMeans, deadline_s: float) -> None:
    """Write the dirty blocks of one level to the port below it. Tiers behind the port may make
    room."""
    counters = demoter.counters
    # The limit ends the loop: a block evicted by a smaller tier below becomes dirty again. Blocks
    # whose write failed are sent again, so the limit grows by them.
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
            below.wait(set(), state.rest_left_s)  # writes between the tiers below make progress
            with means.lock:
                rest_left_s = below.write_state().rest_left_s
            means.pause(rest_left_s)
        elif not waiting and demoter.may_find_room:
            means.pause(ROOM_POLL_S)
        else:
            return


def hottest(level: Level, in_use: Sequence[BlockHash]) -> list[BlockHash]:
    """Return the hottest blocks of a level that ends with the process, hottest first.

    They become hot in the tier below, for the next process. `in_use`: pinned blocks, tails before
    heads. A lasting tier does not need this, because it keeps its own recency.
    """
    idle = [block_hash for block_hash, _ in level.policy.coldest(len(level.policy))]
    return [*idle, *in_use][-MAX_REFRESHED_BLOCKS:][::-1]
