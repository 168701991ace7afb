"""The structures on disk, and what their readers make of hostile bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from kvcascade.errors import CorruptionError, FormatError, KVCascadeError
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.segments.format import (
    FORMAT_VERSION,
    SLOT_RECORD_BYTES,
    IndexEntry,
    SegmentLayout,
    SlotRecord,
    block_checksum,
    parse_description,
    parse_entry,
    parse_record,
    segment_name,
    segment_number,
    slot_in_entry,
)
from kvcascade.tiers.nvme.segments.segment_files import SegmentSet

LAYOUT = SegmentLayout(block_bytes=8192, slots=5, fingerprint="ab" * 32)
ENTRY = IndexEntry(slot=7, length=8192, checksum=2**64 - 1, generation=2**63)
RECORD = SlotRecord(b"k" * 36, generation=9, checksum=5, length=8192, epoch=3)


def test_a_segment_is_a_safetensors_file(tmp_path: Path) -> None:
    segments = SegmentSet(RealFileSystem(), [tmp_path], LAYOUT)
    segments.create(0)
    payload = bytes(range(256)) * 32
    segments.write_run(3, [memoryview(payload)])
    segments.write_records(3, [RECORD.pack()])
    segments.close()
    with safe_open(tmp_path / "000000.safetensors", "numpy") as file:
        assert file.metadata()["segment"] == "0"
        blocks, slots = file.get_tensor("blocks"), file.get_tensor("slots")
    assert blocks.shape == (5, 8192) and slots.shape == (5, SLOT_RECORD_BYTES)
    assert blocks[3].tobytes() == payload
    assert parse_record(slots[3].tobytes()) == RECORD
    assert parse_record(slots[2].tobytes()) is None


@pytest.mark.parametrize(
    "name", ["", ".safetensors", "000001", "00001.safetensors", "0000001.safetensors",
             "00000a.safetensors", "-00001.safetensors", "00000\u0661.safetensors"],
)  # fmt: skip
def test_a_segment_is_known_by_its_name(name: str) -> None:
    assert segment_number(segment_name(12)) == 12
    assert segment_number(name) is None


def test_slot_zero_is_page_aligned() -> None:
    assert LAYOUT.header_bytes % 4096 == 0
    assert LAYOUT.records_offset % 4096 == 0
    assert len(LAYOUT.header(0)) == len(LAYOUT.header(999_999))


@given(st.integers(0, 8 * SLOT_RECORD_BYTES - 1))
def test_a_flipped_bit_voids_a_record(bit: int) -> None:
    data = bytearray(RECORD.pack())
    data[bit // 8] ^= 1 << bit % 8
    assert parse_record(bytes(data)) is None


@given(st.integers(0, 255))
def test_a_flipped_bit_voids_an_entry(bit: int) -> None:
    value = bytearray(ENTRY.pack(b"key"))
    assert parse_entry(b"key", bytes(value)) == ENTRY
    assert slot_in_entry(b"key", bytes(value)) == 7
    value[bit // 8] ^= 1 << bit % 8
    assert parse_entry(b"key", bytes(value)) is None
    assert slot_in_entry(b"key", bytes(value)) == -1


def test_an_entry_belongs_to_its_key() -> None:
    assert parse_entry(b"other", ENTRY.pack(b"key")) is None
    assert parse_entry(b"key", ENTRY.pack(b"key") + b"x") is None


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 300_000])
def test_checksum_depends_on_key_and_every_byte(size: int) -> None:
    payload = bytearray(size)
    right = block_checksum(b"a", memoryview(payload))
    assert right != block_checksum(b"b", memoryview(payload))
    payload[-1] ^= 1
    assert right != block_checksum(b"a", memoryview(payload))


GOOD = {
    "format": "kvcascade-namespace",
    "format_version": FORMAT_VERSION,
    "block_bytes": 4096,
    "slots_per_segment": 8,
    "index_bytes": 1 << 20,
    "fields": {},
}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"format_version": 1}, FormatError),
        ({"format_version": str(FORMAT_VERSION)}, FormatError),
        ({"format": "other"}, CorruptionError),
        ({"block_bytes": -1}, CorruptionError),
        ({"block_bytes": True}, CorruptionError),
        ({"slots_per_segment": 2**40}, CorruptionError),
        ({"index_bytes": 0}, CorruptionError),
        ({"fields": []}, CorruptionError),
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
