"""Recognize the folder that a process opened, so that it writes to no other one in its place.

If a share is unmounted, its folder is missing, or an empty one of the local disk is in its place.
`obstore` would create the folders above an object there, and nothing would evict from that disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from ..base import COUNTER_DIGITS

READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags for files of a share, where anybody may have left a link or a pipe."""
OTHER_FOLDER = "not the folder that was opened"
"""Words in the error of a folder that is missing, or another one than at the opening."""

_Seen = tuple[tuple[int, int], dict[str, tuple[str, bytes]]]


def folder_of_url(url: str) -> Path | None:
    """Return the folder of a `file://` URL; None for other URLs."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


class OpenedFolder:
    """A folder, and what this process or the one before it saw of it. Any thread.

    It is the same folder if device and inode are those of its opening. A share that is mounted
    again may have other numbers. So a folder that holds a counter which was read before is the same
    one, too. A counter begins at the wall-clock time, so no other folder has that file.
    """

    def __init__(self, path: Path) -> None:
        """Ask nothing of the file system."""
        self.path = path
        self._numbers: tuple[int, int] | None = None
        """Device and inode; None until the folder is opened."""
        self._counters: dict[str, tuple[str, bytes]] = {}
        """File of each counter as it was read last, and its content."""

    def note_opened(self) -> None:
        """Remember the folder that is there now. Raises `OSError` if there is none."""
        self._numbers = self._numbers_now()

    @property
    def is_known(self) -> bool:
        """True once it was opened, by this process or the one before it."""
        return self._numbers is not None

    def note_counter(self, counter: str, file: str, content: bytes = b"") -> None:
        """Remember a file of a counter that was read; `file` is relative to the folder."""
        self._counters[counter] = file, content

    def check(self) -> None:
        """Raise `OSError` unless this is the folder that was opened.

        An unmount between this check and a request can still send that one request to the local
        disk. The next request fails.
        """
        try:
            numbers = self._numbers_now()
        except (FileNotFoundError, NotADirectoryError):
            raise OSError(OTHER_FOLDER) from None
        if numbers == self._numbers:
            return
        if not any(self._holds(*each) for each in [*self._counters.values()]):
            raise OSError(OTHER_FOLDER)
        self._numbers = numbers

    def memory(self) -> bytes:
        """Return what was seen of the folder, for `resume` in the next process."""
        seen = self._numbers, dict(self._counters)
        return msgspec.msgpack.encode(seen) if self._numbers else b""

    def resume(self, memory: bytes) -> None:
        """Recognize the folder that an ended process opened."""
        self._numbers, self._counters = msgspec.msgpack.decode(memory, type=_Seen)

    def _numbers_now(self) -> tuple[int, int]:
        found = os.stat(f"{self.path}/")  # the slash lets an automounter mount the share
        return found.st_dev, found.st_ino

    def _holds(self, file: str, content: bytes) -> bool:
        try:
            opened = os.open(self.path / file, READ_FLAGS)
        except OSError:
            return False
        try:
            return os.read(opened, COUNTER_DIGITS + 1) == content
        except OSError:  # a folder, or a share that does not answer
            return False
        finally:
            os.close(opened)
