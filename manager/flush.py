"""Shutdown: write dirty blocks to the tiers below until a deadline, then stop all transfers.

A failed write makes the tier below rest for some seconds. A flush waits until the tier may be tried
again, because otherwise all remaining blocks would be lost. It also waits until another engine has
taken over a path whose writer ended, as if both are stopped together. It does not wait if the tier
is full or if a transfer never ends.

Pinned blocks are written, too: an engine that is stopped at work must not lose the blocks that it
used last. Blocks with many uses come first, and heads of prompts before their tails. If the time
runs out, the written blocks are thus useful.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ..tiers.base import BlockHash
from .core import ManagerCore
from .demotion import Demoter
from .first_tier import FirstTier
from .promotion.claims import Holds
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
JOIN_LIMIT_S = 6.0
"""Longest time for which a flush waits for a writer of the path. Another engine takes over within 5
seconds."""
JOIN_POLL_S = 0.01
"""Seconds between two checks whether there is one."""


@dataclass(slots=True, eq=False)
class Closing:
    """Flush and stop a cascade."""

    _core: ManagerCore
    _demoter: Demoter
    _workers: WorkerTransfers
    _holds: Holds
    _lock: AbstractContextManager[Any]
    """Held during every access to the manager's state, and while transfers stop."""
    _collect: Callable[[], None]
    """Collects the ended transfers of every tier."""
    _maintain: Callable[[], None]
    """Maintains the tiers below, and takes in resets by other engines."""
    _pause: Callable[[float], None]
    """Waits for the given number of seconds of the clock."""
    _is_shut_down: bool = False

    def flush_dirty(self, deadline_s: float) -> bool:
        """Write every dirty block of the first tier below it, until `deadline_s` on the clock.

        Return True if no such block is left or in flight.
        """
        core = self._core
        self._flush(deadline_s)
        with self._lock:
            self._collect()
            are_writing = any(state.demote_jobs for state in core.below.state())
            return not (core.top.dirt.dirty_blocks or are_writing)

    def shutdown(self, deadline_s: float) -> bool:
        """Flush, and stop all transfers; idempotent. Return False if transfers are in flight."""
        core = self._core
        if not self._is_shut_down:  # a node that was stopped takes nothing
            self.flush_dirty(deadline_s)
        self._is_shut_down = True
        with self._lock:
            if not core.is_single:
                core.below.touch(hottest(core.top, self._in_use()))
            self._maintain()  # sends the recency
            return core.below.shutdown(deadline_s)

    def _flush(self, deadline_s: float) -> None:
        """Write dirty blocks until none is left, no more can be written, or the time is over."""
        if self._core.is_single:
            return
        demoter, below, clock = self._demoter, self._core.below, self._core.clock
        counters = demoter.counters
        # The limit ends the loop: a block evicted by a smaller tier below becomes dirty again.
        # Blocks that tier 1 did not write are sent again, so the limit grows by them. Tier 1 takes
        # them only after a pause, so that this does not repeat without end.
        losable = min(len(self._core.top.policy), below.tiers[0].capacity)
        limit = losable - below.unwritten_blocks
        sent = rests = written = 0
        was_joining = False
        join_ends_s = clock() + JOIN_LIMIT_S
        order: list[BlockHash] = []
        with self._lock:
            self._collect()
            given_up = set(demoter.jobs) if below.write_state().is_stalled else set[int]()
        while (left_s := deadline_s - clock()) > 0:
            with self._lock:
                self._collect()
                joins = below.write_state().is_joining
                if was_joining and not joins:
                    sent = 0  # what other tiers did not take meanwhile is sent again
                was_joining = joins
                if not order:
                    limit_now = limit + below.unwritten_blocks - sent
                    order = demoter.search.most_useful(limit_now, self._in_use())
                if not (order or demoter.jobs or (joins and self._core.top.dirt.dirty_blocks)):
                    return
                left = demoter.demote(order)
                sent += len(order) - left
                order = order[len(order) - left :]
                if counters.demoted_blocks > written:
                    written, rests = counters.demoted_blocks, 0
                state, waiting = below.write_state(), len(demoter.jobs)
                # A stall that begins now may end in time. One of before the flush is not waited
                # for, nor one of lower tiers only.
                is_nearest_idle = waiting <= below.late_puts
                are_late = is_nearest_idle or demoter.jobs.keys() <= given_up
                self._maintain()
            if not state.is_joining:
                join_ends_s = clock() + JOIN_LIMIT_S
            may_recover = state.may_recover and 0 < state.rest_left_s < left_s
            if waiting and not (state.is_stalled and are_late):
                below.wait(left_s)
            elif not waiting and rests < RESTS_AT_MOST and may_recover:
                rests += 1
                self._pause(state.rest_left_s)
            elif not waiting and demoter.may_find_room:
                self._pause(ROOM_POLL_S)
            elif is_nearest_idle and state.is_joining and clock() < join_ends_s:
                self._pause(JOIN_POLL_S)
            else:
                return

    def _in_use(self) -> list[BlockHash]:
        """Return the blocks of the first tier that workers load or requests hold, tails before
        heads."""
        in_use = dict.fromkeys(chain(self._workers.loads, self._holds.blocks()))
        return list(reversed(in_use))


def hottest(top: FirstTier, in_use: Sequence[BlockHash]) -> list[BlockHash]:
    """Return the hottest blocks of the first tier, hottest first.

    They become hot in the tier below, for the next process. `in_use`: pinned blocks, tails before
    heads.
    """
    idle = [block_hash for block_hash, _ in top.policy.coldest(len(top.policy))]
    return [*idle, *in_use][-MAX_REFRESHED_BLOCKS:][::-1]
