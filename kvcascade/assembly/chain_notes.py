"""Noting which block follows which, when a request ends: see `tiers/nvme/segments/chains`.

The scheduler hands over what vLLM knows of the request and goes on; a thread writes it down, a few
hundred blocks at a time, so that it never holds the interpreter for long. What comes faster than
that is left out.

Blocks are noted with the request that brings them, and all of a prompt again when half the log was
written since: what is in use is never lost.
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
"""Requests."""
MAX_REMEMBERED = 1 << 16
"""Ends of chains that were noted lately."""
STOP_WAIT_S = 5.0
GROUP_BYTES = 4
"""The last bytes of a key are the number of its KV group."""

_Noted = tuple[Mapping[bytes, int], Mapping[bytes, bool]]


class ChainNotes:
    """Takes chains to the log. `note` and `close` belong to the scheduler's thread."""

    def __init__(self, log: ChainLog, wall_clock: Callable[[], float] = time.time) -> None:
        """`wall_clock`: seconds since 1970."""
        self.left_out = 0
        """Requests that came too fast."""
        self._log = log
        self._now_s = wall_clock
        self._ends: OrderedDict[bytes, int] = OrderedDict()
        """Last blocks of what was noted, to `ChainLog.written` when the oldest of it was."""
        self._queue: queue.Queue[_Noted | None] = queue.Queue(MAX_QUEUED)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcascade-chains", daemon=True)
        self._thread.start()

    def note(self, ends: Mapping[bytes, int], used: Mapping[bytes, bool]) -> None:
        """A request ended. Never waits.

        `ends`: every block of it, to the tokens up to its end; `used`: blocks that the cache was
        concerned with, and whether the request brought them. Neither shrinks or changes any more.
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
        """Note what is new, and what it follows if that was not noted lately."""
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
        """`ChainLog.written` when a block and all before it were noted; None if not lately."""
        at = self._ends.get(key)
        return at if at is not None and self._log.written - at < self._log.size // 2 else None


def finest_chain(ends: Mapping[bytes, int]) -> tuple[list[bytes], int]:
    """The blocks of the KV group that has the most, in prefix order, and tokens per block.

    Groups with longer blocks name them by hashes that are in this one, too. It ends before a gap.
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
    """Give up the interpreter lock, which the scheduler's thread may be waiting for."""
    time.sleep(0)
