"""Locks on single bytes of a small file: who is alive is asked of the kernel, never of a pid.

The locks are those of `ofd_locks`. They are taken past the end of the file as well; its bytes may
hold notes.

No call waits. Threads: any, one call at a time for each byte.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

from ... import ofd_locks


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
