"""Log the order of a request's blocks when it ends: see `tiers/nvme/segments/chains`.

The scheduler queues the request's blocks and goes on. A thread writes a few hundred blocks at a
time, so that it never holds the interpreter lock for long. If the queue is full, the request is
left out.

A block is logged with the request that stores it. A prompt is logged again in full once half the
log has been written since, so that chains in use are not overwritten.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress

from ..tiers.nvme.segments.chains import MAX_RUN_BLOCKS, ChainLog

MAX_QUEUED = 256
"""Limit on requests that wait to be logged."""
MAX_REMEMBERED = 1 << 16
"""Limit on remembered ends of chains that were logged recently."""
STOP_WAIT_S = 5.0
GROUP_BYTES = 4
"""Length of the KV group's number, with which a key ends."""

_Noted = tuple[Mapping[bytes, int], Mapping[bytes, bool]]


class ChainNotes:
    """Writes chains of blocks to the log. The scheduler's thread calls `note` and `close`."""

    def __init__(self, log: ChainLog, wall_clock: Callable[[], float] = time.time) -> None:
        """`wall_clock`: seconds since 1970."""
        self.left_out = 0
        """Number of requests that found the queue full."""
        self._log = log
        self._now_s = wall_clock
        self._ends: OrderedDict[bytes, int] = OrderedDict()
        """Last block of each logged chain, to `ChainLog.written` when its start was logged."""
        self._queue: queue.Queue[_Noted | None] = queue.Queue(MAX_QUEUED)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcascade-chains", daemon=True)
        self._thread.start()

    def note(self, ends: Mapping[bytes, int], used: Mapping[bytes, bool]) -> None:
        """Queue a request that has ended. Never waits.

        `ends`: every block of it, to the number of tokens up to the block's end. `used`: blocks
        that the cache was asked for, and whether the request stored them. Both may still grow, but
        entries are neither changed nor removed.
        """
        try:
            self._queue.put_nowait((ends, used))
        except queue.Full:
            self.left_out += 1

    def close(self) -> None:
        """Write what is queued, `STOP_WAIT_S` at most; idempotent."""
        if not self._stopped.is_set():
            with suppress(queue.Full):
                self._queue.put(None, timeout=STOP_WAIT_S)
            self._thread.join(STOP_WAIT_S)
            self._stopped.set()
            self._thread.join(STOP_WAIT_S)

    def _run(self) -> None:
        while not self._stopped.is_set() and (noted := self._queue.get()) is not None:
            ends, used = noted
            self._write(*finest_chain(ends), used)

    def _write(self, chain: list[bytes], tokens: int, used: Mapping[bytes, bool]) -> None:
        """Log the new part of a chain; all of it if the old part was not logged recently."""
        if not chain:
            return
        fresh = next((i for i, key in enumerate(chain) if used.get(key, False)), len(chain))
        last_old = chain[fresh - 1] if fresh else b""
        noted_at = self._noted_at(last_old)
        at = self._log.written if noted_at is None else noted_at
        now_s = int(self._now_s())
        for begin in range(0 if noted_at is None else fresh, len(chain), MAX_RUN_BLOCKS):
            if self._stopped.is_set():
                return
            parent = chain[begin - 1] if begin else b""
            self._log.note(chain[begin : begin + MAX_RUN_BLOCKS], parent, begin, tokens, now_s)
            _let_others_in()
        for key in filter(None, (last_old, chain[-1])):
            self._ends[key] = at
            self._ends.move_to_end(key)
        while len(self._ends) > MAX_REMEMBERED:
            self._ends.popitem(last=False)

    def _noted_at(self, key: bytes) -> int | None:
        """Return `ChainLog.written` when a block's chain was logged; None if not recently."""
        at = self._ends.get(key)
        return at if at is not None and self._log.written - at < self._log.size // 2 else None


def finest_chain(ends: Mapping[bytes, int]) -> tuple[list[bytes], int]:
    """Return the blocks of the KV group with the most, in prefix order, and tokens per block.

    Hashes of groups with longer blocks occur in this group, too. The chain ends before a gap.
    """
    groups: dict[bytes, list[tuple[bytes, int]]] = {}
    blocks = list(ends.items())  # one step for the interpreter: it may grow meanwhile
    for begin in range(0, len(blocks), MAX_RUN_BLOCKS):
        for key, end in blocks[begin : begin + MAX_RUN_BLOCKS]:
            groups.setdefault(key[-GROUP_BYTES:], []).append((key, end))
        _let_others_in()
    longest: list[tuple[bytes, int]] = max(groups.values(), key=len, default=[])
    longest.sort(key=lambda pair: pair[1])
    tokens = longest[0][1] if longest else 0
    gap = (i for i, (_, end) in enumerate(longest) if end != (i + 1) * tokens)
    return [key for key, _ in longest[: next(gap, len(longest))]], tokens


def _let_others_in() -> None:
    """Yield the interpreter lock, which the scheduler's thread may be waiting for."""
    time.sleep(0)
