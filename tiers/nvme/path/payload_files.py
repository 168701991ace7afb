"""Payload of the segments of a namespace, as a node reads and writes it.

The writer of the path creates and deletes the files. A node opens a file at its first use. A run of
slots never crosses a segment. Methods raise `OSError`. Any thread may call any method.

A file that the writer deletes is dropped (`forget`). It is closed when its last transfer has ended,
because a descriptor that is closed earlier might name another file during that transfer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..disk.filesystem import File, FileSystem
from ..disk.transfers import read_all, write_all
from ..segments.format import SegmentLayout, segment_name
from ..segments.segment_files import MAX_BUFFERS_PER_CALL, MAX_BYTES_PER_CALL


class PayloadFiles:
    """Open segment files of a namespace; segment `i` lies in `folders[i % len(folders)]`."""

    def __init__(self, fs: FileSystem, folders: Sequence[Path], layout: SegmentLayout) -> None:
        """`folders` are the `segments` folders of the namespace, one per path of the tier."""
        self.layout = layout
        self._fs = fs
        self._folders = tuple(folders)
        self._header_bytes = layout.header_bytes
        self._lock = threading.Lock()
        self._files: dict[int, File] = {}

    def runs(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Group positions of an ascending slot list into runs of adjacent slots in one segment.

        Each run is the pair (begin, end) of positions.
        """
        found: list[tuple[int, int]] = []
        begin, per_segment = 0, self.layout.slots
        for i in range(1, len(slots) + 1):
            is_next = i < len(slots) and slots[i] == slots[i - 1] + 1
            if not is_next or slots[i] % per_segment == 0:
                found.append((begin, i))
                begin = i
        return found

    def read_run(self, first_slot: int, buffers: Sequence[memoryview]) -> None:
        """Read whole adjacent slots from `first_slot` on into buffers of one block each."""
        file, offset = self._locate(first_slot, len(buffers))
        for part, position in self._calls(buffers, offset):
            read_all(file, part, position)

    def write_run(self, first_slot: int, buffers: Sequence[memoryview]) -> None:
        """Write whole adjacent slots from `first_slot` on from buffers of one block each."""
        file, offset = self._locate(first_slot, len(buffers))
        for part, position in self._calls(buffers, offset):
            write_all(file, part, position)

    def sync(self, slots: Iterable[int]) -> None:
        """Make everything that was written to the segments of these slots durable."""
        for number in sorted({slot // self.layout.slots for slot in slots}):
            self._file(number).sync()

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop the files of these segments; the next use opens them anew."""
        with self._lock:
            for number in numbers:
                self._files.pop(number, None)

    def forget_slot(self, slot: int) -> None:
        """Drop the file of the segment in which a slot lies."""
        self.forget([slot // self.layout.slots])

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
                path = self._folders[number % len(self._folders)] / segment_name(number)
                file = self._files[number] = self._fs.open(path, direct=True)
            return file

    def _locate(self, first_slot: int, count: int) -> tuple[File, int]:
        """Return the file of a run, and the offset at which the run begins in it."""
        number, index = divmod(first_slot, self.layout.slots)
        assert index + count <= self.layout.slots, "a run may not cross a segment"
        return self._file(number), self._header_bytes + index * self.layout.block_bytes

    def _calls(
        self, buffers: Sequence[memoryview], offset: int
    ) -> Iterator[tuple[Sequence[memoryview], int]]:
        size = self.layout.block_bytes
        step = max(1, min(MAX_BUFFERS_PER_CALL, MAX_BYTES_PER_CALL // size))
        for start in range(0, len(buffers), step):
            yield buffers[start : start + step], offset + start * size
