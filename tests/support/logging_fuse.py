"""A FUSE file system of disk images: every write, flush and mark is logged in order.

`python -m support.logging_fuse MOUNT LOG IMAGE...` is the process.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys
from typing import Any, BinaryIO

RECORD = struct.Struct("<cBQQ")
"""Kind, number of the disk, offset and length of an entry of the log. The bytes follow."""
WRITE, FLUSH, MARK = b"W", b"F", b"M"
MARK_FILE = "mark"
"""File whose writes are marks."""


class Logging:
    """One file for each disk, and one for marks."""

    def __init__(self, log: BinaryIO, images: list[str]) -> None:
        self._log = log
        self._names = [f"/{os.path.basename(image)}" for image in images]
        self._disks = [os.open(image, os.O_RDWR) for image in images]

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o700, "st_nlink": 2}
        if path != f"/{MARK_FILE}" and path not in self._names:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        size = 0 if path == f"/{MARK_FILE}" else os.fstat(self._disks[0]).st_size
        return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": size}

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(self._disks[self._names.index(path)], size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        if path == f"/{MARK_FILE}":
            self._note(MARK, 0, 0, data)
        else:
            disk = self._names.index(path)
            self._note(WRITE, disk, offset, data)
            os.pwrite(self._disks[disk], data, offset)
        return len(data)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        if path in self._names:
            self._note(FLUSH, self._names.index(path), 0, b"")
        return 0

    def _note(self, kind: bytes, disk: int, at: int, data: bytes) -> None:
        self._log.write(RECORD.pack(kind, disk, at, len(data)))
        self._log.write(data)


def main(mount: str, log: str, images: list[str]) -> None:
    """Serve until the file system is unmounted."""
    import mfusepy  # needs libfuse3, which not every machine has

    class Served(Logging, mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

    with open(log, "wb") as opened:
        mfusepy.FUSE(Served(opened, images), mount, foreground=True, nothreads=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
