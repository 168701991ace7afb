"""Transfers of a real file that leaves direct I/O, and its bytes on disk."""

from __future__ import annotations

import errno
import fcntl
import os
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvcascade.tiers.nvme.disk.filesystem import PAGE_BYTES, RealFileSystem
from kvcascade.tools.commands.path_files import open_read_only


@pytest.mark.parametrize(("failures", "can_read"), [(0, True), (1, True), (2, False)])
def test_a_read_that_lacked_alignment_is_tried_once_more(
    failures: int, can_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is not in direct mode: another thread has left it since this one's call began."""
    (tmp_path / "file").write_bytes(b"block")
    file, real, left = open_read_only(tmp_path / "file"), os.preadv, [0] * failures

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if left:
            left.pop()
            raise OSError(errno.EINVAL, "not aligned")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    data = bytearray(5)
    if can_read:
        assert file.preadv([memoryview(data)], 0) == 5 and data == b"block"
    else:
        with pytest.raises(OSError, match="not aligned"):
            file.preadv([memoryview(data)], 0)
    file.close()


def test_a_file_that_is_too_short_to_map_is_an_error_of_the_system(tmp_path: Path) -> None:
    """Another program may cut it after its size was read. Python raises `ValueError` for that."""
    (tmp_path / "file").write_bytes(bytes(PAGE_BYTES))
    file = open_read_only(tmp_path / "file")
    assert len(file.map(PAGE_BYTES, writable=False)) == PAGE_BYTES
    with pytest.raises(OSError, match="length"):
        file.map(PAGE_BYTES + 1, writable=False)
    file.close()


def test_bytes_on_disk_are_those_of_the_contents(tmp_path: Path) -> None:
    """ext4 keeps a page of its own for a file in many pieces: it once made the index of a tier
    larger than its plan, so that the last segment of the capacity was never made."""
    pieces, fs = tmp_path / "pieces", RealFileSystem()
    with pieces.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 64 * PAGE_BYTES)
        for page in range(0, 64, 2):
            os.pwrite(file.fileno(), bytes(PAGE_BYTES), page * PAGE_BYTES)
        os.fsync(file.fileno())
    assert fs.used_bytes(pieces) == fs.used_bytes(tmp_path) == 64 * PAGE_BYTES

    (tmp_path / "small").write_bytes(b"a few")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    os.sync()
    assert fs.used_bytes(tmp_path / "small") <= PAGE_BYTES
    assert fs.used_bytes(tmp_path / "sparse") <= PAGE_BYTES


def test_new_files_of_a_tier_are_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A btrfs that compresses: the flags of folders are those of linux/fs.h."""
    compressed, in_place, other = 0x4, 0x800000, 0x80
    names = ("made", "found")
    flags = dict.fromkeys((str(tmp_path / name) for name in names), compressed | other)

    def ioctl(descriptor: int, request: int, value: array[int]) -> int:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if request == 0x80086601:
            value[0] = flags[name]
        else:
            assert request == 0x40086602
            flags[name] = value[0]
        return 0

    (tmp_path / "found").mkdir(0o700)
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    for name in names:
        RealFileSystem().make_dir(tmp_path / name)
    assert set(flags.values()) == {in_place | other}
