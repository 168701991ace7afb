"""Fault pages in before they are used, in parallel and without holding the interpreter lock.

`mmap.madvise` keeps the GIL while the kernel zeroes pages. A 64 MiB piece stalls every other thread
for the whole call. This module calls `madvise` through ctypes, which releases the GIL.

Other processes share the pages and may use them already. Faulting in never changes a byte. If the
kernel lacks MADV_POPULATE_WRITE, the fallback reads one byte per page. A read-modify-write could
undo another process's write. Reserve the space first (`posix_fallocate`), or a fault can end in
SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...errors import NoSpaceError, from_os_error
from ...threads import started_pool

PAGE_BYTES = 4096
PIECE_BYTES = 64 << 20
"""Bytes that one task faults in."""
THREADS_MAX = 8

_MADV_POPULATE_WRITE = 23  # Linux 5.14

Span = tuple[int, int]
"""Range of memory: (address, length in bytes)."""

_libc = ctypes.CDLL(None, use_errno=True)
madvise = _libc.madvise
madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
madvise.restype = ctypes.c_int


def prefault(pieces: Iterable[list[Span]]) -> None:
    """Fault in all spans, one task per piece; return when all pages are present.

    Raises `NoSpaceError` if memory runs out, `TierIOError` for any other error.
    """
    with memory_threads() as threads:
        for _ in threads.map(populate, pieces):
            pass


def memory_threads() -> ThreadPoolExecutor:
    """Return a pool of threads that request memory in parallel, as the kernel zeroes it slowly."""
    return started_pool(min(os.cpu_count() or 1, THREADS_MAX), "kvcascade-prefault")


def populate(spans: list[Span]) -> None:
    """Fault in each span; addresses and lengths need no alignment."""
    for address, length in spans:
        start = address // PAGE_BYTES * PAGE_BYTES
        end = -(-(address + length) // PAGE_BYTES) * PAGE_BYTES
        if madvise(start, end - start, _MADV_POPULATE_WRITE) == 0:
            continue
        number = ctypes.get_errno()
        if number == errno.EINVAL:
            touch(start, end - start)
        elif number in (errno.EFAULT, errno.ENOMEM):
            raise NoSpaceError(
                "no memory left while faulting in the CPU arena; lower capacity or free memory"
            )
        else:
            raise from_os_error(OSError(number, os.strerror(number)), "faulting in the CPU arena")


def touch(start: int, length: int) -> None:
    """Read one byte of every page; `start` is page-aligned."""
    pages = np.frombuffer(memoryview((ctypes.c_uint8 * length).from_address(start)), np.uint8)
    pages[::PAGE_BYTES].max(initial=0)
