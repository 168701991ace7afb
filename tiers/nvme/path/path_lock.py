"""Election of the writer of a path, and the socket through which nodes reach it.

Both lie in `.kvcascade/` in the first path. The writer is the process that holds a kernel lock on
`writer.lock`; the kernel drops it when the process ends, however it ends. The socket is bound and
reached through a descriptor of the folder. A socket's address has room for 107 bytes only, and
paths of volumes are longer.

An election says nothing about other hosts. If the lock is held and no process answers at the
socket, the holder may be on another host that shares the file system.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from contextlib import suppress
from pathlib import Path

from ....errors import ConfigError, InUseError, TierIOError, os_errors
from ..disk.filesystem import FileLock, FileSystem
from .writer.path_options import PATH_FOLDER

LOCK_NAME = "writer.lock"
SOCKET_NAME = "writer.sock"
ROOM_NAME = "writer.room"
"""File that gives its room to the socket if the disk has none."""
ROOM_BYTES = 512 << 10
"""XFS makes no socket with less than about 256 KiB of free space."""
BACKLOG = 64
"""Most connections that wait to be accepted."""
_XFS_MAGIC = 0x58465342
_STATFS_BYTES = 256
"""More than a `struct statfs` has."""
_fstatfs = ctypes.CDLL(None).fstatfs
_ROOM_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_DESCRIPTORS = Path("/proc/self/fd")
_NO_ANSWER = (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN)
_NO_SOCKETS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
"""Answers of file systems that keep no sockets, such as vfat and some network file systems."""


def try_lead(fs: FileSystem, root: Path) -> FileLock | None:
    """Become the writer of a path. Return None if another process is.

    The holder checks `FileLock.is_in_place` before it writes, and stops if it is False: the tier
    was unmounted or replaced, or another process may lead. Raises `ConfigError` if the path does
    not exist or belongs to another user, or `TierIOError`.
    """
    if not fs.exists(root):
        raise ConfigError(f"path {str(root)!r} does not exist; create it")
    try:
        return lock_path(fs, root)
    except TierIOError as error:
        if error.errno not in (errno.EPERM, errno.EACCES):
            raise
        folder = root / PATH_FOLDER
        found = folder if fs.exists(folder) else root
        raise ConfigError(
            f"{found} belongs to another user or may be written by others; run all engines that "
            "share a path as one user, with a path that this user may write; `chmod -R go-w` "
            "forbids others to write"
        ) from error


def lock_path(fs: FileSystem, root: Path) -> FileLock | None:
    """Become the writer of an existing path for a command. Return None if another process is.

    Raises `TierIOError`, also if the path belongs to another user.
    """
    folder = root / PATH_FOLDER
    try:
        with os_errors(f"locking {folder}"):
            fs.make_dir(folder)
            return fs.lock(folder / LOCK_NAME)
    except InUseError:
        return None


class PathDoor:
    """The folder of the writer's socket, open by descriptor. Any thread, one at a time."""

    def __init__(self, root: Path) -> None:
        """Open the folder in the first path. Raises `TierIOError`."""
        self._folder = root / PATH_FOLDER
        with os_errors(f"opening {self._folder}"):
            self._fd = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def listen(self) -> socket.socket:
        """Return the listening socket of the writer, in place of one that a dead writer left.

        The caller holds the lock. Raises `ConfigError` if the file system has no sockets, or
        `TierIOError`.
        """
        with os_errors(f"making {self._folder / SOCKET_NAME}"):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                with suppress(FileNotFoundError):
                    os.unlink(SOCKET_NAME, dir_fd=self._fd)
                self._bind_in_room(listener)
                os.chmod(SOCKET_NAME, 0o600, dir_fd=self._fd)
                listener.listen(BACKLOG)
                listener.setblocking(False)
            except BaseException:
                listener.close()
                raise
        return listener

    def connect(self) -> socket.socket | None:
        """Return a connection to the writer. None if nobody listens, or if `BACKLOG` others wait:
        the caller tries again later.

        Raises `TierIOError`.
        """
        doing = f"connecting to {self._folder / SOCKET_NAME}"
        with os_errors(doing):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.setblocking(False)
            link.connect(self._address())
        except OSError as error:
            link.close()
            if error.errno in _NO_ANSWER:
                return None
            with os_errors(doing):
                raise
        return link

    def is_in_place(self) -> bool:
        """Return True if the folder's name still leads to the folder that is open."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(self._folder))
        except OSError:
            return False

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _bind_in_room(self, listener: socket.socket) -> None:
        """Bind the socket; on a full XFS disk, in the room of a file that is kept for that."""
        try:
            self._bind(listener)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            with suppress(OSError):
                os.unlink(ROOM_NAME, dir_fd=self._fd)
            self._bind(listener)
        if not is_xfs(self._fd):
            return
        with suppress(OSError):
            room = os.open(ROOM_NAME, _ROOM_FLAGS, 0o600, dir_fd=self._fd)
            try:
                os.posix_fallocate(room, 0, ROOM_BYTES)
            finally:
                os.close(room)

    def _bind(self, listener: socket.socket) -> None:
        try:
            listener.bind(self._address())
        except OSError as error:
            if error.errno not in _NO_SOCKETS:
                raise
            raise ConfigError(
                f"the file system of {self._folder} has no sockets ({os.strerror(error.errno)}), "
                "through which engines share a path; use a path on a local file system"
            ) from error

    def _address(self) -> str:
        if os.path.isdir(_DESCRIPTORS):
            return f"{_DESCRIPTORS}/{self._fd}/{SOCKET_NAME}"
        return str(self._folder / SOCKET_NAME)  # no /proc: only short paths work


def is_xfs(descriptor: int) -> bool:
    """Return True if an open file or folder is on XFS; `f_type` is the first field (statfs(2))."""
    found = (ctypes.c_long * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_long)))()
    return _fstatfs(descriptor, found) == 0 and found[0] == _XFS_MAGIC
