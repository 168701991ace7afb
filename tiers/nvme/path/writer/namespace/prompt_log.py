"""Log of the order of blocks in prompts, for one namespace: the array `state/chains`.

Nodes send the order of a request's blocks when it ends. The log serves commands that ask by prompt,
and no decision depends on it. Used by the writer's thread only.
"""

from __future__ import annotations

from collections.abc import Callable
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
    ChainLog,
    cells_for,
)
from ...path_messages import MAX_CHAIN_HEADS, Chain

_log = get_logger(__name__)


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
        self._log: ChainLog | None = None
        self._has_failed = False

    def note(self, message: Chain) -> None:
        """Log a chain. Messages beyond the limits are ignored."""
        heads, size = message.heads, HEAD_BYTES
        count, rest = divmod(len(heads), size)
        is_valid = not rest and count <= MAX_CHAIN_HEADS and 0 <= message.fresh <= count
        if not is_valid or not 0 < message.tokens < MAX_CHAIN_BLOCKS or self._has_failed:
            return
        if self._log is None:
            self._log = self._open()
        if self._log is not None:
            chain = [heads[start : start + size] for start in range(0, len(heads), size)]
            self._log.write(chain, message.fresh, message.tokens)

    def _open(self) -> ChainLog | None:
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
        return ChainLog(cells, self._wall_clock)
