"""Bounce buffers in huge pages, for direct I/O with an arena in small pages.

The kernel splits a direct read or write where its memory is not physically adjacent, and the small
pages of shared memory lie scattered. Copying through these buffers is faster
(docs/decisions/arena-memory.md). Where the system has no huge pages the copy would bring nothing;
`has_huge_pages` tells.

Blocks pass through `ArenaBounce` as a whole, so that the processor's cache still holds a block that
is verified and copied. Large blocks pass through `PieceBounce`, which needs less memory.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ...tiers.base import SlotArray
from ...tiers.cpu.huge_pages import aligned_room
from ...tiers.nvme.disk.filesystem import File
from ...tiers.nvme.disk.transfers import read_all, write_all


class ThreadBuffers:
    """One buffer per thread, as large as its largest request. It is freed with the thread."""

    def __init__(self) -> None:
        self._own = threading.local()

    def room(self, length: int) -> memoryview:
        """Return this thread's buffer, of at least `length` bytes."""
        buffer: memoryview | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < length:
            buffer = self._own.buffer = huge_pages(length)
        return buffer


class PieceBounce(ThreadBuffers):
    """Transfers of blocks that are larger than a piece. Only one piece at a time is in a buffer."""

    def __init__(self, piece_bytes: int) -> None:
        """`piece_bytes` is a multiple of a page, so that every piece fits direct I/O."""
        super().__init__()
        self._piece_bytes = piece_bytes

    def read(self, file: File, buffers: Sequence[memoryview], offset: int) -> None:
        """Do as `transfers.read_all`."""
        for target, piece, position in self._pieces(buffers, offset):
            read_all(file, [piece], position)
            np.copyto(target, np.frombuffer(piece, np.uint8))

    def write(self, file: File, buffers: Sequence[memoryview], offset: int) -> None:
        """Do as `transfers.write_all`."""
        for source, piece, position in self._pieces(buffers, offset):
            np.copyto(np.frombuffer(piece, np.uint8), source)
            write_all(file, [piece], position)

    def _pieces(
        self, buffers: Sequence[memoryview], offset: int
    ) -> Iterator[tuple[npt.NDArray[np.uint8], memoryview, int]]:
        """Yield each part of the buffers with room of its length, and its offset in the file."""
        room = self.room(self._piece_bytes)
        for buffer in buffers:
            for start in range(0, len(buffer), self._piece_bytes):
                part = np.frombuffer(buffer[start : start + self._piece_bytes], np.uint8)
                yield part, room[: len(part)], offset + start
            offset += len(buffer)


class ArenaBounce(ThreadBuffers):
    """Buffers for a few blocks, one per thread, and copies between them and an arena. Any thread.

    Adjacent blocks are copied in one call: each call releases the interpreter lock and then waits
    for it.
    """

    def __init__(self, arena: memoryview, block_bytes: int) -> None:
        """`arena` holds the slots, of `block_bytes` each: a multiple of a page, so that every block
        fits direct I/O."""
        super().__init__()
        self._arena: npt.NDArray[np.uint8] = np.frombuffer(arena, np.uint8)
        self._block_bytes = block_bytes

    def blocks(self, n: int) -> list[memoryview]:
        """Return adjacent memory for `n` blocks. It is valid until this thread's next call."""
        size, buffer = self._block_bytes, self._room(n)
        return [buffer[i * size : (i + 1) * size] for i in range(n)]

    def take(self, slots: SlotArray) -> list[memoryview]:
        """Copy the blocks of these slots into this thread's buffer and return them."""
        buffer = np.frombuffer(self._room(len(slots)), np.uint8)
        for at, slot, n in neighbours(slots, range(len(slots))):
            np.copyto(self._bytes(buffer, at, n), self._bytes(self._arena, slot, n))
        return self.blocks(len(slots))

    def give(self, slots: SlotArray, places: Sequence[int]) -> None:
        """Copy blocks from this thread's buffer into their slots. `places` index both."""
        buffer = np.frombuffer(self._room(len(slots)), np.uint8)
        for at, slot, n in neighbours(slots, places):
            np.copyto(self._bytes(self._arena, slot, n), self._bytes(buffer, at, n))

    def _room(self, n: int) -> memoryview:
        return self.room(max(1, n) * self._block_bytes)

    def _bytes(self, memory: npt.NDArray[np.uint8], first: int, n: int) -> npt.NDArray[np.uint8]:
        return memory[first * self._block_bytes : (first + n) * self._block_bytes]


def neighbours(slots: SlotArray, places: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the runs of places that are adjacent in the list and in the slots.

    Each run is its first place, its first slot and its length.
    """
    if not places:
        return []
    at = np.asarray(places)
    here = slots[at]
    is_cut = (np.diff(here) != 1) | (np.diff(at) != 1)
    starts = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(at)]
    return [(int(at[i]), int(here[i]), j - i) for i, j in pairwise(starts)]


def huge_pages(length: int) -> memoryview:
    """Return private zeroed memory, in huge pages if the system has them.

    The memory is freed with its last view. All pages are mapped when this returns.
    """
    room, view = aligned_room(length)
    with suppress(OSError):  # small pages serve too
        room.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(view, np.uint8)[:: mmap.PAGESIZE] = 0
    return view


def give_back(memory: memoryview) -> None:
    """Free memory of `huge_pages` that still has views; they read as zero from now on."""
    assert isinstance(memory.obj, mmap.mmap), "it is a view of its mapping"
    memory.obj.madvise(mmap.MADV_DONTNEED)
