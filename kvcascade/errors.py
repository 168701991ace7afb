"""Every error that kvcascade raises, and the mapping of OS errors to them.

A block that is missing, torn or damaged is never an exception: it is an outcome (see
`kvcascade.tiers.base.BlockOutcome`). Exceptions are for faults of the configuration, of the
machine, or of our own code. Each message names what was wrong and what to do.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path


class ErrorKind(Enum):
    """Kind of an error, for callers that branch on it."""

    CONFIG = "config"
    NO_SPACE = "no_space"
    CORRUPTION = "corruption"
    IO = "io"
    IN_USE = "in_use"
    FORMAT = "format"
    CLOSED = "closed"


class KVCascadeError(Exception):
    """Base class of all errors of this package; `kind` is its family."""

    kind: ErrorKind = ErrorKind.IO


class ConfigError(KVCascadeError, ValueError):
    """The configuration is wrong; the message is one sentence naming key, value and remedy."""

    kind = ErrorKind.CONFIG


class NoSpaceError(KVCascadeError):
    """There is no free slot, memory or disk space for a request."""

    kind = ErrorKind.NO_SPACE


class CorruptionError(KVCascadeError):
    """Metadata that is needed to go on (an index, a header) is damaged."""

    kind = ErrorKind.CORRUPTION


class TierIOError(KVCascadeError, OSError):
    """The operating system refused an operation on a tier's files or memory."""

    kind = ErrorKind.IO

    def __str__(self) -> str:
        """Return the sentence without the number of the OS error."""
        return self.strerror or super().__str__()


class InUseError(KVCascadeError):
    """Another live process owns the object that was to be opened."""

    kind = ErrorKind.IN_USE


class FormatError(KVCascadeError):
    """The data on disk or in shared memory has a version or layout that this code cannot read."""

    kind = ErrorKind.FORMAT


class ClosedError(KVCascadeError):
    """The object was used after `close`, or in a process that was forked after it was opened."""

    kind = ErrorKind.CLOSED


FINAL_ERRORS = (ConfigError, CorruptionError, FormatError)
"""Errors that another attempt cannot mend: the user has to change something."""

_NO_DESCRIPTOR_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE})
PROCESS_ERRNOS = _NO_DESCRIPTOR_ERRNOS | {errno.ENOMEM}
"""Errors of a process that lacks something. They say nothing about the device."""

_NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
_PATH_ERRNOS = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EOVERFLOW,
    }
)
_DENIED_ERRNOS = frozenset({errno.EACCES, errno.EPERM})
_OTHER_KIND = errno.EMEDIUMTYPE  # no call to the system returns it for a file of a cache
_NOT_THERE_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP})


def from_os_error(error: OSError, doing: str) -> KVCascadeError:
    """Map an OS error to ours. `doing` completes the sentence "while <doing>".

    The original errno is kept in `errno`.
    """
    reason = error.strerror or str(error)
    if error.errno in _NO_SPACE_ERRNOS:
        remedy = "free some, or inodes, or lower the capacity"
        if error.errno == errno.EFBIG:
            remedy = "raise the limit of file sizes with `ulimit -f`"
        return NoSpaceError(f"no space while {doing}: {reason}; {remedy}")
    if error.errno in _NO_DESCRIPTOR_ERRNOS:
        return TierIOError(error.errno, f"{reason} while {doing}; raise the limit with `ulimit -n`")
    if error.errno in _DENIED_ERRNOS:
        remedy = "run as the user of the engines, or change the permissions"
        if error.errno == errno.EPERM:
            remedy += "; `chmod -R go-w` forbids others to write, `chattr -i` permits changes"
    elif error.errno == errno.ELOOP and os.path.islink(error.filename or ""):
        remedy = f"replace the link {error.filename} by what it leads to"
        remedy += "; a bind mount or a list of paths keeps data elsewhere"
    elif error.errno == errno.EROFS:
        remedy = "mount it so that it can be written"
    elif error.errno == _OTHER_KIND:
        remedy = f"restore {error.filename}, or remove it"
    else:
        remedy = "check the path" if error.errno in _PATH_ERRNOS else "check the device"
    return TierIOError(error.errno, f"{reason} while {doing}; {remedy}")


def other_kind(path: object) -> OSError:
    """Return the error for a file of a cache in whose place is something else, such as a pipe."""
    return OSError(_OTHER_KIND, "not the kind of file that was expected", str(path))


@contextmanager
def os_errors(doing: str) -> Iterator[None]:
    """Context manager: every `OSError` inside becomes one of ours (see `from_os_error`)."""
    try:
        yield
    except KVCascadeError:
        raise
    except OSError as error:
        raise from_os_error(error, doing) from error


def file_mode(path: Path) -> int:
    """Return the mode of the file that a path leads to; 0 if there is none.

    Raises `OSError` if it cannot be looked at. From Python 3.14 on, `Path.is_dir` and its kin
    answer False then.
    """
    try:
        return os.stat(path).st_mode
    except ValueError:  # a null byte
        return 0
    except OSError as error:
        if error.errno in _NOT_THERE_ERRNOS:
            return 0
        raise


def is_folder(path: Path) -> bool:
    """Return whether a path leads to a folder. Raises as `file_mode`."""
    return stat.S_ISDIR(file_mode(path))
