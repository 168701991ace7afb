"""Huge pages for shared memory, requested once by the process that creates the memory.

The kernel splits a direct read or write where its memory is not physically adjacent. With small
pages it handles 512 times as many of them. Shared memory comes in pages of 4 KiB unless `huge=` or
`shmem_enabled` is set, which is rare. Since Linux 6.1 a process may request huge pages for a range
(`MADV_COLLAPSE`) without those settings. This module requests none if the machine forbids
them (`transparent_hugepage/enabled` is `never`, or `shmem_enabled` is `deny`).

Guarantees: the contents of the file do not change. If the kernel has no huge pages, or takes long
to find them, the rest of the file keeps small pages.

The kernel maps a file with huge pages only if address and offset are multiples of a huge page.
`map_file` takes care of that. Any thread; the kernel calls release the interpreter lock.
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
"""Bytes for which one call requests huge pages."""
GATHER_TIMEOUT_S = 120.0
"""Longest time for requesting huge pages, in seconds. If memory is so fragmented that it takes
longer, the rest of the file keeps small pages."""
MOSTLY = 7 / 8
"""Share of a file that must lie in huge pages for the whole file to count as huge."""

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000

_mmap = ctypes.CDLL(None).mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_mmap.restype = ctypes.c_void_p


def has_huge_pages(settings: Path = _SETTINGS) -> bool:
    """Return True if this system grants huge pages to processes that request them."""
    return _is_other_than("never", settings / "enabled")


def may_share_huge_pages(settings: Path = _SETTINGS) -> bool:
    """Return True if a process may request huge pages for shared memory."""
    return has_huge_pages(settings) and _is_other_than("deny", settings / "shmem_enabled")


def map_file(fd: int, length: int) -> memoryview:
    """Map the first `length` bytes of a file, writable and shared.

    If possible, the address is a multiple of a huge page. Dropping the last view unmaps the memory.
    Until then the open file and its locks stay alive. Raises `OSError`.
    """
    with suppress(OSError):  # not enough address space
        if length >= HUGE_PAGE_BYTES:
            return _map_aligned(fd, length)
    return memoryview(mmap.mmap(fd, length))


def gather(fd: int, length: int, clock: Callable[[], float]) -> bool:
    """Request huge pages for a file of shared memory that has no pages yet.

    Return True if most of the file lies in huge pages afterwards. Raises `OSError` if the file
    cannot be mapped.
    """
    whole = length // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    memory, deadline = map_file(fd, length), clock() + GATHER_TIMEOUT_S

    def gather_piece(start: int) -> int:
        end = min(start + PIECE_BYTES, whole)
        is_done = clock() < deadline and _touch(fd, start, end) and _collapse(memory[start:end])
        return end - start if is_done else 0

    pieces = range(0, whole, PIECE_BYTES)
    first = gather_piece(0) if pieces else 0
    if not first:  # the kernel, the file system or the free memory has none
        return False
    with memory_threads() as threads:
        return first + sum(threads.map(gather_piece, pieces[1:])) > length * MOSTLY


def aligned_room(
    length: int, more_flags: int = 0, page_bytes: int = HUGE_PAGE_BYTES
) -> tuple[mmap.mmap, memoryview]:
    """Map private memory, untouched, and return it with an aligned view of `length` bytes.

    The view begins at a multiple of `page_bytes`. The mapping continues at least to the end of the
    view's last page. Dropping the last view unmaps it. Raises `OSError`.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | more_flags
    room = mmap.mmap(-1, round_up(length, page_bytes) + page_bytes, flags=flags)
    start = -address_of(room) % page_bytes
    return room, memoryview(room)[start : start + length]


def address_of(memory: mmap.mmap | memoryview) -> int:
    """Return the address of the first byte."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _is_other_than(word: str, setting: Path) -> bool:
    """Return True if the kernel setting exists and its chosen value is not `word`."""
    try:
        return f"[{word}]" not in setting.read_text()
    except OSError:
        return False


def _map_aligned(fd: int, length: int) -> memoryview:
    # On hugetlbfs the kernel maps whole pages of that file system, whatever the length. It replaces
    # any mapping there, so all of that range must belong to our private mapping.
    page_bytes = max(HUGE_PAGE_BYTES, os.fstatvfs(fd).f_bsize)
    _, view = aligned_room(length, _MAP_NORESERVE, page_bytes)
    where, protection = address_of(view), mmap.PROT_READ | mmap.PROT_WRITE
    if _mmap(where, length, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != where:
        raise OSError("not at this address")
    return view


def _touch(fd: int, start: int, end: int) -> bool:
    """Touch a small page in each huge page: the kernel collapses no range without any page."""
    try:
        for offset in range(start, end, HUGE_PAGE_BYTES):
            os.pwrite(fd, b"\0", offset)
    except OSError:  # no space: reserving the rest of the file reports it
        return False
    return True


def _collapse(piece: memoryview) -> bool:
    address = address_of(piece)
    madvise(address, len(piece), mmap.MADV_HUGEPAGE)  # makes the collapse three times as fast
    return bool(madvise(address, len(piece), _MADV_COLLAPSE) == 0)
