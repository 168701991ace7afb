"""Mapping of LMDB errors: to outcomes for commits, to exceptions for everything else."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import lmdb

from ....errors import (
    CorruptionError,
    InUseError,
    KVCascadeError,
    NoSpaceError,
    TierIOError,
    from_os_error,
)
from .index_file import damaged
from .index_port import CommitOutcome

MAX_ERRNO = 4096


_FULL = (CommitOutcome.NO_SPACE, CommitOutcome.NO_PAGES)


def outcome_of_lmdb(error: lmdb.Error) -> CommitOutcome:
    """Map an LMDB error to the outcome of a commit."""
    if isinstance(error, lmdb.MapFullError):
        return CommitOutcome.NO_PAGES
    if _code(error) in (errno.ENOSPC, errno.EDQUOT):
        return CommitOutcome.NO_SPACE
    return CommitOutcome.IO_ERROR


def from_lmdb(error: lmdb.Error, path: Path) -> KVCascadeError:
    """Map an LMDB error to a `KVCascadeError`."""
    if outcome_of_lmdb(error) in _FULL:
        return NoSpaceError(f"no space for the index in {path} ({error}); free some")
    if isinstance(error, lmdb.ReadersFullError):
        return InUseError(
            f"too many processes read the index in {path}; stop one of them, or wait until it ends"
        )
    if _code(error) == errno.EAGAIN:  # the byte that a process locks in the reader table
        return InUseError(
            f"another process with the same number as this one ({os.getpid()}) has the index in "
            f"{path} open, in another PID namespace (a container of its own), which LMDB cannot "
            "tell apart; run the containers in the host's PID namespace (hostPID: true, docker "
            "--pid=host), or give each a path of its own"
        )
    if _code(error) in (errno.EMFILE, errno.ENFILE):
        return from_os_error(OSError(_code(error), str(error)), f"opening the index in {path}")
    if 0 < _code(error) < MAX_ERRNO:  # an errno of the operating system
        return TierIOError(_code(error), f"{error} at the index in {path}; check the device")
    return CorruptionError(damaged(path, str(error)))


def from_outcome(outcome: CommitOutcome, path: Path) -> KVCascadeError:
    """Return the error for a refused commit that cannot be retried later."""
    if outcome in _FULL:
        return NoSpaceError(
            f"no space for the index in {path}; free some, or end the process that is stopped in "
            "the middle of a look at it, then go on"
        )
    return TierIOError(errno.EIO, f"the index in {path} takes no changes; check the device")


def _code(error: lmdb.Error) -> int:
    """Return the error number; 0 for errors that py-lmdb raises itself."""
    return int(getattr(error, "code", 0))
