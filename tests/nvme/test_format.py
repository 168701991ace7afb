"""The structures on disk, and what their readers make of hostile bytes."""

from __future__ import annotations

import errno
import json
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from kvcascade.errors import CorruptionError, FormatError, KVCascadeError, TierIOError
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.payload_files import PayloadFiles
from kvcascade.tiers.nvme.segments.format import (
    FORMAT_VERSION,
    SegmentLayout,
    parse_description,
    segment_name,
    segment_number,
)
from kvcascade.tiers.nvme.segments.segment_files import SegmentFiles
from kvcascade.tools.commands.carry.carried import SLOT_RECORD_BYTES, SlotRecord, parse_record

LAYOUT = SegmentLayout(block_bytes=8192, slots=5, fingerprint="ab" * 32)
RECORD = SlotRecord(b"k" * 36, checksum=5, length=8192)


def test_a_segment_is_a_safetensors_file(tmp_path: Path) -> None:
    SegmentFiles(RealFileSystem(), [tmp_path], LAYOUT).create([0])
    payload = bytes(range(256)) * 32
    PayloadFiles(RealFileSystem(), [tmp_path], LAYOUT).write_run(3, [memoryview(payload)])
    with safe_open(tmp_path / "000000.safetensors", "numpy") as file:
        assert file.metadata()["segment"] == "0" and list(file.keys()) == ["blocks"]
        blocks = file.get_tensor("blocks")
    assert blocks.shape == (5, 8192) and blocks[3].tobytes() == payload
    assert (tmp_path / "000000.safetensors").stat().st_size == LAYOUT.file_bytes


@pytest.mark.parametrize("damage", ["cut", "longer", "header", "empty"])
def test_a_damaged_segment_is_made_whole_and_keeps_the_rest(tmp_path: Path, damage: str) -> None:
    segments = SegmentFiles(RealFileSystem(), [tmp_path], LAYOUT)
    segments.create([0])
    files = PayloadFiles(RealFileSystem(), [tmp_path], LAYOUT)
    files.write_run(0, [memoryview(b"\7" * 8192)])
    files.close()
    path = segments.path_of(0)
    whole = path.read_bytes()
    wrong = {
        "cut": whole[: LAYOUT.header_bytes + 8192],
        "longer": whole + b"more",
        "header": b"\xff" * 100 + whole[100:],
        "empty": b"",
    }
    path.write_bytes(wrong[damage])
    segments.mend(0)
    mended = path.read_bytes()
    kept = whole if damage != "empty" else LAYOUT.header(0).ljust(LAYOUT.file_bytes, b"\0")
    assert mended == kept


class FailingDisk(RealFileSystem):
    """A disk that fails, and removes no file any more."""

    def sync_dir(self, path: Path) -> None:
        raise OSError(errno.EIO, "the first fault")

    def unlink(self, path: Path) -> None:
        raise OSError(errno.EROFS, "read-only")


def test_segments_that_a_failing_disk_left_are_made_whole_by_the_next_attempt(
    tmp_path: Path,
) -> None:
    """Otherwise no segment could be made until another writer counts the files."""
    with pytest.raises(TierIOError, match="the first fault"):
        SegmentFiles(FailingDisk(), [tmp_path], LAYOUT).create([0, 1])
    segments = SegmentFiles(RealFileSystem(), [tmp_path], LAYOUT)
    segments.path_of(1).write_bytes(b"half")
    segments.create([0, 1])
    for number in (0, 1):
        made = segments.path_of(number).read_bytes()
        assert made == LAYOUT.header(number).ljust(LAYOUT.file_bytes, b"\0")


@pytest.mark.parametrize(
    "name", ["", ".safetensors", "000001", "00001.safetensors", "0000001.safetensors",
             "00000a.safetensors", "-00001.safetensors", "00000\u0661.safetensors"],
)  # fmt: skip
def test_a_segment_is_known_by_its_name(name: str) -> None:
    assert segment_number(segment_name(12)) == 12
    assert segment_number(name) is None


def test_slot_zero_is_page_aligned() -> None:
    assert LAYOUT.header_bytes % 4096 == 0
    assert len(LAYOUT.header(0)) == len(LAYOUT.header(999_999))


def test_a_record_of_an_older_version_with_generation_and_epoch_is_whole() -> None:
    data = bytearray(RECORD.pack())
    struct.pack_into("<Q", data, 8, 9)
    struct.pack_into("<I", data, 28, 3)
    assert parse_record(bytes(data)) is None
    struct.pack_into("<I", data, 4, zlib.crc32(data[8:]))
    assert parse_record(bytes(data)) == RECORD


@given(st.integers(0, 8 * SLOT_RECORD_BYTES - 1))
def test_a_flipped_bit_voids_a_record(bit: int) -> None:
    data = bytearray(RECORD.pack())
    data[bit // 8] ^= 1 << bit % 8
    assert parse_record(bytes(data)) is None


GOOD = {
    "format": "kvcascade-namespace",
    "format_version": FORMAT_VERSION,
    "block_bytes": 4096,
    "slots_per_segment": 8,
    "index_bytes": 1 << 20,
    "part": 1,
    "parts": 2,
    "fields": {},
    "fingerprint": "ab",
}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"format_version": 2}, FormatError),
        ({"format_version": str(FORMAT_VERSION)}, FormatError),
        ({"format": "other"}, CorruptionError),
        ({"block_bytes": -1}, CorruptionError),
        ({"block_bytes": True}, CorruptionError),
        ({"slots_per_segment": 2**40}, CorruptionError),
        ({"index_bytes": 0}, CorruptionError),
        ({"part": 2}, CorruptionError),
        ({"part": -1}, CorruptionError),
        ({"part": [1]}, CorruptionError),
        ({"parts": None}, CorruptionError),
        ({"parts": 1e999}, CorruptionError),
        ({"parts": 10**12}, CorruptionError),
        ({"fields": []}, CorruptionError),
        ({"fingerprint": None}, CorruptionError),
        ({"about": json.loads("[" * 100 + "]" * 100)}, CorruptionError),
    ],
)
def test_bad_descriptions(change: dict[str, object], error: type[KVCascadeError]) -> None:
    assert parse_description(json.dumps(GOOD).encode(), "here") == GOOD
    with pytest.raises(error, match="here"):
        parse_description(json.dumps(GOOD | change).encode(), "here")


@given(st.binary(max_size=200))
def test_any_bytes_as_a_description(data: bytes) -> None:
    with pytest.raises(KVCascadeError):
        parse_description(data, "here")
