"""Payload of the segments of a namespace, as a node reads and writes it.

The writer of the path creates and deletes the files. A node opens a file at its first use. A run of
slots never crosses a segment. Methods raise `OSError`. Any thread may call any method.

A process has a limit of descriptors, so only some files of a namespace stay open: the next one
replaces the one that was opened first. A file that the writer deletes is dropped, too (`forget`).

No method here closes a file. A dropped file is closed with its last reference, and each transfer
holds one. A descriptor that is closed earlier might name another file during that transfer.
"""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..disk.filesystem import File, FileSystem
from ..disk.transfers import DIRECT, Transfers, vectored
from ..segments.format import SegmentLayout, segment_name

DESCRIPTOR_SHARE = 4
"""One of so many descriptors of the process may be an open segment of a namespace. A process that
has several namespaces open has a share for each of them."""


class PayloadFiles:
    """Open segment files of a namespace; segment `i` lies in `folders[i % len(folders)]`."""

    def __init__(
        self,
        fs: FileSystem,
        folders: Sequence[Path],
        layout: SegmentLayout,
        max_open: int | None = None,
        transfers: Transfers = DIRECT,
    ) -> None:
        """`folders` are the `segments` folders of the namespace, one per path of the tier.

        At most `max_open` files stay open; None: a share of the descriptors of this process.
        """
        self.layout = layout
        self._fs = fs
        self._folders = tuple(folders)
        self._header_bytes = layout.header_bytes
        self._transfers = transfers
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_open = max_open or max(1, descriptors // DESCRIPTOR_SHARE)
        self._lock = threading.Lock()
        self._files: dict[int, File] = {}

    def read_run(self, first_slot: int, buffers: Sequence[memoryview]) -> None:
        """Read whole adjacent slots from `first_slot` on into buffers of one block each."""
        file, offset = self._locate(first_slot, len(buffers))
        for part, position in vectored(buffers, offset, self.layout.block_bytes):
            self._transfers.read(file, part, position)

    def write_run(self, first_slot: int, buffers: Sequence[memoryview]) -> None:
        """Write whole adjacent slots from `first_slot` on from buffers of one block each."""
        file, offset = self._locate(first_slot, len(buffers))
        try:
            for part, position in vectored(buffers, offset, self.layout.block_bytes):
                self._transfers.write(file, part, position)
        except OSError as error:
            if error.errno == errno.EROFS:  # a file that is opened then is never written to
                self.forget_slot(first_slot)
            raise

    def sync(self, slot: int) -> None:
        """Make everything that was written to the segment of a slot durable."""
        self._file(slot // self.layout.slots).sync()

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop the files of these segments; the next use opens them anew."""
        with self._lock:
            for number in numbers:
                self._files.pop(number, None)

    def forget_slot(self, slot: int) -> None:
        """Drop the file of the segment in which a slot lies."""
        self.forget([slot // self.layout.slots])

    def path_of(self, slot: int) -> Path:
        """Return the file in which a slot lies."""
        return self._path(slot // self.layout.slots)

    def has_folder(self, number: int) -> bool:
        """Return True if the folder of a segment can be read: the disk is mounted."""
        try:
            self._fs.list_dir(self._folders[number % len(self._folders)])
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Drop every file; idempotent."""
        with self._lock:
            self._files.clear()

    def _file(self, number: int) -> File:
        file = self._files.get(number)
        if file is not None:
            return file
        with self._lock:
            file = self._files.get(number)
            if file is None:
                file = self._fs.open(self._path(number), direct=True)
                if len(self._files) >= self._max_open:
                    del self._files[next(iter(self._files))]
                self._files[number] = file
            return file

    def _path(self, number: int) -> Path:
        return self._folders[number % len(self._folders)] / segment_name(number)

    def _locate(self, first_slot: int, count: int) -> tuple[File, int]:
        """Return the file of a run, and the offset at which the run begins in it."""
        number, index = divmod(first_slot, self.layout.slots)
        assert index + count <= self.layout.slots, "a run may not cross a segment"
        return self._file(number), self._header_bytes + index * self.layout.block_bytes
