"""Mapping of LMDB errors to ours."""

from __future__ import annotations

import errno
from pathlib import Path

import lmdb

from ....errors import CorruptionError, KVCascadeError, NoSpaceError, TierIOError, from_os_error
from .index_file import damaged

MAX_ERRNO = 4096


def is_lack_of_room(error: lmdb.Error) -> bool:
    """Return True if the index or its disk is full."""
    return isinstance(error, lmdb.MapFullError) or _code(error) in (errno.ENOSPC, errno.EDQUOT)


def from_lmdb(error: lmdb.Error, path: Path) -> KVCascadeError:
    """Map an LMDB error to a `KVCascadeError`."""
    if is_lack_of_room(error):
        return NoSpaceError(f"no space for the index in {path} ({error}); free some")
    if _code(error) in (errno.EMFILE, errno.ENFILE):
        return from_os_error(OSError(_code(error), str(error)), f"opening the index in {path}")
    if 0 < _code(error) < MAX_ERRNO:  # an errno of the operating system
        return TierIOError(_code(error), f"{error} at the index in {path}; check the device")
    return CorruptionError(damaged(path, str(error)))


def _code(error: lmdb.Error) -> int:
    """Return the error number; 0 for errors that py-lmdb raises itself."""
    return int(getattr(error, "code", 0))
