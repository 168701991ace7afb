"""Segment files: blocks in slots, each slot with a record of its block.

`BlockStore` moves bytes through here on I/O threads. The manager's thread reads slot records
through a shared mapping. A run of slots never crosses a segment. Methods raise `OSError`.

The open segments belong to this process. Blocks in all others can be read; such a file is opened
for the first read.

Durability: nothing is durable before `sync`. A segment is never trusted. A damaged file is repaired
at opening, and the checksums in the index show which blocks survived.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ....errors import os_errors
from ....logs import get_logger
from ..disk.filesystem import File, FileSystem, View
from ..disk.mapped_copy import PAGE_BYTES
from ..disk.transfers import read_all, vectored, write_all
from .format import (
    RECORD_GENERATION,
    SLOT_RECORD_BYTES,
    SegmentLayout,
    SlotRecord,
    parse_record,
    segment_name,
    segment_number,
)

RECORDS_PER_PAGE = PAGE_BYTES // SLOT_RECORD_BYTES
MAX_CACHED_PAGES = 256
"""Largest number of cached pages."""

Claim = Callable[[int, int], AbstractContextManager[None]]
"""`claim(part, bytes)`: disk space is taken inside this context. Raises `NoSpaceError` if there is
none."""

_log = get_logger(__name__)


class MissingSegmentError(OSError):
    """Raised if a segment of another process no longer exists, nor its blocks."""


@dataclass(frozen=True, slots=True)
class Segment:
    """An open segment file."""

    number: int
    path: Path
    payload: File
    records: File
    view: View
    """Reads the slot records through a mapping."""

    def close(self) -> None:
        """Close the files. The view lives as long as it is referenced."""
        self.payload.close()
        self.records.close()


class SegmentSet:
    """All segments of a namespace; segment `i` lies in `folders[i % len(folders)]`.

    Any thread may transfer. Only one thread at a time may open, create or close.
    """

    def __init__(
        self,
        fs: FileSystem,
        folders: Sequence[Path],
        layout: SegmentLayout,
        claim: Claim = lambda part, growth: nullcontext(),
    ) -> None:
        self.layout = layout
        self.repaired = 0
        """Number of segments whose size or header was repaired."""
        self.unusable: set[int] = set()
        """Segments that exist but could not be opened."""
        self._fs = fs
        self._claim = claim
        self._folders = tuple(folders)
        self._header_bytes = layout.header_bytes
        self._records_window = (layout.records_offset, layout.slots * SLOT_RECORD_BYTES)
        self._open: dict[int, Segment] = {}
        self._foreign: dict[int, File] = {}
        self._foreign_lock = threading.Lock()
        self._unreadable: set[tuple[int, int]] = set()
        self._has_warned = False

    @property
    def numbers(self) -> list[int]:
        """Numbers of the open segments, ascending."""
        return sorted(self._open)

    @property
    def count(self) -> int:
        """Number of open segments."""
        return len(self._open)

    def is_own(self, slot: int) -> bool:
        """Return True if the slot lies in a segment of this process."""
        return slot // self.layout.slots in self._open

    def path_of(self, number: int) -> Path:
        """Return the path of a segment."""
        folder = self._folders[number % len(self._folders)]
        return folder / segment_name(number)

    def found(self) -> list[int]:
        """Return the numbers of the existing segment files, ascending."""
        return sorted(chain.from_iterable(map(self.found_in, range(len(self._folders)))))

    def found_in(self, part: int) -> list[int]:
        """Return the numbers of the segment files in one of the folders, in any order."""
        numbers = map(segment_number, self._fs.list_dir(self._folders[part]))
        return [n for n in numbers if n is not None and n % len(self._folders) == part]

    def create(self, number: int) -> None:
        """Create a segment with all its disk blocks. Raises `NoSpaceError` or `TierIOError`.

        Its name is durable at once. Its header becomes durable with the first block; `open`
        restores a lost one.
        """
        path = self.path_of(number)
        with os_errors(f"creating {path}"):
            file = self._fs.open(path, create=True)
            try:
                file.preallocate(self.layout.file_bytes)
                write_all(file, [memoryview(self.layout.header(number))], 0)
                self._fs.sync_dir(path.parent)
            except BaseException:
                file.close()
                self._fs.unlink(path)
                raise
            file.close()
            self._open[number] = self._open_files(number, path)

    def open(self, number: int) -> None:
        """Open an existing segment, and repair it if needed.

        Raises a `KVCascadeError`; the segment is then `unusable`.
        """
        self.unusable.add(number)
        self.mend(number)
        path = self.path_of(number)
        with os_errors(f"opening {path}"):
            self._open[number] = self._open_files(number, path)
        self.unusable.discard(number)

    def mend(self, number: int) -> None:
        """Repair size and header of an existing segment if needed. Raises a `KVCascadeError`."""
        path = self.path_of(number)
        with os_errors(f"opening {path}"):
            file = self._fs.open(path)
            try:
                self._make_whole(file, number)
            finally:
                file.close()

    def let_go(self, number: int) -> None:
        """Close a segment, which another process may take. No transfer may be in flight."""
        segment = self._open.pop(number, None)
        if segment is not None:
            segment.close()

    def reopen_at_next_read(self, slot: int) -> None:
        """Reopen a foreign segment at its next read: its file may have been replaced."""
        with self._foreign_lock:
            self._foreign.pop(slot // self.layout.slots, None)  # closed once no read uses it

    def remove(self, number: int) -> None:
        """Delete a segment file, open or not."""
        self.let_go(number)
        with os_errors(f"removing {self.path_of(number)}"):
            self._fs.unlink(self.path_of(number))

    def write_run(self, first_slot: int, buffers: Sequence[memoryview]) -> None:
        """Write whole adjacent slots from `first_slot` on."""
        number, offset = self._locate(first_slot, len(buffers))
        payload = self._segment(number).payload
        for part, position in vectored(buffers, offset, self.layout.block_bytes):
            write_all(payload, part, position)

    def write_records(self, first_slot: int, records: Sequence[bytes]) -> None:
        """Write the records of adjacent slots."""
        number, index = divmod(first_slot, self.layout.slots)
        offset = self.layout.records_offset + index * SLOT_RECORD_BYTES
        file, data = self._segment(number).records, b"".join(records)
        if not file.patch(data, offset, self._records_window):
            write_all(file, [memoryview(data)], offset)

    def read_run(self, first_slot: int, buffers: Sequence[memoryview]) -> None:
        """Read whole adjacent slots from `first_slot` on into the buffers."""
        number, offset = self._locate(first_slot, len(buffers))
        segment = self._open.get(number)
        payload = self._foreign_file(number) if segment is None else segment.payload
        for part, position in vectored(buffers, offset, self.layout.block_bytes):
            read_all(payload, part, position)

    def sync(self, number: int) -> None:
        """Make everything written to a segment durable."""
        self._segment(number).payload.sync()

    def sync_unopened(self, number: int) -> None:
        """Make durable what other processes wrote to a segment. Raises `OSError`."""
        file = self._fs.open(self.path_of(number))
        try:
            file.sync()
        finally:
            file.close()

    def record(self, slot: int) -> SlotRecord | None:
        """Return the record of a slot, read through the mapping; None if unwritten, damaged or
        unreadable."""
        number, index = divmod(slot, self.layout.slots)
        data = self._look(number, index, 1)
        return None if data is None else parse_record(data)

    def record_page(self, slot: int) -> bytes | None:
        """Return the records from this slot to the end of its page; None if the page cannot be
        read."""
        number, index = divmod(slot, self.layout.slots)
        in_page = RECORDS_PER_PAGE - index % RECORDS_PER_PAGE
        return self._look(number, index, min(in_page, self.layout.slots - index))

    def records(self, number: int) -> Iterator[tuple[int, SlotRecord]]:
        """Yield (slot, record) of all slots of an open segment with a valid record."""
        first = number * self.layout.slots
        for index, page in self._record_pages(number):
            for place in range(0, len(page), SLOT_RECORD_BYTES):
                record = parse_record(page[place : place + SLOT_RECORD_BYTES])
                if record is not None:
                    yield first + index + place // SLOT_RECORD_BYTES, record

    def generations(self, number: int) -> npt.NDArray[np.uint64] | None:
        """Return the generations in the slot records of a segment, unchecked; None if it is not
        open.

        The generation is 0 where a page cannot be read.
        """
        if number not in self._open:
            return None
        found = np.zeros(self.layout.slots, dtype=np.uint64)
        for index, page in self._record_pages(number):
            records = np.frombuffer(page, dtype=np.uint8).reshape(-1, SLOT_RECORD_BYTES)
            fields = np.ascontiguousarray(records[:, RECORD_GENERATION])
            found[index : index + len(records)] = fields.view("<u8").ravel()
        return found

    def page_of(self, slot: int) -> tuple[int, int]:
        """Return the page in which the record of a slot lies; records of one page fail together."""
        number, index = divmod(slot, self.layout.slots)
        return number, index // RECORDS_PER_PAGE

    def look_again(self) -> None:
        """Allow pages of records that could not be read to be read again."""
        self._unreadable.clear()

    def close(self) -> None:
        """Close every file; idempotent."""
        for segment in self._open.values():
            segment.close()
        self._open.clear()
        for file in self._foreign.values():
            file.close()
        self._foreign.clear()

    def _record_pages(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yield (index in the segment, records from there on) of every page that can be read."""
        for index in range(0, self.layout.slots, RECORDS_PER_PAGE):
            page = self.record_page(number * self.layout.slots + index)
            if page is not None:
                yield index, page

    def _look(self, number: int, index: int, count: int) -> bytes | None:
        """Return records of one page; None if it cannot be read, or could not be read before.

        A failed page is not retried, because a failing device is slow and the manager's thread
        waits.
        """
        segment = self._open.get(number)
        page = number, index // RECORDS_PER_PAGE
        if segment is None or (self._unreadable and page in self._unreadable):
            return None
        try:
            return segment.view(index * SLOT_RECORD_BYTES, count * SLOT_RECORD_BYTES)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("%s: records of slots cannot be read (%s)", segment.path, error)
            self._unreadable.add(page)
            return None

    def _foreign_file(self, number: int) -> File:
        with self._foreign_lock:
            file = self._foreign.get(number)
            if file is None:
                path = self.path_of(number)
                if not self._fs.exists(path) and self._fs.exists(path.parent):
                    raise MissingSegmentError(errno.ENOENT, "the segment is gone", str(path))
                file = self._foreign[number] = self._fs.open(path, direct=True)
            return file

    def _segment(self, number: int) -> Segment:
        segment = self._open.get(number)
        if segment is None:
            raise OSError(errno.ENOENT, "the segment is not there", str(self.path_of(number)))
        return segment

    def _locate(self, first_slot: int, count: int) -> tuple[int, int]:
        """Return the segment of a run, and the offset at which the run begins in its file."""
        number, index = divmod(first_slot, self.layout.slots)
        assert index + count <= self.layout.slots, "a run may not cross a segment"
        return number, self._header_bytes + index * self.layout.block_bytes

    def _open_files(self, number: int, path: Path) -> Segment:
        payload = self._fs.open(path, direct=True)
        records = self._fs.open(path)
        return Segment(number, path, payload, records, records.view(*self._records_window))

    def _make_whole(self, file: File, number: int) -> None:
        expected = self.layout.header(number)
        size = file.size()
        header = bytearray(min(size, len(expected)))
        if header:
            file.preadv([memoryview(header)], 0)
        if size == self.layout.file_bytes and header == expected:
            return
        self.repaired += 1
        _log.warning("segment %s was damaged; what it still holds is kept", self.path_of(number))
        if size > self.layout.file_bytes:
            file.truncate(self.layout.file_bytes)
        missing = self.layout.file_bytes - self._fs.used_bytes(self.path_of(number))
        part = number % len(self._folders)
        with self._claim(part, missing) if missing > 0 else nullcontext():
            file.preallocate(self.layout.file_bytes)
        write_all(file, [memoryview(expected)], 0)
        file.sync()


