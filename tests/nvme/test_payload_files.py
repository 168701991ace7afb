"""Open segment files of a namespace: how many, and what a transfer needs of them."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvcascade.tiers.nvme.disk.filesystem import FILE_MODE, File, RealFile, RealFileSystem
from kvcascade.tiers.nvme.path.payload_files import PayloadFiles
from kvcascade.tiers.nvme.segments.format import SegmentLayout, segment_name

BLOCK, SEGMENTS = 4096, 12
LAYOUT = SegmentLayout(BLOCK, 1, "ab" * 32)
THREADS, READS = 8, 400
LIMIT_S = 30.0


class HookedFile(RealFile):
    """A file that calls a function before each read."""

    def __init__(self, descriptor: int, before: Callable[[], None]) -> None:
        super().__init__(descriptor)
        self._before = before

    def preadv(self, buffers: Sequence[memoryview], offset: int) -> int:
        self._before()
        return super().preadv(buffers, offset)


class HookedFiles(RealFileSystem):
    """Files that call a function before each read."""

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()
        self._before = before

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> File:
        return HookedFile(os.open(path, os.O_RDWR, FILE_MODE), self._before)


def content(number: int) -> bytes:
    return bytes([number + 1]) * BLOCK


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with segments of one block each."""
    for number in range(SEGMENTS):
        payload = bytes(LAYOUT.header_bytes) + content(number)
        (tmp_path / segment_name(number)).write_bytes(payload)
        (tmp_path / segment_name(number)).chmod(FILE_MODE)
    return tmp_path


def read(files: PayloadFiles, number: int) -> bytes:
    """The block of a segment."""
    buffer = bytearray(BLOCK)
    files.read_run(number, [memoryview(buffer)])
    return bytes(buffer)


def open_in(folder: Path) -> int:
    """Number of descriptors of this process that lead into a folder."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    named = [os.readlink(link) for link in links if os.path.islink(link)]
    return sum(name.startswith(f"{folder}/") for name in named)


def test_no_more_than_the_limit_stay_open(folder: Path) -> None:
    files = PayloadFiles(RealFileSystem(), [folder], LAYOUT, max_open=3)
    for number in [*range(SEGMENTS), 0, 5, *range(SEGMENTS)]:
        assert read(files, number) == content(number)
        assert open_in(folder) <= 3
    (folder / segment_name(0)).unlink()
    with pytest.raises(FileNotFoundError):
        read(files, 0)
    assert open_in(folder) == 3, "one that cannot be opened replaces none"
    files.close()
    assert open_in(folder) == 0


def test_a_read_only_disk_is_read_and_written_again_once_it_takes_writes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment that an engine opened only then was not found, however sound it was."""
    files, real = PayloadFiles(RealFileSystem(), [folder], LAYOUT), os.open
    new = memoryview(b"new!" * (BLOCK // 4))

    def shut(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", shut)
    assert read(files, 0) == content(0)
    for _ in range(2):
        with pytest.raises(OSError, match="Read-only"):
            files.write_run(0, [new])
    assert read(files, 0) == content(0)
    with pytest.raises(OSError, match="Read-only"):
        files.sync(0)
    monkeypatch.setattr(os, "open", real)
    with pytest.raises(OSError, match="Read-only"):
        files.write_run(0, [new])
    files.write_run(0, [new])
    assert read(files, 0) == bytes(new)
    files.close()


def test_a_file_that_is_dropped_during_its_transfer_is_closed_after_it(folder: Path) -> None:
    """Its descriptor must name no other file before the transfer has ended."""
    has_begun, may_go_on = threading.Event(), threading.Event()

    def wait_in_the_thread() -> None:
        if threading.current_thread() is not threading.main_thread():
            has_begun.set()
            assert may_go_on.wait(LIMIT_S)

    files = PayloadFiles(HookedFiles(wait_in_the_thread), [folder], LAYOUT, max_open=1)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(read, files, 0)
        assert has_begun.wait(LIMIT_S)
        try:
            for number in range(1, SEGMENTS):
                assert read(files, number) == content(number)
            assert open_in(folder) == 2
        finally:
            may_go_on.set()
        assert slow.result() == content(0)
    assert open_in(folder) == 1


def test_threads_that_drop_the_files_of_each_other_read_right_bytes(folder: Path) -> None:
    files = PayloadFiles(RealFileSystem(), [folder], LAYOUT, max_open=2)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(READS):
            number = rng.randrange(SEGMENTS)
            assert read(files, number) == content(number)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, seed) for seed in range(THREADS)]:
            done.result()
    assert open_in(folder) <= 2
