"""Locks on single bytes of a small file; the kernel tells which holders are alive, not a pid.

The locks are those of `ofd_locks`. They may lie past the end of the file. The bytes of the file
hold notes.

No call waits. Threads: any, but one call at a time for each byte.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

from ... import ofd_locks


class ByteLocks(ABC):
    """An open lock file."""

    @abstractmethod
    def try_lock(self, byte: int) -> bool:
        """Lock a byte. Return False if another open file holds it.

        Locking a byte again that this file holds already changes nothing.
        """

    @abstractmethod
    def unlock(self, byte: int) -> None:
        """Unlock a byte; no error if it was not locked."""

    @abstractmethod
    def others_hold(self, first: int, count: int = 1) -> bool:
        """Return True if another open file holds any of the `count` bytes from `first` on."""

    @abstractmethod
    def read(self, first: int, count: int) -> bytes:
        """Return the notes in these bytes, with zeros where nothing was written."""

    @abstractmethod
    def write(self, first: int, notes: bytes) -> None:
        """Write notes from the byte `first` on."""

    @abstractmethod
    def close(self) -> None:
        """Release every lock and close the file; idempotent."""


class RealByteLocks(ByteLocks):
    """Byte locks on a file descriptor, which this object owns."""

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor

    def try_lock(self, byte: int) -> bool:
        return ofd_locks.try_lock(self._fd, byte)

    def unlock(self, byte: int) -> None:
        if self._fd >= 0:
            ofd_locks.unlock(self._fd, byte)

    def others_hold(self, first: int, count: int = 1) -> bool:
        return ofd_locks.held_by_other(self._fd, first, count)

    def read(self, first: int, count: int) -> bytes:
        return os.pread(self._fd, count, first).ljust(count, b"\0")

    def write(self, first: int, notes: bytes) -> None:
        os.pwrite(self._fd, notes, first)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