class RecordPages:
    """Cache of slot records for the manager's thread, by the page.

    Victims mostly lie side by side. The first record of a page is read alone, all others with the
    second request. A page is cached until `forget`, and may be outdated by then. One thread only,
    except for `forget`.
    """

    def __init__(self, segments: SegmentSet) -> None:
        self._segments = segments
        self._slots_per_segment = segments.layout.slots
        self._pages: dict[int, bytes] = {}
        """Pages by their first slot; empty if one record was read, or if the page cannot be
        read."""

    def at(self, slot: int) -> SlotRecord | None:
        """Return the record of a slot; None if unwritten, damaged or unreadable."""
        place = slot % self._slots_per_segment % RECORDS_PER_PAGE
        first, pages = slot - place, self._pages
        page = pages.get(first)
        if page is None:
            if len(pages) >= MAX_CACHED_PAGES:
                pages.clear()
            pages[first] = b""
            return self._segments.record(slot)
        if not page:
            page = pages[first] = self._segments.record_page(first) or b""
        start = place * SLOT_RECORD_BYTES
        return parse_record(page[start : start + SLOT_RECORD_BYTES])

    def forget(self) -> None:
        """Drop the cache, so that later calls read again."""
        self._pages = {}  # replaced, not cleared: a read in progress fills the old one
