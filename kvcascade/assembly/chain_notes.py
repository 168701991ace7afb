"""Note the order of a request's blocks when it ends: see `tiers/nvme/segments/chains`.

The scheduler only puts the request's blocks into a queue. The background thread puts them in order,
a few hundred at a time, so that it never holds the interpreter lock for long. If the queue is full,
the request is left out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ..tiers.base import GROUP_BYTES
from ..tiers.nvme.segments.chains import MAX_RUN_BLOCKS

MAX_QUEUED = 256
"""Limit on requests that wait to be logged."""

Write = Callable[[Sequence[bytes], int, int], None]
"""Writes a chain: its keys in prefix order, the number of them that earlier requests stored, and
tokens per block."""


class ChainNotes:
    """Notes chains of blocks."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._queue: deque[tuple[Mapping[bytes, int], Mapping[bytes, bool]]] = deque()

    def note(self, ends: Mapping[bytes, int], used: Mapping[bytes, bool]) -> None:
        """Queue a request that has ended. Called by the scheduler's thread; never waits.

        `ends`: every block of it, to the number of tokens up to the block's end. `used`: blocks
        that the cache was asked for, and whether the request stored them. Both may still grow, but
        entries are neither changed nor removed.
        """
        if len(self._queue) < MAX_QUEUED:
            self._queue.append((ends, used))

    def send(self) -> None:
        """Write what is queued. Any thread."""
        while True:
            try:
                ends, used = self._queue.popleft()
            except IndexError:
                return
            chain, tokens = finest_chain(ends)
            fresh = next((i for i, key in enumerate(chain) if used.get(key, False)), len(chain))
            self._write(chain, fresh, tokens)


def finest_chain(ends: Mapping[bytes, int]) -> tuple[list[bytes], int]:
    """Return the blocks of the KV group with the most, in prefix order, and tokens per block.

    Hashes of groups with longer blocks occur in this group, too. The chain ends before a gap.
    """
    groups: dict[bytes, list[tuple[bytes, int]]] = {}
    blocks = list(ends.items())  # one step for the interpreter: it may grow meanwhile
    for begin in range(0, len(blocks), MAX_RUN_BLOCKS):
        for key, end in blocks[begin : begin + MAX_RUN_BLOCKS]:
            groups.setdefault(key[-GROUP_BYTES:], []).append((key, end))
        time.sleep(0)  # the scheduler's thread may be waiting for the interpreter lock
    longest: list[tuple[bytes, int]] = max(groups.values(), key=len, default=[])
    longest.sort(key=lambda pair: pair[1])
    tokens = longest[0][1] if longest else 0
    gap = (i for i, (_, end) in enumerate(longest) if end != (i + 1) * tokens)
    return [key for key, _ in longest[: next(gap, len(longest))]], tokens
