"""Choice of the blocks that a request adds to the log of chains (`chains`) when it ends.

A block is logged with the request that stores it. A prompt is logged again in full once half the
log has been written since, so that chains in use are not overwritten.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from .chains import MAX_RUN_BLOCKS, ChainLog

MAX_REMEMBERED = 1 << 16
"""Limit on remembered ends of chains that were logged recently."""


class ChainBook:
    """Logs the new parts of chains. One thread."""

    def __init__(self, log: ChainLog, wall_clock: Callable[[], float] = time.time) -> None:
        """`wall_clock`: seconds since 1970."""
        self._log = log
        self._now_s = wall_clock
        self._ends: OrderedDict[bytes, int] = OrderedDict()
        """Last block of each logged chain, to `ChainLog.written` when its start was logged."""

    def write(self, chain: Sequence[bytes], fresh: int, tokens: int) -> None:
        """Log the new part of a chain; all of it if the old part was not logged recently.

        The first `fresh` blocks were stored by earlier requests. A block has `tokens` tokens. The
        keys may be cut to their heads.
        """
        if not chain:
            return
        last_old = chain[fresh - 1] if fresh else b""
        noted_at = self._noted_at(last_old)
        at = self._log.written if noted_at is None else noted_at
        now_s = int(self._now_s())
        for begin in range(0 if noted_at is None else fresh, len(chain), MAX_RUN_BLOCKS):
            parent = chain[begin - 1] if begin else b""
            self._log.note(chain[begin : begin + MAX_RUN_BLOCKS], parent, begin, tokens, now_s)
        for key in filter(None, (last_old, chain[-1])):
            self._ends[key] = at
            self._ends.move_to_end(key)
        while len(self._ends) > MAX_REMEMBERED:
            self._ends.popitem(last=False)

    def _noted_at(self, key: bytes) -> int | None:
        """Return `ChainLog.written` when a block's chain was logged; None if not recently."""
        at = self._ends.get(key)
        return at if at is not None and self._log.written - at < self._log.size // 2 else None
