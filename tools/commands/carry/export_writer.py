"""The file of `kvcascade export` while it is written.

It is written under a temporary name and renamed when it is complete and durable. Memory grows with
the blocks, independently of the payload.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ....errors import InUseError
from ....tiers.cpu.locks import try_flock
from ....tiers.nvme.disk.filesystem import RealFile, RealFileSystem
from ....tiers.nvme.disk.transfers import write_all
from .carried import CarriedHead, SlotRecord

PARTIAL_SUFFIX = ".partial"
FILE_MODE = 0o600


@dataclass(frozen=True, slots=True)
class Choice:
    """Selection of the blocks to export; without any criterion, all blocks."""

    prompts: tuple[str, ...] = ()
    """Start of the hash (hex) of the last block of each prompt; all blocks before it are
    included."""
    prefixes: tuple[bytes, ...] = ()
    """Hash prefixes; blocks whose hash starts with one of them are included."""
    hot_bytes: int | None = None
    """Maximum payload in bytes; the most recently used blocks are included."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Result of an export; sizes in bytes."""

    namespace: str
    path: str
    blocks: int
    skipped: int
    """Number of chosen blocks that were damaged or gone when they were read."""
    missing: int
    """Number of blocks of the chosen prompts, and of hashes, that are not in the cache."""
    file_bytes: int


class ExportWriter:
    """Writes a row for each block that is put. `put` is thread-safe."""

    def __init__(
        self, file: RealFile, most: int, block_bytes: int, head_of: Callable[[int], CarriedHead]
    ) -> None:
        """Prepare `most` rows; `head_of` returns the head of a file with a number of blocks."""
        self._file = file
        self._block_bytes = block_bytes
        self._head_of = head_of
        self._rows = count()
        self._records: dict[int, bytes] = {}
        self._room = len(head_of(most).header())

    def put(self, record: SlotRecord, payload: memoryview) -> None:
        """Write a payload that has been verified."""
        row = next(self._rows)  # atomic
        write_all(self._file, [payload], self._offset(row))
        self._records[row] = record.pack()

    @property
    def blocks(self) -> int:
        """Number of rows that have been written."""
        return len(self._records)

    def finish(self) -> int:
        """Write records and header; return the size of the file."""
        records = b"".join(record for _, record in sorted(self._records.items()))
        end = self._offset(self.blocks)
        write_all(self._file, [memoryview(records)], end)
        header = self._head_of(self.blocks).header(self._room)
        assert len(header) == self._room, "the header only gets shorter"
        write_all(self._file, [memoryview(header)], 0)
        size = end + len(records)
        self._file.truncate(size)
        return size

    def _offset(self, row: int) -> int:
        return self._room + row * self._block_bytes


@contextmanager
def whole_or_nothing(path: Path) -> Iterator[RealFile]:
    """Yield a file that gets its final name when it is complete and durable.

    Raises `OSError`, or `InUseError` if another process writes it.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(partial, flags, FILE_MODE)
    file = RealFile(descriptor)
    try:
        is_free = try_flock(descriptor, exclusive=True)
    except OSError:  # a file system without locks
        is_free = True
    if not (is_free and _is_at(descriptor, partial)):
        file.close()
        raise InUseError(f"{path} is being written by another process; wait for it")
    try:
        file.truncate(0)
        yield file
        file.sync()
        os.replace(partial, path)
        RealFileSystem().sync_dir(path.absolute().parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        file.close()


def _is_at(descriptor: int, path: Path) -> bool:
    """Return True if an open file still has this name: another process may have completed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
