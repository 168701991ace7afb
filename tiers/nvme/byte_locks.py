"""Locks on single bytes of a small file: who is alive is asked of the kernel, never of a pid.

A lock belongs to the open file (`F_OFD_SETLK`), not to the process: two opens of one file conflict
inside one process too, and the kernel drops the locks when the last descriptor is gone, however its
owner dies. A child made by `fork` shares its parent's locks until it ends or executes something.
Locks are taken past the end of the file as well; its bytes may hold notes.

No call waits. Threads: any, one call at a time for each byte.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from abc import ABC, abstractmethod

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, len, pid


class ByteLocks(ABC):
    """An open file of locks."""

    @abstractmethod
    def try_lock(self, byte: int) -> bool:
        """Take a byte; False if another open file holds it. Taking one's own again is no change."""

    @abstractmethod
    def unlock(self, byte: int) -> None:
        """Give a byte up; no error if it was not held."""

    @abstractmethod
    def others_hold(self, first: int, count: int = 1) -> bool:
        """True if another open file holds any of `count` bytes from `first` on."""

    @abstractmethod
    def read(self, first: int, count: int) -> bytes:
        """The notes in these bytes, zeros where nothing was written."""

    @abstractmethod
    def write(self, first: int, notes: bytes) -> None:
        """Leave notes."""

    @abstractmethod
    def close(self) -> None:
        """Give everything up; idempotent."""


class RealByteLocks(ByteLocks):
    """Over a descriptor, which it owns."""

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor

    def try_lock(self, byte: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK, byte, 1))
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True

    def unlock(self, byte: int) -> None:
        if self._fd >= 0:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, byte, 1))

    def others_hold(self, first: int, count: int = 1) -> bool:
        request = _request(fcntl.F_WRLCK, first, count)
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, request)
        assert isinstance(answer, bytes)
        return int(_FLOCK.unpack(answer)[0]) != fcntl.F_UNLCK

    def read(self, first: int, count: int) -> bytes:
        return os.pread(self._fd, count, first).ljust(count, b"\0")

    def write(self, first: int, notes: bytes) -> None:
        os.pwrite(self._fd, notes, first)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _request(kind: int, first: int, count: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, first, count, 0)
