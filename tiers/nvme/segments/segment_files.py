"""Segment files of a namespace, as the writer of the path makes, repairs and deletes them.

A segment is slots of one block each, behind a header. Nodes read and write the slots
(`PayloadFiles`). No file stays open here, and any thread may call any method.

Durability: a segment's name is durable once `create` returns, its contents after `sync`. A segment
is never trusted: a damaged one is repaired at opening, and the checksums in the index show which
blocks survived.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path

from ....errors import os_errors
from ....logs import get_logger
from ..disk.filesystem import File, FileSystem
from ..disk.transfers import write_all
from .format import SegmentLayout, segment_name, segment_number

_log = get_logger(__name__)


class SegmentFiles:
    """All segments of a namespace; segment `i` lies in `folders[i % len(folders)]`."""

    def __init__(self, fs: FileSystem, folders: Sequence[Path], layout: SegmentLayout) -> None:
        """`folders` are the `segments` folders of the namespace, one per path of the tier."""
        self.layout = layout
        self._fs = fs
        self._folders = tuple(folders)

    def path_of(self, number: int) -> Path:
        """Return the path of a segment."""
        return self._folders[number % len(self._folders)] / segment_name(number)

    @property
    def has_folder(self) -> bool:
        """True if the first folder is there."""
        return self._fs.exists(self._folders[0])

    def found(self) -> list[int]:
        """Return the numbers of the existing segment files, ascending. Raises `TierIOError`."""
        with os_errors(f"listing {self._folders[0]}"):
            return sorted(chain.from_iterable(map(self._found_in, range(len(self._folders)))))

    def create(self, numbers: Sequence[int]) -> None:
        """Create segments of one folder with all their disk blocks, or none of them.

        Raises `NoSpaceError` or `TierIOError`. A device that fails may then keep files, which the
        next attempt makes whole.
        """
        made: list[Path] = []
        try:
            for number in numbers:
                path = self.path_of(number)
                with os_errors(f"creating {path}"):
                    self._create(path, number, made)
            folder = self.path_of(numbers[0]).parent
            with os_errors(f"creating files in {folder}"):
                self._fs.sync_dir(folder)
        except BaseException:
            for path in made:
                with suppress(OSError):  # it is mended by the next attempt
                    self._fs.unlink(path)
            raise

    def _create(self, path: Path, number: int, made: list[Path]) -> None:
        try:
            file = self._fs.open(path, create=True)
        except FileExistsError:  # a failed attempt could not remove it
            self.mend(number)
            return
        made.append(path)
        with closing(file):
            file.preallocate(self.layout.file_bytes)
            write_all(file, [memoryview(self.layout.header(number))], 0)

    def mend(self, number: int) -> None:
        """Repair size and header of an existing segment if needed. Raises a `KVCascadeError`."""
        path = self.path_of(number)
        with os_errors(f"opening {path}"), closing(self._fs.open(path)) as file:
            self._make_whole(file, number)

    def is_whole(self, number: int) -> bool:
        """Return False if a segment file is gone or cut though its folder is there.

        Without the folder the disk is not mounted. Raises `OSError`.
        """
        path = self.path_of(number)
        try:
            file = self._fs.open(path)
        except FileNotFoundError:
            return path.name in self._fs.list_dir(path.parent)
        with closing(file):
            return file.size() >= self.layout.file_bytes

    def remove(self, number: int) -> None:
        """Delete a segment file, if it is there. Raises a `KVCascadeError`."""
        with os_errors(f"removing {self.path_of(number)}"), suppress(FileNotFoundError):
            self._fs.unlink(self.path_of(number))

    def sync(self, number: int) -> None:
        """Make durable what nodes wrote to a segment. Raises `OSError`."""
        with closing(self._fs.open(self.path_of(number))) as file:
            file.sync()

    def _found_in(self, part: int) -> list[int]:
        numbers = map(segment_number, self._fs.list_dir(self._folders[part]))
        return [n for n in numbers if n is not None and n % len(self._folders) == part]

    def _make_whole(self, file: File, number: int) -> None:
        expected = self.layout.header(number)
        size = file.size()
        header = bytearray(min(size, len(expected)))
        if header:
            file.preadv([memoryview(header)], 0)
        if size == self.layout.file_bytes and header == expected:
            return
        _log.warning("segment %s was damaged; what it still holds is kept", self.path_of(number))
        if size > self.layout.file_bytes:
            file.truncate(self.layout.file_bytes)
        file.preallocate(self.layout.file_bytes)
        write_all(file, [memoryview(expected)], 0)
        file.sync()
