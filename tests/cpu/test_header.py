"""The arena's header: what is written is read, and nonsense is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.errors import ConfigError, FormatError, KVCascadeError
from kvcascade.tiers.cpu import header
from kvcascade.tiers.cpu.header import (
    HEADER_BYTES,
    MAX_RANKS,
    SCHEDULER_RECORD,
    ArenaGeometry,
    ArenaHeader,
    RankRecord,
    RecordState,
)

SAMPLE = ArenaHeader(ArenaGeometry(7, 5000, 3, True))


def page_of(sample: ArenaHeader = SAMPLE) -> bytearray:
    page = bytearray(HEADER_BYTES)
    header.write_new(memoryview(page), sample)
    return page


def test_slots_are_padded_to_pages() -> None:
    assert ArenaGeometry(1, 4096, 2).slot_bytes == 8192
    assert ArenaGeometry(1, 4097, 2).slot_bytes == 12288
    assert ArenaGeometry.fit(10 * 8192 + 4095 + 4096, 4096, 2).slots == 10


def test_impossible_geometries_are_refused() -> None:
    with pytest.raises(ConfigError, match="capacity: 100 bytes hold no block"):
        ArenaGeometry.fit(100, 4096, 1)
    with pytest.raises(ConfigError, match="world_size: 65"):
        ArenaGeometry(1, 1, MAX_RANKS + 1)
    with pytest.raises(ConfigError, match="capacity"):
        ArenaGeometry(0, 1, 1)


def test_what_is_written_is_read() -> None:
    huge = replace(SAMPLE, is_huge=True)
    assert header.read_fixed(bytes(page_of(huge)), "x") == huge
    assert not header.is_ready(bytes(HEADER_BYTES))
    page = bytes(page_of())
    assert header.is_ready(page)
    assert header.read_fixed(page, "x") == SAMPLE


@pytest.mark.parametrize("number", [0, 5, MAX_RANKS - 1, SCHEDULER_RECORD])
def test_records_do_not_touch_each_other(number: int) -> None:
    page = page_of()
    view = memoryview(page)
    record = RankRecord(9, RecordState.PUBLISHED, b"d" * 16)
    header.write_record(view, number, record)
    assert header.read_record(view, number) == record
    empty = RankRecord(0, RecordState.FREE, bytes(16))
    others = [i for i in range(SCHEDULER_RECORD + 1) if i != number]
    assert all(header.read_record(view, i) == empty for i in others)
    assert header.read_fixed(bytes(page), "x") == SAMPLE


@given(st.integers(0, 127), st.integers(1, 255))
def test_any_changed_byte_is_noticed(offset: int, change: int) -> None:
    page = page_of()
    page[offset] ^= change
    with pytest.raises(FormatError, match="x has|x is no"):
        header.read_fixed(bytes(page), "x")


@given(st.binary(max_size=200))
def test_nonsense_is_refused(page: bytes) -> None:
    with pytest.raises(FormatError):
        header.read_fixed(page.ljust(HEADER_BYTES, b"\0"), "x")
    with pytest.raises(FormatError):
        header.read_fixed(page, "x")


def test_a_newer_version_is_named() -> None:
    page = page_of()
    page[8] = 9
    with pytest.raises(FormatError, match="arena format 9, this kvcascade knows 1"):
        header.read_fixed(bytes(page), "x")


def test_a_damaged_record_is_refused() -> None:
    page = page_of()
    page[header.record_offset(0) + 4] = 99
    with pytest.raises(FormatError, match="record 0"):
        header.read_record(memoryview(page), 0)


@pytest.mark.parametrize("damage", [b"\0", b"\xff", b"\xa5\x5a\x3c"], ids=["zero", "ones", "noise"])
@pytest.mark.parametrize("offset", [0, 9, 13, 20, 44, 70, 130])
def test_a_damaged_header_is_never_joined(damage: bytes, offset: int) -> None:
    """Fixed part: a checksum; state: not ready. Nobody maps memory of another shape by mistake."""
    page = page_of()
    whole = bytes(page)
    page[offset : offset + len(damage)] = damage
    if bytes(page) == whole or not header.is_ready(bytes(page)):
        return
    try:
        assert header.read_fixed(bytes(page), "arena") == SAMPLE, "what is read is what was written"
    except KVCascadeError as refusal:
        assert "arena" in str(refusal)
