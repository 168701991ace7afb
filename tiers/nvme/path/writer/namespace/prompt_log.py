"""Log of the order of blocks in prompts, for one namespace: the array `state/chains`.

Nodes send the order of a request's blocks when it ends. A block is logged with the request that
stores it. A prompt is logged again in full once half the log has been written since, so that chains
in use are not overwritten. The log serves commands that ask by prompt,
and no decision depends on it. Used by the writer's thread only.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ......errors import KVCascadeError
from ......logs import get_logger
from ....disk.filesystem import FileSystem
from ....segments.arrays import MappedArrays
from ....segments.chains import (
    CHAINS,
    HEAD_BYTES,
    MAX_CHAIN_BLOCKS,
    MAX_RUN_BLOCKS,
    ChainLog,
    cells_for,
)
from ...path_messages import MAX_CHAIN_HEADS, Chain

MAX_REMEMBERED = 1 << 16
"""Limit on remembered ends of chains that were logged recently."""

_log = get_logger(__name__)


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


class PromptLog:
    """Writes the log; it is opened with the first request that ends."""

    def __init__(
        self, fs: FileSystem, folder: Path, slots: int, wall_clock: Callable[[], float]
    ) -> None:
        """`folder` is the namespace's folder of arrays; `wall_clock`: seconds since 1970."""
        self._fs = fs
        self._folder = folder
        self._slots = slots
        self._wall_clock = wall_clock
        self._book: ChainBook | None = None
        self._has_failed = False

    def note(self, message: Chain) -> None:
        """Log a chain. Messages beyond the limits are ignored."""
        heads, size = message.heads, HEAD_BYTES
        count, rest = divmod(len(heads), size)
        is_valid = not rest and count <= MAX_CHAIN_HEADS and 0 <= message.fresh <= count
        if not is_valid or not 0 < message.tokens < MAX_CHAIN_BLOCKS or self._has_failed:
            return
        if self._book is None:
            self._book = self._open()
        if self._book is not None:
            chain = [heads[start : start + size] for start in range(0, len(heads), size)]
            self._book.write(chain, message.fresh, message.tokens)

    def _open(self) -> ChainBook | None:
        """Open the log. Its array is not sealed at the end, so that no start need read it."""
        arrays = MappedArrays(self._fs, self._folder, None)
        try:
            cells = arrays(CHAINS, cells_for(self._slots), np.uint64)
        except KVCascadeError as error:
            _log.warning("which block follows which is not noted: %s", error)
            self._has_failed = True
            return None
        finally:
            arrays.close()  # it stays mapped
        return ChainBook(ChainLog(cells), self._wall_clock)
