"""The order of blocks in prompts: a bounded log beside a tier, for commands that select by prompt.

A block hash does not tell which blocks came before it. An engine knows when a request ends, and
logs runs of blocks that follow one another; the oldest are overwritten. No decision of an engine
depends on the log. If a run is lost, old or torn, a command only lacks an answer.

The log is an array of `uint64`. Cell 0 counts the cells ever written. A run is a head of `_HEAD`
cells and one cell for the head of each block's hash. The head holds: mark and number of blocks;
head of the block before them; number of the first block in its prompt and tokens per block; time
and check. FORMAT.md gives every bit.

The writer of the path alone changes the log of a namespace; readers use copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
_FIRST = 1
_HEAD = 4
_MARK = 0x6B76636E
_LOW = (1 << 32) - 1

_Cells = npt.NDArray[np.uint64]


def cells_for(slots: int) -> int:
    """Return the length of the array for a tier of so many slots."""
    return max(CELLS_MIN, CELLS_PER_SLOT * slots)


def head_of(key: bytes) -> int:
    """Return the first bytes of a block hash as a number; never 0, which stands for "none"."""
    return int.from_bytes(key[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0"), "big") or 1


class ChainLog:
    """The log of one writer."""

    def __init__(self, cells: _Cells) -> None:
        """`cells` are the contents as they were left; zeros if nothing was logged."""
        self._cells = cells

    @property
    def written(self) -> int:
        """Number of cells ever written: a run is overwritten once `size` more cells are written."""
        return int(self._cells[0])

    @property
    def size(self) -> int:
        """Number of cells that can be written before the first is overwritten."""
        return len(self._cells) - _FIRST

    def note(
        self, keys: Sequence[bytes], parent: bytes, first: int, tokens: int, now_s: int
    ) -> None:
        """Log at most `MAX_RUN_BLOCKS` blocks of `tokens` each that follow one another.

        `first` is the number of the first block in its prompt. `parent` is the block before it; b""
        if there is none.
        """
        heads = np.array([head_of(key) for key in keys], dtype=np.uint64)
        before = head_of(parent) if parent else 0
        needed = _HEAD + len(heads)
        at = self.written % self.size
        skipped = self.size - at if at + needed > self.size else 0
        at = _FIRST + (0 if skipped else at)
        head = [_MARK << 32 | len(heads), before, first << 32 | tokens, (now_s & _LOW) << 32]
        run = np.concatenate((np.array(head, dtype=np.uint64), heads))
        run[_HEAD - 1] |= np.uint64(_check(run))
        self._cells[at : at + needed] = run
        self._cells[0] += np.uint64(skipped + needed)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Blocks of any number of runs as table columns, in any order."""

    keys: _Cells
    parents: _Cells
    ends: _Cells
    """Tokens of the prompt up to the end of each block."""
    times: _Cells


class Chains:
    """The merged contents of logs, for queries."""

    def __init__(self, logs: Iterable[npt.NDArray[Any]]) -> None:
        """If two runs contain the same block, the later one counts."""
        found = [run for log in logs for run in _runs(log.astype(np.uint64))]
        none = np.zeros(0, dtype=np.uint64)
        rows = _Runs(*(
            np.concatenate([none, *(getattr(run, name) for run in found)])
            for name in ("keys", "parents", "ends", "times")
        ))  # fmt: skip
        order = np.lexsort((rows.times, rows.keys))
        keys = rows.keys[order]
        order = order[np.append(keys[1:] != keys[:-1], True)[: len(keys)]]
        self._keys, self._ends = rows.keys[order], rows.ends[order]
        self._parent = rows.parents[order]
        self._by_parent = np.argsort(self._parent, kind="stable")
        self._parents = self._parent[self._by_parent]

    def __len__(self) -> int:
        return len(self._keys)

    def end_of(self, head: int) -> int | None:
        """Return the tokens of the prompt up to the end of a block; None if unknown."""
        at = self._find(head)
        return None if at < 0 else int(self._ends[at])

    def parent_of(self, head: int) -> int | None:
        """Return the head of the block before a block, 0 for the first block; None if unknown."""
        at = self._find(head)
        return None if at < 0 else int(self._parent[at])

    def up_to(self, head: int) -> tuple[list[int], bool]:
        """Return a block and those before it, last first, and True if the prompt's first is
        included."""
        found: dict[int, None] = {}
        while head and head not in found and len(found) < MAX_CHAIN_BLOCKS:
            parent = self.parent_of(head)
            if parent is None:
                return list(found), False
            found[head] = None
            head = parent
        return list(found), head == 0

    def from_on(self, head: int) -> set[int]:
        """Return a block and every block that comes after it in any prompt."""
        found = {head}
        frontier = np.array([head], dtype=np.uint64)
        while len(frontier) and len(found) < MAX_CHAIN_BLOCKS:
            begins = np.searchsorted(self._parents, frontier, "left").tolist()
            ends = np.searchsorted(self._parents, frontier, "right").tolist()
            spans = [self._by_parent[a:b] for a, b in zip(begins, ends, strict=True) if a < b]
            children = self._keys[np.concatenate(spans)].tolist() if spans else []
            new = set(children) - found
            found |= new
            frontier = np.array(sorted(new), dtype=np.uint64)
        return found

    def _find(self, head: int) -> int:
        at = int(np.searchsorted(self._keys, np.uint64(head)))
        return at if at < len(self._keys) and int(self._keys[at]) == head else -1


def _runs(cells: _Cells) -> Iterable[_Runs]:
    """Yield every complete run of a log, wherever it begins."""
    marked = np.flatnonzero(cells[_FIRST:] >> np.uint64(32) == _MARK) + _FIRST
    for at in marked.tolist():
        length = int(cells[at]) & _LOW
        run = cells[at : at + _HEAD + length].copy()
        if not 0 < length <= MAX_RUN_BLOCKS or len(run) < _HEAD + length:
            continue
        stamp = int(run[_HEAD - 1])
        run[_HEAD - 1] &= np.uint64(_LOW << 32)
        if _check(run) != stamp & _LOW:
            continue
        first, tokens = divmod(int(run[2]), 1 << 32)
        keys = run[_HEAD:]
        parents = np.concatenate((run[1:2], keys[:-1]))
        ends = ((np.arange(length) + first + 1) * tokens).astype(np.uint64)
        yield _Runs(keys, parents, ends, np.full(length, stamp >> 32, dtype=np.uint64))


def _check(run: _Cells) -> int:
    """Return 32 bits over a run whose check is zero."""
    return xxhash.xxh3_64_intdigest(run.tobytes()) & _LOW
