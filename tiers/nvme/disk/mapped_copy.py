"""Bytes into and out of mapped files, without the signal that a bad page is otherwise.

Where the device cannot deliver a mapped page, or the file was cut, a plain access ends the process
(SIGBUS). Here the system copies, between the mapping and a file in memory: for it such a page is an
error like any other. Half a microsecond or so more than a plain copy.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading

PAGE_BYTES = 4096
_NAME = "kvcascade-scratch"


class _Scratch:
    """A file in memory, and its first page."""

    def __init__(self) -> None:
        self.fd = os.memfd_create(_NAME)
        os.ftruncate(self.fd, PAGE_BYTES)
        self.page = mmap.mmap(self.fd, PAGE_BYTES)

    def __del__(self) -> None:
        os.close(self.fd)


_of_thread = threading.local()


def _scratch() -> _Scratch:
    try:
        scratch: _Scratch = _of_thread.scratch
    except AttributeError:
        scratch = _of_thread.scratch = _Scratch()
    return scratch


def prepare() -> None:
    """Make what this thread needs, which takes a descriptor, before it needs it."""
    _scratch()


def copy_out(part: memoryview) -> bytes:
    """The bytes of a part of a mapping, a page at most. Raises `OSError`."""
    scratch = _scratch()
    if os.pwrite(scratch.fd, part, 0) != len(part):
        raise OSError(errno.EFAULT, "a mapped page cannot be read")
    return scratch.page[: len(part)]


def copy_in(data: bytes, part: memoryview) -> bool:
    """Overwrite a part of a mapping; False if not all of it could be. Raises `OSError`."""
    scratch = _scratch()
    os.pwrite(scratch.fd, data, 0)
    return os.preadv(scratch.fd, [part], 0) == len(data)
