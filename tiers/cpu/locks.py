"""Kernel locks on the arena file; the kernel tells which holders are alive, not a pid.

There are three kinds of locks, and they do not interact. Each is bound to the open file, not to the
process. The kernel releases it with the last descriptor and mapping of that open file, however the
owner dies.

- `flock` on the file: every opener holds it shared. If a process can take it exclusively, no live
  process has the file open.
- `flock` on the directory: serializes a step that one process at a time should do there. It leaves
  no file behind. It is advisory: a process that does not get it in time goes on without it.
- Byte locks (`F_OFD_SETLK`): one byte per role (maker, each rank, scheduler), exclusive. Two opens
  of one file conflict even inside one process, so a test needs no second process. Locked bytes may
  lie past the end of the file.

A child made by `fork` shares its parent's locks until it exits or closes the descriptor.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, len, pid


def try_lock(fd: int, byte: int) -> bool:
    """Lock a byte. Return False if another open file holds it. Raises `OSError`.

    Locking a byte again that this file holds already changes nothing.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(byte))
    except (BlockingIOError, PermissionError):  # EAGAIN, EACCES
        return False
    return True


def held_by_other(fd: int, byte: int) -> bool:
    """Return True if another open file, in any process, holds a byte. Raises `OSError`."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _request(byte))
    assert isinstance(answer, bytes)
    return int(_FLOCK.unpack(answer)[0]) != fcntl.F_UNLCK


def try_flock(fd: int, exclusive: bool) -> bool:
    """Take the whole-file lock without waiting. Return False if a live process prevents it.

    A failed change from shared to exclusive may lose the shared lock.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def turn_in(folder: str, tries: Iterator[None]) -> Iterator[None]:
    """Hold the lock of a directory, so that one process at a time runs the body.

    While another process holds the lock, it is tried again at each of `tries`, which may wait. The
    body runs without the lock if they are over, or if the directory cannot be locked. Raises
    `OSError` if the directory does not exist.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            if not try_flock(fd, exclusive=True):
                for _ in tries:
                    if try_flock(fd, exclusive=True):
                        break
        yield
    finally:
        with suppress(OSError):  # a child forked meanwhile would keep the lock
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _request(byte: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
