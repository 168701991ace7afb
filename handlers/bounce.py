"""Scratch memory in huge pages, for direct I/O.

A direct read or write is cut where its memory is not adjacent physically. The pages of shared
memory lie scattered (Linux gives 4 KiB at a time unless `/dev/shm` is mounted with `huge=`), those
of a private huge page do not. Moved through here, cold reads are 1.8 times as fast and writes 1.6
times (512 KiB blocks, the whole path, figures in ARCHITECTURE.md) for the same processor time: the
copy costs what the kernel saves on pages. Where the system gives no huge pages it would be a copy
for nothing; `has_huge_pages` tells.

Threads: each has a buffer of its own, as large as the most it asked for, freed with the thread.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

HUGE_PAGE_BYTES = 2 << 20
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def has_huge_pages(setting: Path = _ENABLED) -> bool:
    """True if this system gives huge pages to who asks."""
    try:
        return "[never]" not in setting.read_text()
    except OSError:
        return False


class BounceBuffers:
    """Room for a few blocks, one buffer per thread. Any thread."""

    def __init__(self, block_bytes: int) -> None:
        """`block_bytes`: a multiple of a page, so that every block may be read directly."""
        self._block_bytes = block_bytes
        self._own = threading.local()

    def blocks(self, n: int) -> list[memoryview]:
        """Room for `n` blocks in a row; it is this thread's until it asks again."""
        size = self._block_bytes
        buffer: memoryview | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < n * size:
            buffer = self._own.buffer = huge_pages(max(1, n) * size)
        return [buffer[i * size : (i + 1) * size] for i in range(n)]

    def copies(self, blocks: Sequence[memoryview]) -> list[memoryview]:
        """These blocks, copied here."""
        copies = self.blocks(len(blocks))
        for copy, block in zip(copies, blocks, strict=True):
            copy_block(copy, block)
        return copies


def copy_block(target: memoryview, source: memoryview) -> None:
    """Copy a block without keeping the interpreter lock."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def huge_pages(length: int) -> memoryview:
    """Private zeroed memory, of huge pages where the system has them; freed with its last view.

    The pages are there when this returns: a first read into new ones took half as long again.
    """
    memory = mmap.mmap(-1, length + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # small pages serve too
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE_BYTES
    view = memoryview(memory)[start : start + length]
    np.frombuffer(view, np.uint8)[:: mmap.PAGESIZE] = 0
    return view
