"""Locks on single bytes of an open file (`F_OFD_SETLK`), which the kernel drops with the file.

A lock belongs to the open file, not to the process: two opens of one file conflict inside one
process too, and the locks go when the last descriptor is gone, however its owner dies. A child made
by `fork` shares its parent's locks until it ends or closes the descriptor. Bytes past the end of a
file can be locked as well. No call waits; all raise `OSError`. Any thread.
"""

from __future__ import annotations

import fcntl
import os
import struct

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, len, pid


def try_lock(fd: int, byte: int) -> bool:
    """Take a byte; False if another open file holds it. Taking one's own again is no change."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK, byte))
    except (BlockingIOError, PermissionError):  # EAGAIN, EACCES
        return False
    return True


def unlock(fd: int, byte: int) -> None:
    """Give a byte up; no error if it was not held."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, byte))


def held_by_other(fd: int, first: int, count: int = 1) -> bool:
    """True if another open file, in any process, holds any of `count` bytes from `first` on."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK, first, count))
    assert isinstance(answer, bytes)
    return int(_FLOCK.unpack(answer)[0]) != fcntl.F_UNLCK


def _request(kind: int, first: int, count: int = 1) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, first, count, 0)
