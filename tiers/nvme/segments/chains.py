"""The order of blocks in prompts: a bounded log beside a tier, for commands that select by prompt.

A block hash does not tell which blocks came before it. An engine knows when a request ends, and
logs runs of blocks that follow one another; the oldest are overwritten. No decision of an engine
depends on the log. If a run is lost, old or torn, a command only lacks an answer.

The log is an array of `uint64`. Cell 0 counts the cells ever written. A run is a head of `RUN_HEAD`
cells and one cell for the head of each block's hash. The head holds: mark and number of blocks;
head of the block before them; number of the first block in its prompt and tokens per block; time
and check. FORMAT.md gives every bit.

The writer of the path alone changes the log of a namespace. Commands read copies
(`tools/commands/prompt_chains.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

CHAINS = "chains"
"""Name of the array."""
CELLS_PER_SLOT = 2
CELLS_MIN = 4096
HEAD_BYTES = 8
MAX_RUN_BLOCKS = 512
"""Largest run; longer ones are logged in pieces."""
MAX_CHAIN_BLOCKS = 1 << 24
MAX_REMEMBERED = 1 << 16
"""Limit on remembered ends of chains that were logged recently."""
FIRST_CELL = 1
RUN_HEAD = 4
"""Cells before the blocks of a run."""
RUN_MARK = 0x6B76636E
LOW_BITS = (1 << 32) - 1

Cells = npt.NDArray[np.uint64]


def cells_for(slots: int) -> int:
    """Return the length of the array for a tier of so many slots."""
    return max(CELLS_MIN, CELLS_PER_SLOT * slots)


def head_of(key: bytes) -> int:
    """Return the first bytes of a block hash as a number; never 0, which stands for "none"."""
    return int.from_bytes(key[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0"), "big") or 1


class ChainLog:
    """The log of one writer.

    A block is logged with the request that stores it. A prompt is logged again in full once half
    the log has been written since, so that chains in use are not overwritten.
    """

    def __init__(self, cells: Cells, wall_clock: Callable[[], float]) -> None:
        """`cells` are the contents as they were left; zeros if nothing was logged. `wall_clock`:
        seconds since 1970."""
        self._cells = cells
        self._wall_clock = wall_clock
        self._ends: OrderedDict[bytes, int] = OrderedDict()
        """Last block of each logged chain, to `written` when its start was logged."""

    @property
    def written(self) -> int:
        """Number of cells ever written: a run is overwritten once `size` more cells are written."""
        return int(self._cells[0])

    @property
    def size(self) -> int:
        """Number of cells that can be written before the first is overwritten."""
        return len(self._cells) - FIRST_CELL

    def write(self, chain: Sequence[bytes], fresh: int, tokens: int) -> None:
        """Log the new part of a chain; all of it if the old part was not logged recently.

        The first `fresh` blocks were stored by earlier requests. A block has `tokens` tokens. The
        keys may be cut to their heads.
        """
        if not chain:
            return
        last_old = chain[fresh - 1] if fresh else b""
        noted_at = self._noted_at(last_old)
        at = self.written if noted_at is None else noted_at
        now_s = int(self._wall_clock())
        for begin in range(0 if noted_at is None else fresh, len(chain), MAX_RUN_BLOCKS):
            parent = chain[begin - 1] if begin else b""
            self.note(chain[begin : begin + MAX_RUN_BLOCKS], parent, begin, tokens, now_s)
        for key in filter(None, (last_old, chain[-1])):
            self._ends[key] = at
            self._ends.move_to_end(key)
        while len(self._ends) > MAX_REMEMBERED:
            self._ends.popitem(last=False)

    def note(
        self, keys: Sequence[bytes], parent: bytes, first: int, tokens: int, now_s: int
    ) -> None:
        """Log at most `MAX_RUN_BLOCKS` blocks of `tokens` each that follow one another.

        `first` is the number of the first block in its prompt. `parent` is the block before it; b""
        if there is none.
        """
        heads = np.array([head_of(key) for key in keys], dtype=np.uint64)
        before = head_of(parent) if parent else 0
        needed = RUN_HEAD + len(heads)
        at = self.written % self.size
        skipped = self.size - at if at + needed > self.size else 0
        at = FIRST_CELL + (0 if skipped else at)
        head = [RUN_MARK << 32 | len(heads), before, first << 32 | tokens, (now_s & LOW_BITS) << 32]
        run = np.concatenate((np.array(head, dtype=np.uint64), heads))
        run[RUN_HEAD - 1] |= np.uint64(run_check(run))
        self._cells[at : at + needed] = run
        self._cells[0] += np.uint64(skipped + needed)

    def _noted_at(self, key: bytes) -> int | None:
        """Return `written` when a block's chain was logged; None if not recently."""
        at = self._ends.get(key)
        return at if at is not None and self.written - at < self.size // 2 else None


def run_check(run: Cells) -> int:
    """Return 32 bits over a run whose check is zero."""
    return xxhash.xxh3_64_intdigest(run.tobytes()) & LOW_BITS
