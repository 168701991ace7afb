"""The order of blocks in prompts, as the writers of a path logged it: queries over copies of logs.

A run that was overwritten in part has no right checksum, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...tiers.nvme.segments.chains import (
    FIRST_CELL,
    LOW_BITS,
    MAX_CHAIN_BLOCKS,
    MAX_RUN_BLOCKS,
    RUN_HEAD,
    RUN_MARK,
    Cells,
    run_check,
)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Blocks of any number of runs as table columns, in any order."""

    keys: Cells
    parents: Cells
    ends: Cells
    """Tokens of the prompt up to the end of each block."""
    times: Cells


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

    def rooted(self) -> Cells:
        """Return the blocks of which every block before them is known, ascending."""
        n = len(self._keys)
        unknown, root = n, n + 1
        at = np.minimum(np.searchsorted(self._keys, self._parent), max(0, n - 1))
        up = np.where(self._keys[at] == self._parent, at, unknown) if n else at
        up = np.append(np.where(self._parent == 0, root, up), [unknown, root])
        for _ in range(MAX_CHAIN_BLOCKS.bit_length()):
            up = up[up]  # twice as many blocks up
        found: Cells = self._keys[up[:n] == root]
        return found

    def _find(self, head: int) -> int:
        at = int(np.searchsorted(self._keys, np.uint64(head)))
        return at if at < len(self._keys) and int(self._keys[at]) == head else -1


class Successors:
    """A block and every block after it in any prompt, among blocks of the index."""

    def __init__(self, chains: Chains, first: int) -> None:
        """`first`: head of the block."""
        self._chains = chains
        self._heads = chains.from_on(first)
        self._others: list[int] = []

    def has(self, head: int) -> bool:
        """Return True if a block of the index is known to be one of them."""
        if head in self._heads:
            return True
        self._others.append(head)
        return False

    def count_unknown(self) -> int:
        """Return how many others may be one of them: no log has all blocks before them."""
        others = np.array(self._others, dtype=np.uint64)
        return len(np.setdiff1d(others, self._chains.rooted()))


def _runs(cells: Cells) -> Iterable[_Runs]:
    """Yield every complete run of a log, wherever it begins."""
    marked = np.flatnonzero(cells[FIRST_CELL:] >> np.uint64(32) == RUN_MARK) + FIRST_CELL
    for at in marked.tolist():
        length = int(cells[at]) & LOW_BITS
        run = cells[at : at + RUN_HEAD + length].copy()
        if not 0 < length <= MAX_RUN_BLOCKS or len(run) < RUN_HEAD + length:
            continue
        stamp = int(run[RUN_HEAD - 1])
        run[RUN_HEAD - 1] &= np.uint64(LOW_BITS << 32)
        if run_check(run) != stamp & LOW_BITS:
            continue
        first, tokens = divmod(int(run[2]), 1 << 32)
        keys = run[RUN_HEAD:]
        parents = np.concatenate((run[1:2], keys[:-1]))
        ends = ((np.arange(length) + first + 1) * tokens).astype(np.uint64)
        yield _Runs(keys, parents, ends, np.full(length, stamp >> 32, dtype=np.uint64))
