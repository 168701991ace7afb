"""A path in memory, for the writer of a replay: files that take no disk, and a table of blocks.

Segment files have their full length and no contents, because no bytes of blocks are moved. Nothing
outlives the process. One thread.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ...tiers import endurance
from ...tiers.nvme.disk.filesystem import File, FileLock, FileSystem, RealFile
from ...tiers.nvme.path.block_table import Applied, Changes, Entry, ScanBatch
from ...tiers.nvme.path.path_messages import Committed
from ...tiers.nvme.path.presence_table import Journal, hash_of, hashes_of

BOUNDLESS_BYTES = 1 << 62
"""Size of the device: the capacity of the path is the only limit."""


class MemoryFile(RealFile):
    """A file without a name in the operating system. Its unwritten parts take no memory."""

    def another(self) -> MemoryFile:
        """Return a second opening of the file."""
        return MemoryFile(os.dup(self._fd))

    def preallocate(self, size: int) -> None:
        self.truncate(max(size, self.size()))

    def sync(self) -> None:
        """Do nothing: the file ends with the process."""


class HeldLock(FileLock):
    """A lock that nobody else wants."""

    def release(self) -> None:
        """Do nothing."""

    def is_in_place(self) -> bool:
        return True


class MemoryFiles(FileSystem):
    """Files in memory, one for each name. Directories are names without a file."""

    def __init__(self) -> None:
        self._names: dict[Path, MemoryFile | None] = {}

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> File:
        if create:
            self._names[path] = MemoryFile(os.memfd_create(path.name))
        file = self._names.get(path)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return file.another()

    def make_dir(self, path: Path) -> None:
        self._names[path] = None

    def check_dir(self, path: Path) -> None:
        """Do nothing: all directories are this process's own."""

    def list_dir(self, path: Path) -> list[str]:
        return sorted(name.name for name in self._names if name.parent == path)

    def exists(self, path: Path) -> bool:
        return path in self._names

    def is_same(self, path: Path, other: Path) -> bool:
        return path == other and path in self._names

    def unlink(self, path: Path) -> None:
        del self._names[path]

    def remove_tree(self, path: Path) -> None:
        for name in [each for each in self._names if each.is_relative_to(path)]:
            del self._names[name]

    def rename(self, source: Path, target: Path) -> None:
        self._names[target] = self._names.pop(source)

    def sync_dir(self, path: Path) -> None:
        """Do nothing: the names end with the process."""

    def sync_all(self, path: Path) -> None:
        """Do nothing: the files end with the process."""

    def free_bytes(self, path: Path) -> int:
        return BOUNDLESS_BYTES

    def used_bytes(self, path: Path) -> int:
        return 0

    def modified_at(self, path: Path) -> float:
        return 0.0

    def touch(self, path: Path) -> None:
        """Do nothing: there are no times."""

    def lock(self, path: Path, *, shared: bool = False, wait_s: float = 0.0) -> FileLock:
        return HeldLock()


class MemoryBlocks:
    """A `BlockTable` in dictionaries."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        """`wall_clock` returns seconds; only their differences count."""
        self.epoch = 0
        self.commit_number = 0
        self.totals = (0, 0)
        self.is_unusable = False
        self._wall_clock = wall_clock
        self._blocks: dict[bytes, Entry] = {}
        self._keys: dict[int, bytes] = {}
        """Key of the block in each slot."""
        self._day = b""
        self._last: Journal | None = None

    def count(self) -> int:
        return len(self._blocks)

    def get(self, key: bytes) -> Entry | None:
        return self._blocks.get(key)

    def get_many(self, keys: Sequence[bytes]) -> list[Entry | None]:
        return list(map(self._blocks.get, keys))

    def keys_after(self, key: bytes, limit: int) -> list[tuple[bytes, Entry]]:
        return sorted(pair for pair in self._blocks.items() if pair[0] > key)[:limit]

    def apply(self, changes: Changes) -> Applied:
        if changes.epoch != self.epoch:
            return Applied(Committed.STALE)
        blocks, keys = self._blocks, self._keys
        slots = [blocks[key].slot for key in changes.removals if key in blocks]
        removed = [self._drop(slot) for slot in (*slots, *changes.cleared) if slot in keys]
        already: set[int] = set()
        stored: list[tuple[int, int, int]] = []
        for position, (key, slot, checksum) in enumerate(changes.puts):
            if key in blocks:
                already.add(position)
                continue
            if slot in keys:
                removed.append(self._drop(slot))
            blocks[key], keys[slot] = Entry(slot, checksum), key
            stored.append((hash_of(key), slot, checksum))
        self._count(changes.written_bytes, changes.read_bytes)
        if not (removed or stored):
            return Applied(Committed.OK, frozenset(already))
        self.commit_number += 1
        gone = tuple((hash_of(key), slot) for key, slot in removed)
        self._last = Journal(self.commit_number, self.epoch, gone, tuple(stored))
        return Applied(Committed.OK, frozenset(already), tuple(removed), self._last)

    def reset(self, epoch: int) -> Applied:
        if epoch <= self.epoch:
            return Applied(Committed.STALE)
        self.epoch, self.commit_number = epoch, self.commit_number + 1
        self._blocks.clear()
        self._keys.clear()
        self._last = Journal(self.commit_number, epoch, is_reset=True)
        return Applied(Committed.OK, journal=self._last)

    def last_changes(self) -> Journal | None:
        return self._last

    def scan(self) -> Iterator[ScanBatch]:
        if self._blocks:
            entries = list(self._blocks.values())
            slots = np.array([entry.slot for entry in entries], dtype=np.int32)
            checksums = np.array([entry.checksum for entry in entries], dtype=np.uint64)
            yield ScanBatch(hashes_of(list(self._blocks)), slots, checksums)

    def day_totals(self) -> endurance.DayTotals:
        return endurance.day_totals(self._day, self._wall_clock())

    def day_record(self) -> bytes:
        return self._day

    def sync(self) -> None:
        """Do nothing: the table ends with the process."""

    def close(self) -> None:
        """Do nothing: the table ends with the process."""

    def abandon(self) -> None:
        """Do nothing: the table ends with the process."""

    def _drop(self, slot: int) -> tuple[bytes, int]:
        key = self._keys.pop(slot)
        del self._blocks[key]
        return key, slot

    def _count(self, written_bytes: int, read_bytes: int) -> None:
        if written_bytes or read_bytes:
            written, read = self.totals
            self.totals = written + written_bytes, read + read_bytes
            self._day = endurance.add(self._day, self._wall_clock(), written_bytes, read_bytes)
