"""Scratch memory in huge pages, for direct I/O.

For an arena that could not be had in huge pages itself (`tiers.cpu.huge_pages`): a direct read or
write is cut where its memory is not adjacent physically, and the small pages of shared memory lie
scattered. Moved through here, cold reads are 1.8 times as fast and writes 1.6 times (512 KiB
blocks, the whole path, figures in ARCHITECTURE.md) for the same processor time: the copy costs what
the kernel saves on pages. Where nobody gets huge pages it would be a copy for nothing;
`has_huge_pages` tells.

Threads: each has a buffer of its own, as large as the most it asked for, freed with the thread.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ...tiers.base import SlotArray
from ...tiers.cpu.huge_pages import aligned_room


class BounceBuffers:
    """Room for a few blocks, one buffer per thread. Any thread."""

    def __init__(self, block_bytes: int) -> None:
        """`block_bytes`: a multiple of a page, so that every block may be read directly."""
        self._block_bytes = block_bytes
        self._own = threading.local()

    def blocks(self, n: int) -> list[memoryview]:
        """Room for `n` blocks in a row; it is this thread's until it asks again."""
        size, buffer = self._block_bytes, self._room(n)
        return [buffer[i * size : (i + 1) * size] for i in range(n)]

    def _room(self, n: int) -> memoryview:
        """This thread's buffer, of `n` blocks at least."""
        buffer: memoryview | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < n * self._block_bytes:
            buffer = self._own.buffer = huge_pages(max(1, n) * self._block_bytes)
        return buffer


class ArenaBounce(BounceBuffers):
    """Between the disk and an arena. Any thread.

    Blocks that are neighbours in the arena are copied in one go: a thread that copies gives up the
    interpreter lock, and waits for it afterwards.
    """

    def __init__(self, arena: memoryview, block_bytes: int) -> None:
        """`arena`: its slots, of `block_bytes` each, in a row."""
        super().__init__(block_bytes)
        self._arena: npt.NDArray[np.uint8] = np.frombuffer(arena, np.uint8)

    def take(self, slots: SlotArray) -> list[memoryview]:
        """Copies of what lies in these slots."""
        buffer = np.frombuffer(self._room(len(slots)), np.uint8)
        for at, slot, n in neighbours(slots, range(len(slots))):
            np.copyto(self._bytes(buffer, at, n), self._bytes(self._arena, slot, n))
        return self.blocks(len(slots))

    def give(self, slots: SlotArray, places: Sequence[int]) -> None:
        """Copy some of the blocks in this thread's buffer, each into the slot of its place."""
        buffer = np.frombuffer(self._room(len(slots)), np.uint8)
        for at, slot, n in neighbours(slots, places):
            np.copyto(self._bytes(self._arena, slot, n), self._bytes(buffer, at, n))

    def _bytes(self, memory: npt.NDArray[np.uint8], first: int, n: int) -> npt.NDArray[np.uint8]:
        return memory[first * self._block_bytes : (first + n) * self._block_bytes]


def neighbours(slots: SlotArray, places: Sequence[int]) -> list[tuple[int, int, int]]:
    """Of some places of a list of slots, the runs that are adjacent in both.

    Each as its first place, its first slot and its length.
    """
    if not places:
        return []
    at = np.asarray(places)
    here = slots[at]
    is_cut = (np.diff(here) != 1) | (np.diff(at) != 1)
    starts = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(at)]
    return [(int(at[i]), int(here[i]), j - i) for i, j in pairwise(starts)]


def huge_pages(length: int) -> memoryview:
    """Private zeroed memory, of huge pages where the system has them; freed with its last view.

    The pages are there when this returns: a first read into new ones took half as long again.
    """
    room, view = aligned_room(length)
    with suppress(OSError):  # small pages serve too
        room.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(view, np.uint8)[:: mmap.PAGESIZE] = 0
    return view
