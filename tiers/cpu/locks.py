"""Kernel locks on the arena file: who is alive is asked of the kernel, never of a pid.

Kinds which do not interact, all bound to the open file (not to the process), and released by the
kernel when the last descriptor and mapping of that open file is gone, however its owner dies:

- `flock`: every opener holds a shared one. If an exclusive one can be had, nobody is alive.
- a `flock` on the folder itself: a turn, for what only one process at a time should do there. It
  leaves nothing behind, and nothing depends on it: who does not get it in time goes on without.
- byte locks (`ofd_locks`): one byte per role (maker, each rank, scheduler), exclusive. Two opens of
  one file conflict even inside one process, so a test needs no second process.

A child made by fork shares its parent's locks until it exits or closes the descriptor.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


def try_flock(fd: int, exclusive: bool) -> bool:
    """Take the whole-file lock without waiting; False if a live process is in the way.

    A failed change from shared to exclusive may lose the shared lock.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def turn_in(folder: str, may_wait: Callable[[], bool]) -> Iterator[None]:
    """One process at a time, of those that ask, in a folder.

    `may_wait` waits a little, or says False: then it is done without. So it is where a folder
    cannot be locked. Raises `OSError` if the folder is not there.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            while not try_flock(fd, exclusive=True) and may_wait():
                pass
        yield
    finally:
        with suppress(OSError):  # a child that was forked meanwhile would keep it
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
