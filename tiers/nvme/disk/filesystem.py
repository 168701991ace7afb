"""The only access to the operating system for segment, state and description files.

`RealFileSystem` uses the machine's file system. `tests/support/memory_file_system.py` is a twin in
memory that fails on command. Both raise plain `OSError`; callers map it (`kvcascade.errors`).

Durability: contents are durable after `File.sync`, names after `FileSystem.sync_dir`. Threads:
several threads may use one `File` at once, as each transfer names its own offset.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar
from weakref import WeakSet

from ....errors import PROCESS_ERRNOS, InUseError, other_kind

PAGE_BYTES = 4096
BLOCK_UNIT_BYTES = 512
"""Unit in which the system counts the blocks of a file, whatever its file system."""
FILE_MODE = 0o600
DIR_MODE = 0o700
OTHERS_WRITE = 0o022
MAX_LOCK_TRIES = 8
LOCK_PAUSE_S = 0.01
"""Pause between two attempts to take a lock, in seconds."""
_TEMPORARY_SUFFIX = ".tmp"
_DIRECT_FLAG = getattr(os, "O_DIRECT", 0)
_syncfs = ctypes.CDLL(None, use_errno=True).syncfs
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
"""`FS_IOC_GETFLAGS` and `FS_IOC_SETFLAGS` of linux/fs.h."""
_COMPRESSED, _IN_PLACE = 0x4, 0x800000
"""`FS_COMPR_FL` and `FS_NOCOW_FL` (`chattr +C`), which exclude each other."""
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class File(ABC):
    """An open regular file that belongs to this user."""

    @abstractmethod
    def preadv(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into the buffers from `offset`. Return the bytes moved, which may be fewer."""

    @abstractmethod
    def pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Write the buffers at `offset`. Return the bytes moved, which may be fewer."""

    @abstractmethod
    def preallocate(self, size: int) -> None:
        """Allocate disk space for the first `size` bytes and extend the file to at least that
        size.

        No free space is needed if the file has all of it.
        """

    @abstractmethod
    def truncate(self, size: int) -> None:
        """Cut the file, or extend it with a hole, to exactly `size` bytes."""

    @abstractmethod
    def sync(self) -> None:
        """Make the contents durable, mapped writes included (`fdatasync`)."""

    @abstractmethod
    def size(self) -> int:
        """Return the length in bytes."""

    @abstractmethod
    def map(self, length: int, *, writable: bool) -> memoryview:
        """Return a shared mapping of the first bytes, which outlives `close`."""

    @abstractmethod
    def close(self) -> None:
        """Close the descriptor; idempotent."""


class FileLock(ABC):
    """A file lock that is held until `release` or until the process ends."""

    @abstractmethod
    def release(self) -> None:
        """Release the lock; idempotent."""

    @abstractmethod
    def is_in_place(self) -> bool:
        """Return True if the lock is held and its name still leads to the locked file."""


class FileSystem(ABC):
    """Operations on names, and access to the files behind them. All paths are absolute."""

    @abstractmethod
    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> File:
        """Open a file for reading and writing. With `create` the name must be new; its mode is
        0600.

        `direct` requests transfers that bypass the page cache, where the file system supports them.
        Symbolic links, files of other users and anything but a regular file are refused. On a
        read-only disk an existing file can be read; methods that change it raise `EROFS`.
        """

    @abstractmethod
    def make_dir(self, path: Path) -> None:
        """Create one directory with mode 0700; no error if it exists and belongs to this user.

        Files that are made in it later are written in place where the file system has a choice.
        """

    @abstractmethod
    def check_dir(self, path: Path) -> None:
        """Raise `OSError` unless `path` is a directory of this user and no symbolic link."""

    @abstractmethod
    def list_dir(self, path: Path) -> list[str]:
        """Return the names in a directory, sorted."""

    @abstractmethod
    def exists(self, path: Path) -> bool:
        """Return True if the name exists, whatever kind of file it is."""

    @abstractmethod
    def is_same(self, path: Path, other: Path) -> bool:
        """Return True if both names lead to one file or directory, also through links and mounts.

        It is False if one of them does not exist or cannot be looked at.
        """

    @abstractmethod
    def unlink(self, path: Path) -> None:
        """Remove a file name."""

    @abstractmethod
    def remove_tree(self, path: Path) -> None:
        """Remove a directory and its contents without following links.

        Another process may be removing it at the same time: missing files are no error.
        """

    @abstractmethod
    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or a directory atomically. A file replaces an existing file of that
        name."""

    @abstractmethod
    def sync_dir(self, path: Path) -> None:
        """Make the names in a directory durable."""

    @abstractmethod
    def sync_all(self, path: Path) -> None:
        """Make all files of the file system of a directory durable, mapped ones included."""

    @abstractmethod
    def free_bytes(self, path: Path) -> int:
        """Return the bytes on this device that an ordinary user may still write."""

    @abstractmethod
    def used_bytes(self, path: Path) -> int:
        """Return the bytes on disk of a file, or of a directory and everything below it.

        What the file system itself needs for them does not count.
        """

    @abstractmethod
    def modified_at(self, path: Path) -> float:
        """Return the time of the last change, in seconds of the wall clock."""

    @abstractmethod
    def touch(self, path: Path) -> None:
        """Set the time of the last change of an existing file to now."""

    @abstractmethod
    def lock(self, path: Path, *, shared: bool = False, wait_s: float = 0.0) -> FileLock:
        """Lock the file `path`, exclusively or `shared` with others; create it if it is missing.

        Raises `InUseError` if the lock is not free within `wait_s` seconds.
        """

    def read(self, path: Path, limit: int) -> bytes:
        """Return the contents of a small file. Raises `OSError` (EOVERFLOW) if it exceeds `limit`
        bytes."""
        file = self.open(path)
        try:
            size = file.size()
            if size > limit:
                raise OSError(errno.EOVERFLOW, f"longer than {limit} bytes", str(path))
            data = bytearray(size)
            moved = file.preadv([memoryview(data)], 0) if size else 0
            return bytes(data[:moved])
        finally:
            file.close()

    def replace(self, path: Path, data: bytes) -> None:
        """Write a small file durably, so that it exists completely or not at all."""
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
    """A file of the operating system, behind a descriptor."""

    def __init__(self, descriptor: int, *, is_read_only: bool = False) -> None:
        """`is_read_only`: the disk takes no changes."""
        self._fd = descriptor
        self._is_read_only = is_read_only

    def preadv(self, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            return os.preadv(self._fd, buffers, offset)
        except OSError as error:
            self._leave_direct_mode(error)
        return os.preadv(self._fd, buffers, offset)

    def pwritev(self, buffers: Sequence[memoryview], offset: int) -> int:
        self._check_writable()
        try:
            return os.pwritev(self._fd, buffers, offset)
        except OSError as error:
            self._leave_direct_mode(error)
        return os.pwritev(self._fd, buffers, offset)

    def preallocate(self, size: int) -> None:
        self._check_writable()
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            # XFS wants free space and quota for the whole range, even if nothing is missing.
            found = os.fstat(self._fd)
            is_whole = found.st_size >= size and found.st_blocks * BLOCK_UNIT_BYTES >= size
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not is_whole:
                raise

    def truncate(self, size: int) -> None:
        self._check_writable()
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        self._check_writable()
        os.fdatasync(self._fd)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def map(self, length: int, *, writable: bool) -> memoryview:
        if writable:
            self._check_writable()
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        try:
            return memoryview(mmap.mmap(self._fd, length, access=access))
        except ValueError as error:  # another program cut the file since its size was read
            raise OSError(errno.EINVAL, str(error)) from None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def _check_writable(self) -> None:
        if self._is_read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def _leave_direct_mode(self, error: OSError) -> None:
        """Fall back to the page cache if a buffer lacks the alignment that direct I/O needs.

        Another thread may have done so already. Any other invalid call fails again.
        """
        if error.errno != errno.EINVAL:
            raise error
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~_DIRECT_FLAG)


