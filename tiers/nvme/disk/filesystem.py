"""The only door to the operating system for segment, state and description files.

`RealFileSystem` is the machine; `tests/support/memory_file_system.py` is a twin in memory that
fails on command. Both raise plain `OSError`; the callers map it (`kvcascade.errors`).

Durability: nothing is durable before `File.sync` (contents) and `FileSystem.sync_dir` (names).
Threads: a `File` may be used by several threads at once; each transfer names its own offset.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ....errors import InUseError
from .byte_locks import ByteLocks, RealByteLocks
from .mapped_copy import PAGE_BYTES, copy_in, copy_out, prepare

FILE_MODE = 0o600
DIR_MODE = 0o700
OTHERS_WRITE = 0o022
MAX_PID_DIGITS = 20
MAX_LOCK_TRIES = 8
LOCK_PAUSE_S = 0.01
"""Between two looks at a lock that is waited for."""
_TEMPORARY_SUFFIX = ".tmp"
_DIRECT_FLAG = getattr(os, "O_DIRECT", 0)
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


View = Callable[[int, int], bytes]
"""Gives so many bytes, a page at most, from so far into a part of a file. Raises `OSError`."""


class File(ABC):
    """An open regular file of ours."""

    @abstractmethod
    def preadv(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into the buffers from `offset`; bytes moved, which may be fewer than asked."""

    @abstractmethod
    def pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Write the buffers at `offset`; bytes moved, which may be fewer than asked."""

    def patch(self, data: bytes, offset: int, window: tuple[int, int]) -> bool:
        """Write a few bytes past the transfers that other threads have under way in this file.

        They lie within `window`, the (offset, length) of the part of the file that is written this
        way; its offset is a multiple of the page. False if it cannot be done: use `pwritev` then.
        """
        return False

    @abstractmethod
    def preallocate(self, size: int) -> None:
        """Reserve blocks for the first `size` bytes and extend the file to at least that."""

    @abstractmethod
    def truncate(self, size: int) -> None:
        """Cut or extend (with a hole) to exactly `size` bytes."""

    @abstractmethod
    def sync(self) -> None:
        """Make the contents durable, mapped writes included (`fdatasync`)."""

    @abstractmethod
    def size(self) -> int:
        """Length in bytes."""

    @abstractmethod
    def map(self, offset: int, length: int, *, writable: bool) -> memoryview:
        """A shared mapping; `offset` is a multiple of the page. Outlives `close`."""

    @abstractmethod
    def view(self, offset: int, length: int) -> View:
        """A way to read a part of the file as it is then, for a thread that waits for no lock.

        Through a mapping, but what the device cannot deliver, and what was cut off the file, is an
        error and not a signal. As `map` in all else.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the descriptor; idempotent."""


class FileLock(ABC):
    """A lock that is held until `release` or the end of the process."""

    @abstractmethod
    def release(self) -> None:
        """Give it up; idempotent."""


def read_and_close(file: File, path: Path, limit: int) -> bytes:
    """The contents of an open small file; `OSError` (EFBIG) if it is longer than `limit` bytes."""
    try:
        size = file.size()
        if size > limit:
            raise OSError(errno.EFBIG, f"longer than {limit} bytes", str(path))
        data = bytearray(size)
        moved = file.preadv([memoryview(data)], 0) if size else 0
        return bytes(data[:moved])
    finally:
        file.close()


class FileSystem(ABC):
    """Names, and the files behind them. Every path handed in is absolute."""

    @abstractmethod
    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> File:
        """Open for reading and writing. `create`: the name must be new; mode 0600.

        `direct` asks for transfers past the page cache, where the file system can do that.
        Symbolic links, other owners and anything but a regular file are refused.
        """

    @abstractmethod
    def make_dir(self, path: Path) -> None:
        """Create one directory, mode 0700; no error if it is there and ours."""

    @abstractmethod
    def check_dir(self, path: Path) -> None:
        """Raise `OSError` unless `path` is a directory of ours and no symbolic link."""

    @abstractmethod
    def list_dir(self, path: Path) -> list[str]:
        """Names in a directory, sorted."""

    @abstractmethod
    def exists(self, path: Path) -> bool:
        """True if the name is there, as whatever it is."""

    @abstractmethod
    def unlink(self, path: Path) -> None:
        """Remove a file name."""

    @abstractmethod
    def remove_tree(self, path: Path) -> None:
        """Remove a directory and what is in it, without following links.

        Others may be removing it, too: what is not there any more is no error.
        """

    @abstractmethod
    def rename(self, source: Path, target: Path) -> None:
        """Give a file or a directory another name, atomically; a file replaces one of that name."""

    @abstractmethod
    def sync_dir(self, path: Path) -> None:
        """Make the names in a directory durable."""

    @abstractmethod
    def free_bytes(self, path: Path) -> int:
        """Bytes that an ordinary user may still write on this device."""

    @abstractmethod
    def total_bytes(self, path: Path) -> int:
        """Size of the device in bytes."""

    @abstractmethod
    def used_bytes(self, path: Path) -> int:
        """Bytes on disk of a file, or of a directory and everything below it."""

    @abstractmethod
    def modified_at(self, path: Path) -> float:
        """Time of the last change, in seconds of the wall clock."""

    @abstractmethod
    def lock(
        self, path: Path, *, shared: bool = False, wait_s: float = 0.0, is_noted: bool = True
    ) -> FileLock:
        """Take the lock file `path`, alone or together with others who want it `shared`.

        After `wait_s` seconds in vain `InUseError` names who took it last. With `is_noted` that is
        this process from now on, and the file changes when it is released, too; without, the file
        does not change, nor when it was changed last.
        """

    @abstractmethod
    def byte_locks(self, path: Path) -> ByteLocks:
        """Open a file of byte locks, made if it is not there."""

    def read(self, path: Path, limit: int) -> bytes:
        """The contents of a small file; `OSError` (EFBIG) if it is longer than `limit` bytes."""
        return read_and_close(self.open(path), path, limit)

    def replace(self, path: Path, data: bytes) -> None:
        """Write a small file so that it is there completely or not at all, durably."""
        temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
        if self.exists(temporary):
            self.unlink(temporary)
        file = self.open(temporary, create=True)
        try:
            moved = file.pwritev([memoryview(data)], 0)
            if moved != len(data):
                raise OSError(errno.ENOSPC, "short write", str(path))
            file.sync()
        finally:
            file.close()
        self.rename(temporary, path)
        self.sync_dir(path.parent)


class RealFile(File):
    """A descriptor of the operating system."""

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor
        self._window: memoryview | None = None

    def preadv(self, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            return os.preadv(self._fd, buffers, offset)
        except OSError as error:
            self._leave_direct_mode(error)
        return os.preadv(self._fd, buffers, offset)

    def pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            return os.pwritev(self._fd, buffers, offset)
        except OSError as error:
            self._leave_direct_mode(error)
        return os.pwritev(self._fd, buffers, offset)

    def patch(self, data: bytes, offset: int, window: tuple[int, int]) -> bool:
        """Through a mapping: `pwritev` takes the file for itself (ext4, XFS), so that it waits for
        all direct writes to it, and new ones wait for it.

        The system copies, from a file in memory: where a plain store would be answered by SIGBUS,
        on a damaged device or beyond the end of a file that somebody cut, this is an error.
        """
        try:
            if self._window is None:
                self._window = self.map(*window, writable=True)
            start = offset - window[0]
            return copy_in(data, self._window[start : start + len(data)])
        except (OSError, ValueError):  # ValueError: the file is shorter than the window
            return False

    def preallocate(self, size: int) -> None:
        os.posix_fallocate(self._fd, 0, size)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def map(self, offset: int, length: int, *, writable: bool) -> memoryview:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return memoryview(mmap.mmap(self._fd, length, access=access, offset=offset))

    def view(self, offset: int, length: int) -> View:
        prepare()
        mapped = self.map(offset, length, writable=False)
        return lambda start, count: copy_out(mapped[start : start + count])

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def try_direct(self) -> None:
        """Pass by the page cache from now on, if the file system can. Raises `OSError`."""
        _try_direct(self._fd)

    def _leave_direct_mode(self, error: OSError) -> None:
        """Direct transfers need alignment that a buffer may not have: go on through the cache."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        if error.errno != errno.EINVAL or not flags & _DIRECT_FLAG:
            raise error
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~_DIRECT_FLAG)


