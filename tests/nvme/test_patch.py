"""Small writes through a mapping: they land like others, and a file that was cut is no signal."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.memory_file_system import MemoryFileSystem

from kvcascade.tiers.nvme.disk.filesystem import File, RealFileSystem
from kvcascade.tiers.nvme.segments.format import SegmentLayout, SlotRecord
from kvcascade.tiers.nvme.segments.segment_files import SegmentSet

PAGE = 4096
WINDOW = (PAGE, 4 * PAGE)
LAYOUT = SegmentLayout(block_bytes=8192, slots=5, fingerprint="ab" * 32)
RECORD = SlotRecord(b"k" * 36, generation=9, checksum=5, length=8192, epoch=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.fixture
def file(path: Path) -> Iterator[File]:
    file = RealFileSystem().open(path, create=True)
    file.preallocate(sum(WINDOW))
    yield file
    file.close()


def test_what_is_written_is_read_by_every_way(file: File, path: Path) -> None:
    mapped = file.map(*WINDOW, writable=False)
    assert file.patch(b"first", PAGE + 100, WINDOW)
    assert file.patch(b"second", 3 * PAGE - 3, WINDOW), "over the end of a page"
    data = path.read_bytes()
    assert data[PAGE + 100 :][:5] == bytes(mapped[100:105]) == b"first"
    assert data[3 * PAGE - 3 :][:6] == b"second"
    assert sum(map(bool, data)) == len(b"firstsecond"), "nothing else changed"


def test_it_is_as_durable_as_other_writes(file: File, path: Path) -> None:
    assert file.patch(b"kept", PAGE, WINDOW)
    file.sync()
    with path.open("rb") as other:
        os.posix_fadvise(other.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert other.read()[PAGE:][:4] == b"kept"


@pytest.mark.parametrize("was_mapped", [True, False])
def test_a_file_that_was_cut_is_no_signal(file: File, was_mapped: bool) -> None:
    if was_mapped:
        assert file.patch(b"before", PAGE, WINDOW)
    file.truncate(PAGE)
    assert not file.patch(b"after", PAGE, WINDOW)
    assert not file.patch(b"after", 3 * PAGE, WINDOW)
    assert file.size() == PAGE


def test_threads_do_not_mix_their_bytes(file: File, path: Path) -> None:
    begin = threading.Barrier(4)

    def work(number: int) -> None:
        begin.wait(10)
        for place in range(64):
            assert file.patch(bytes([number + 1]) * 32, PAGE + (place * 4 + number) * 32, WINDOW)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    expected = b"".join(bytes([number + 1]) * 32 for number in range(4)) * 64
    assert path.read_bytes()[PAGE:][: len(expected)] == expected


def test_records_are_written_where_it_cannot_be_done(tmp_path: Path) -> None:
    fs = MemoryFileSystem()
    fs.make_dir(tmp_path)
    assert not fs.open(tmp_path / "other", create=True).patch(b"x", PAGE, WINDOW)
    segments = SegmentSet(fs, [tmp_path], LAYOUT)
    segments.create(0)
    segments.write_records(3, [RECORD.pack()])
    assert segments.record(3) == RECORD
    segments.close()


def test_records_are_written_past_a_segment_that_was_cut(tmp_path: Path) -> None:
    segments = SegmentSet(RealFileSystem(), [tmp_path], LAYOUT)
    segments.create(0)
    os.truncate(segments.path_of(0), PAGE)
    segments.write_records(3, [RECORD.pack()])
    assert segments.record(3) == RECORD
    segments.close()