class RealFileLock(FileLock):
    """An `flock`, which the kernel releases when the process dies, however it dies.

    A forked process keeps no lock, since the kernel would keep it as long as that process lives.
    """

    _open: ClassVar[WeakSet[RealFileLock]] = WeakSet()

    def __init__(self, descriptor: int, path: Path) -> None:
        self._fd = descriptor
        self._path = path
        self._open.add(self)

    def is_in_place(self) -> bool:
        try:
            return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), os.lstat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):  # a process may have been forked while the lock was taken
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

    @classmethod
    def leave_to_parent(cls) -> None:
        """Close the descriptors of all locks in a forked process; its parent keeps the locks."""
        for lock in list(cls._open):
            if lock._fd >= 0:
                os.close(lock._fd)
                lock._fd = -1


os.register_at_fork(after_in_child=RealFileLock.leave_to_parent)


class RealFileSystem(FileSystem):
    """The machine's file system. With `direct` False, all I/O goes through the page cache."""

    def __init__(self, direct: bool = True) -> None:
        self._direct = direct

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> File:
        is_read_only = False
        try:
            new = os.O_CREAT | os.O_EXCL if create else 0
            descriptor = _open(path, os.O_RDWR | new | _OPEN_FLAGS)
        except OSError as error:
            if create or error.errno != errno.EROFS:
                raise
            is_read_only = True
            descriptor = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
        try:
            _check_ours(os.fstat(descriptor), stat.S_ISREG, path)
            if direct and self._direct:
                _try_direct(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return RealFile(descriptor, is_read_only=is_read_only)

    def make_dir(self, path: Path) -> None:
        try:
            os.mkdir(path, DIR_MODE)
        except FileExistsError:
            self.check_dir(path)
        _write_in_place(path)

    def check_dir(self, path: Path) -> None:
        _check_ours(os.lstat(path), stat.S_ISDIR, path)

    def list_dir(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    def is_same(self, path: Path, other: Path) -> bool:
        try:
            return os.path.samefile(path, other)
        except (OSError, ValueError):  # ValueError: a name with a null byte
            return False

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

    def sync_all(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _syncfs(descriptor):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), str(path))
        finally:
            os.close(descriptor)

    def free_bytes(self, path: Path) -> int:
        figures = os.statvfs(path)
        return figures.f_bavail * figures.f_frsize

    def used_bytes(self, path: Path) -> int:
        if not os.path.isdir(path):
            return _bytes_on_disk(path)
        total = 0
        for parent, _, files in os.walk(path, onerror=_raise_if_lacking):
            for name in files:
                try:
                    total += _bytes_on_disk(os.path.join(parent, name))
                except FileNotFoundError:  # removed in the meantime by its owner
                    continue
        return total

    def modified_at(self, path: Path) -> float:
        return os.lstat(path).st_mtime

    def touch(self, path: Path) -> None:
        os.utime(path, follow_symlinks=False)

    def lock(self, path: Path, *, shared: bool = False, wait_s: float = 0.0) -> FileLock:
        tries_left = max(MAX_LOCK_TRIES, round(wait_s / LOCK_PAUSE_S))
        while True:
            tries_left -= 1
            try:
                descriptor = self._lock_once(path, shared)
            except InUseError:
                if wait_s <= 0 or tries_left <= 0:
                    raise
                time.sleep(LOCK_PAUSE_S)
                continue
            if descriptor is not None:
                return RealFileLock(descriptor, path)
            if tries_left <= 0:
                raise InUseError(lock_message(path))

    @staticmethod
    def _lock_once(path: Path, shared: bool) -> int | None:
        """Return the locked descriptor, or None if the name was removed before the lock was
        taken."""
        descriptor = _open(path, _LOCK_FLAGS)
        try:
            ours = os.fstat(descriptor)
            _check_ours(ours, stat.S_ISREG, path)
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            if not os.path.lexists(path) or os.lstat(path).st_ino != ours.st_ino:
                os.close(descriptor)
                return None
        except BlockingIOError:
            os.close(descriptor)
            raise InUseError(lock_message(path)) from None
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def lock_message(path: Path) -> str:
    """Return the error message for a lock that another process holds."""
    return (
        f"{path.parent} is in use by another process; stop that process or choose another path or "
        "label"
    )


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, FILE_MODE)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ENXIO):  # a folder or a socket
            raise other_kind(path) from None
        raise


