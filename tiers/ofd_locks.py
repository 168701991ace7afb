"""Locks on single bytes of an open file (`F_OFD_SETLK`).

A lock belongs to the open file, not to the process. Two opens of one file therefore conflict even
inside one process. The kernel releases the locks with the last descriptor, however the owner dies.
A child made by `fork` shares its parent's locks until it ends or closes the descriptor. Locked
bytes may lie past the end of the file. No call waits, and all raise `OSError`. Any thread.
"""

from __future__ import annotations

import fcntl
import os
import struct

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, len, pid


def try_lock(fd: int, byte: int) -> bool:
    """Lock a byte. Return False if another open file holds it.

    Locking a byte again that this file holds already changes nothing.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(byte))
    except (BlockingIOError, PermissionError):  # EAGAIN, EACCES
        return False
    return True


def held_by_other(fd: int, byte: int) -> bool:
    """Return True if another open file, in any process, holds a byte."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _request(byte))
    assert isinstance(answer, bytes)
    return int(_FLOCK.unpack(answer)[0]) != fcntl.F_UNLCK


def _request(byte: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
