"""Huge pages for shared memory: asked for once, by whoever makes it.

A direct read or write is cut where its memory is not adjacent physically, and a kernel that works
on pages does so 512 times as often if they are small. Shared memory comes in pages of 4 KiB unless
somebody set up `huge=` or `shmem_enabled`, which hardly anybody does; but since Linux 6.1 a process
may ask for huge pages in a range of it (`MADV_COLLAPSE`, which needs no such setting). A machine
that was told to have none (`transparent_hugepage/enabled` is `never`, `shmem_enabled` is `deny`) is
not asked.

Guarantees: what lies in the file stays as it is; where the kernel has no huge pages, or takes long
to find them, the rest of the file is left for small ones.

A file in huge pages is mapped by them only where address and offset are multiples of one:
`map_file` sees to that. Any thread; the calls into the kernel give up the interpreter lock.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from .header import round_up
from .prefault import madvise, memory_threads

HUGE_PAGE_BYTES = 2 << 20
PIECE_BYTES = 16 << 20
"""Asked for at a time."""
GATHER_TIMEOUT_S = 120.0
"""Where memory is so fragmented that huge pages take longer, the rest is left for small ones."""
MOSTLY = 7 / 8
"""The share of a file in huge pages from which on it counts as one that is."""

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000

_mmap = ctypes.CDLL(None).mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_mmap.restype = ctypes.c_void_p


def has_huge_pages(settings: Path = _SETTINGS) -> bool:
    """True if this system gives huge pages to who asks."""
    return _is_other_than("never", settings / "enabled")


def may_share_huge_pages(settings: Path = _SETTINGS) -> bool:
    """True if shared memory may be asked for in them."""
    return has_huge_pages(settings) and _is_other_than("deny", settings / "shmem_enabled")


def map_file(fd: int, length: int) -> memoryview:
    """The first `length` bytes of a file, writable and shared, from a multiple of a huge page on.

    Unmapped with the last view; the open file and its locks live as long. Raises `OSError`.
    """
    with suppress(OSError):  # no address space to spare
        if length >= HUGE_PAGE_BYTES:
            return _map_aligned(fd, length)
    return memoryview(mmap.mmap(fd, length))


def gather(fd: int, length: int, clock: Callable[[], float]) -> bool:
    """Have the kernel take huge pages for a file of shared memory that has no pages yet.

    True if most of it lies in them afterwards. Raises `OSError` if it cannot be mapped.
    """
    whole = length // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    memory, deadline = map_file(fd, length), clock() + GATHER_TIMEOUT_S

    def gather_piece(start: int) -> int:
        end = min(start + PIECE_BYTES, whole)
        is_done = clock() < deadline and _touch(fd, start, end) and _collapse(memory[start:end])
        return end - start if is_done else 0

    pieces = range(0, whole, PIECE_BYTES)
    first = gather_piece(0) if pieces else 0
    if not first:  # this kernel, this file system, or the memory that is left has none
        return False
    with memory_threads() as threads:
        return first + sum(threads.map(gather_piece, pieces[1:])) > length * MOSTLY


def aligned_room(
    length: int, more_flags: int = 0, page_bytes: int = HUGE_PAGE_BYTES
) -> tuple[mmap.mmap, memoryview]:
    """Private memory, not touched yet, and `length` bytes of it from a huge page's border on.

    The room goes on to the end of the last page. Unmapped with the last view. Raises `OSError`.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | more_flags
    room = mmap.mmap(-1, round_up(length, page_bytes) + page_bytes, flags=flags)
    start = -address_of(room) % page_bytes
    return room, memoryview(room)[start : start + length]


def address_of(memory: mmap.mmap | memoryview) -> int:
    """Where it begins."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _is_other_than(word: str, setting: Path) -> bool:
    """True if a setting of the kernel's is there, and something else was chosen."""
    try:
        return f"[{word}]" not in setting.read_text()
    except OSError:
        return False


def _map_aligned(fd: int, length: int) -> memoryview:
    # On hugetlbfs the kernel maps whole pages of that file system, whatever length it is given, and
    # replaces what lies there: all of it must be our room.
    page_bytes = max(HUGE_PAGE_BYTES, os.fstatvfs(fd).f_bsize)
    _, view = aligned_room(length, _MAP_NORESERVE, page_bytes)
    where, protection = address_of(view), mmap.PROT_READ | mmap.PROT_WRITE
    if _mmap(where, length, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != where:
        raise OSError("not at this address")
    return view


def _touch(fd: int, start: int, end: int) -> bool:
    """Have a small page in each, as the kernel collapses nothing where there is none at all."""
    try:
        for offset in range(start, end, HUGE_PAGE_BYTES):
            os.pwrite(fd, b"\0", offset)
    except OSError:  # no room: who reserves the rest will say so
        return False
    return True


def _collapse(piece: memoryview) -> bool:
    address = address_of(piece)
    madvise(address, len(piece), mmap.MADV_HUGEPAGE)  # three times as fast with it
    return bool(madvise(address, len(piece), _MADV_COLLAPSE) == 0)