def _check_ours(found: os.stat_result, is_kind: Callable[[int], bool], path: Path) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if not is_kind(found.st_mode):
        raise other_kind(path)
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    if found.st_mode & OTHERS_WRITE:
        raise PermissionError(errno.EPERM, "other users may write to it", str(path))


def _raise_if_lacking(error: OSError) -> None:
    """Raise the error if the process lacks descriptors or memory. Its files would count nothing."""
    if error.errno in PROCESS_ERRNOS:
        raise error


def _bytes_on_disk(path: str | Path) -> int:
    """Return the bytes on disk of a file. `st_blocks` of ext4 has the lists of its extents, too."""
    found = os.lstat(path)
    whole_pages = -(-found.st_size // PAGE_BYTES) * PAGE_BYTES
    return min(found.st_blocks * BLOCK_UNIT_BYTES, whole_pages)


def _write_in_place(folder: Path) -> None:
    """Let btrfs write new files of a folder in place. Other file systems refuse or do so anyway.

    A copy of a page needs free space. Without any, a write to a mapped page ends the process.
    """
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            flags = array("I", (0, 0))  # the kernel fills the first, a FUSE server may fill both
            fcntl.ioctl(descriptor, _GET_FLAGS, flags)
            if not flags[0] & _IN_PLACE:
                flags[0] = flags[0] & ~_COMPRESSED | _IN_PLACE
                fcntl.ioctl(descriptor, _SET_FLAGS, flags)
        finally:
            os.close(descriptor)


def _try_direct(descriptor: int) -> None:
    """Switch to direct transfers if the file system accepts the flag and a probe succeeds."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT_FLAG)
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(descriptor, [page], 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