class RealFileLock(FileLock):
    """An `flock`; the system drops it when the process dies, however it dies."""

    def __init__(self, descriptor: int, is_noted: bool) -> None:
        self._fd = descriptor
        self._is_noted = is_noted

    def release(self) -> None:
        if self._fd >= 0:
            if self._is_noted:
                with suppress(OSError):  # a device that fails, or became read-only
                    os.utime(self._fd)
            os.close(self._fd)
            self._fd = -1


class RealFileSystem(FileSystem):
    """The machine's own. `direct` allows direct I/O; without it all goes through the cache."""

    def __init__(self, direct: bool = True) -> None:
        self._direct = direct

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> File:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        descriptor = os.open(path, flags, FILE_MODE)
        try:
            _check_ours(os.fstat(descriptor), stat.S_ISREG, path)
            if direct and self._direct:
                _try_direct(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return RealFile(descriptor)

    def make_dir(self, path: Path) -> None:
        try:
            os.mkdir(path, DIR_MODE)
        except FileExistsError:
            self.check_dir(path)

    def check_dir(self, path: Path) -> None:
        _check_ours(os.lstat(path), stat.S_ISDIR, path)

    def list_dir(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def remove_tree(self, path: Path) -> None:
        for parent, folders, files in os.walk(path, topdown=False):
            for name in files:
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(parent, name))
            for name in folders:
                inner = os.path.join(parent, name)
                with suppress(FileNotFoundError):
                    os.unlink(inner) if os.path.islink(inner) else os.rmdir(inner)
        with suppress(FileNotFoundError):
            os.rmdir(path)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def sync_dir(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self, path: Path) -> int:
        figures = os.statvfs(path)
        return figures.f_bavail * figures.f_frsize

    def total_bytes(self, path: Path) -> int:
        figures = os.statvfs(path)
        return figures.f_blocks * figures.f_frsize

    def used_bytes(self, path: Path) -> int:
        if not os.path.isdir(path):
            return os.lstat(path).st_blocks * 512
        total = 0
        for parent, _, files in os.walk(path):
            for name in files:
                try:
                    total += os.lstat(os.path.join(parent, name)).st_blocks * 512
                except FileNotFoundError:  # removed meanwhile by its owner
                    continue
        return total

    def modified_at(self, path: Path) -> float:
        return os.lstat(path).st_mtime

    def lock(
        self, path: Path, *, shared: bool = False, wait_s: float = 0.0, is_noted: bool = True
    ) -> FileLock:
        tries_left = max(MAX_LOCK_TRIES, round(wait_s / LOCK_PAUSE_S))
        while True:
            tries_left -= 1
            try:
                descriptor = self._lock_once(path, shared, is_noted)
            except InUseError:
                if wait_s <= 0 or tries_left <= 0:
                    raise
                time.sleep(LOCK_PAUSE_S)
                continue
            if descriptor is not None:
                return RealFileLock(descriptor, is_noted)
            if tries_left <= 0:
                raise InUseError(lock_message(path, ""))

    def byte_locks(self, path: Path) -> ByteLocks:
        descriptor = os.open(path, _LOCK_FLAGS, FILE_MODE)
        try:
            _check_ours(os.fstat(descriptor), stat.S_ISREG, path)
        except BaseException:
            os.close(descriptor)
            raise
        return RealByteLocks(descriptor)

    @staticmethod
    def _lock_once(path: Path, shared: bool, is_noted: bool) -> int | None:
        """The locked descriptor; None if the name was removed before the lock was ours."""
        descriptor = os.open(path, _LOCK_FLAGS, FILE_MODE)
        try:
            ours = os.fstat(descriptor)
            _check_ours(ours, stat.S_ISREG, path)
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            if not os.path.lexists(path) or os.lstat(path).st_ino != ours.st_ino:
                os.close(descriptor)
                return None
            if is_noted:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            owner = os.pread(descriptor, MAX_PID_DIGITS, 0).decode("ascii", "replace")
            os.close(descriptor)
            raise InUseError(lock_message(path, owner)) from None
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def lock_message(path: Path, owner: str) -> str:
    """The sentence for a lock that another process holds."""
    return (
        f"{path.parent} is in use by process {owner or 'unknown'}; stop that process or choose "
        "another path or label"
    )


def _check_ours(found: os.stat_result, is_kind: object, path: Path) -> None:
    if not callable(is_kind) or not is_kind(found.st_mode):
        raise OSError(errno.EINVAL, "not the kind of file that was expected", str(path))
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    if found.st_mode & OTHERS_WRITE:
        raise PermissionError(errno.EPERM, "other users may write to it", str(path))


def _try_direct(descriptor: int) -> None:
    """Switch to direct transfers if the file system takes the flag and a probe succeeds."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT_FLAG)
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(descriptor, [page], 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
