"""Reads and writes of blocks by a node: presence table, segments, checksums."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from support.keys import key, keys
from support.memory_file_system import MemoryFileSystem
from xxhash import xxh3_64_intdigest

from kvcascade.tiers.base import BlockHash, BlockOutcome
from kvcascade.tiers.nvme.path import presence_table
from kvcascade.tiers.nvme.path.block_reader import BlockReader, BlocksRead, payload_checksum
from kvcascade.tiers.nvme.path.block_writer import BlockWriter
from kvcascade.tiers.nvme.path.payload_files import PayloadFiles
from kvcascade.tiers.nvme.path.presence_table import WritablePresence, presence_bytes
from kvcascade.tiers.nvme.segments.format import SegmentLayout, segment_name

BLOCK, SLOTS, PER_SEGMENT = 4096, 16, 4
OK, GONE, CORRUPT = BlockOutcome.OK, BlockOutcome.GONE, BlockOutcome.CORRUPT
LAYOUT = SegmentLayout(BLOCK, PER_SEGMENT, "ab" * 32)
FOLDERS = (Path("/a/segments"), Path("/b/segments"))


def content(block_hash: BlockHash) -> bytes:
    """The one right content of a block."""
    return (block_hash * (BLOCK // len(block_hash) + 1))[:BLOCK]


class Place:
    """Segments in two folders, a presence table, a reader and a writer."""

    def __init__(self) -> None:
        self.fs = MemoryFileSystem()
        for number in range(SLOTS // PER_SEGMENT):
            self.make_segment(number)
        self.table = WritablePresence(memoryview(bytearray(presence_bytes(SLOTS))), SLOTS)
        self.files = PayloadFiles(self.fs, FOLDERS, LAYOUT)
        self.reader = BlockReader(self.table, self.files, nullcontext())
        self.writer = BlockWriter(self.files, is_durable=False, at_device=nullcontext())

    def path(self, number: int) -> Path:
        return FOLDERS[number % 2] / segment_name(number)

    def make_segment(self, number: int) -> None:
        file = self.fs.open(self.path(number), create=True)
        file.preallocate(LAYOUT.file_bytes)

    def store(self, hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """Write blocks and enter them in the table, as a commit does."""
        done = self.writer.write(hashes, slots, [memoryview(content(h)) for h in hashes])
        assert not done.failed
        for at, checksum in zip(done.written, done.checksums, strict=True):
            self.table.insert(hashes[at], slots[at], checksum)

    def read(self, hashes: Sequence[BlockHash]) -> BlocksRead:
        """Read blocks; what is OK is compared."""
        buffers = [memoryview(bytearray(BLOCK)) for _ in hashes]
        done = self.reader.read(hashes, buffers)
        for block_hash, buffer, outcome in zip(hashes, buffers, done.outcomes, strict=True):
            assert outcome is not OK or buffer == content(block_hash), "wrong bytes"
        return done


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 300_000])
def test_checksum_depends_on_key_and_every_byte(size: int) -> None:
    payload = bytearray(size)
    right = payload_checksum(key(1), memoryview(payload))
    assert right != payload_checksum(key(2), memoryview(payload))
    payload[-1] ^= 1
    assert right != payload_checksum(key(1), memoryview(payload))


def test_a_key_with_the_same_hash_is_not_served_the_block(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 million blocks and a billion lookups meet such a key with a chance of 1 in 1,000."""

    def collide(data: Any, seed: int = 0) -> int:
        is_of_key = len(data) == len(key(1)) and seed == presence_table.KEY_SEED
        return 7 if is_of_key else xxh3_64_intdigest(data, seed)

    monkeypatch.setattr(presence_table, "xxh3_64_intdigest", collide)
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", collide)
    place.store([key(1)], [3])
    assert place.table.find(key(2)) == 3
    assert place.read([key(2)]).outcomes == [CORRUPT]
    assert place.read([key(1)]).outcomes == [OK]


def test_what_was_written_comes_back_in_any_order_and_over_segments(place: Place) -> None:
    slots = [6, 2, 3, 4, 15, 5, 0]
    place.store(keys(7), slots)
    order = [key(i) for i in (4, 0, 6, 9, 2, 1, 3, 5)]
    assert place.read(order).outcomes == [OK, OK, OK, GONE, OK, OK, OK, OK]
    assert place.fs.calls["pwritev"] == place.fs.calls["preadv"] == 4, "one call for each run"


def test_short_transfers_go_on(place: Place) -> None:
    place.fs.short_transfers = True
    place.store(keys(4), [0, 1, 2, 3])
    assert place.read(keys(4)).outcomes == [OK] * 4


def test_a_cell_that_names_another_slot_is_damage(place: Place) -> None:
    place.store([key(7)], [3])
    checksum = place.table.checksum_of(3)
    place.table.remove(key(7), 3)
    place.table.insert(key(7), 5, checksum)
    done = place.read([key(7)])
    assert (done.outcomes, done.bad) == ([CORRUPT], [(key(7), 5, checksum)])


def test_a_slot_that_does_not_exist_is_a_miss(place: Place) -> None:
    place.store(keys(1), [3])
    cells = np.frombuffer(place.table._cells, np.uint64)
    at = int(np.flatnonzero(cells)[0])
    cells[at] = (int(cells[at]) >> 32 << 32) | 4_000_000_000
    assert place.read(keys(1)).outcomes == [GONE]


def test_flipped_bits_are_damage_of_that_block_alone(place: Place) -> None:
    place.store(keys(4), [0, 1, 2, 3])
    place.fs.damage(place.path(0), LAYOUT.header_bytes + 2 * BLOCK + 77, b"\xff\x01")
    done = place.read(keys(4))
    assert done.outcomes == [OK, OK, CORRUPT, OK]
    assert [bad[:2] for bad in done.bad] == [(key(2), 2)]


def test_a_block_that_is_replaced_during_the_read_is_gone(place: Place) -> None:
    place.store(keys(1), [0])
    place.fs.damage(place.path(0), LAYOUT.header_bytes, content(key(9)))

    class Replace:
        """The writer evicts the block while it is read."""

        def __enter__(self) -> None:
            place.table.remove(key(0), 0)
            place.table.insert(key(9), 0, payload_checksum(key(9), memoryview(content(key(9)))))

        def __exit__(self, *error: object) -> None:
            return

    place.reader = BlockReader(place.table, place.files, Replace())
    done = place.read([key(0)])
    assert (done.outcomes, done.bad) == ([GONE], [])
    assert place.read([key(9)]).outcomes == [OK]


def test_a_reset_during_the_read_leaves_nothing(place: Place) -> None:
    place.store(keys(4), [0, 1, 2, 3])
    buffers = [memoryview(bytearray(BLOCK)) for _ in range(4)]
    done = place.reader.read(keys(4), buffers, lambda positions: place.table.clear(7))
    assert done.outcomes == [GONE] * 4


def test_a_segment_that_was_made_anew_is_opened_anew(place: Place) -> None:
    place.store(keys(1), [0])
    place.fs.unlink(place.path(0))
    place.make_segment(0)
    other = PayloadFiles(place.fs, FOLDERS, LAYOUT)
    writer = BlockWriter(other, is_durable=False, at_device=nullcontext())
    writer.write(keys(1), [0], [memoryview(content(key(0)))])
    assert place.read(keys(1)).outcomes == [OK], "the open file was that of the former segment"


def test_a_deleted_segment_is_a_miss_and_a_failing_device_an_error(place: Place) -> None:
    place.store([key(0), key(5)], [0, 5])
    place.files.forget([0, 1])
    place.fs.unlink(place.path(0))
    place.fs.fail("preadv", errno.EIO)
    assert place.read([key(5)]).outcomes == [BlockOutcome.IO_ERROR]
    assert place.read([key(0), key(5)]).outcomes == [GONE, OK]


def test_blocks_of_a_lost_segment_are_reported_after_one_look_at_its_folder(place: Place) -> None:
    place.store(keys(6), [0, 1, 2, 3, 4, 5])
    place.files.forget([0, 1])
    place.fs.unlink(place.path(0))
    done = place.read(keys(6))
    assert done.outcomes == [GONE] * 4 + [OK] * 2
    assert [bad[:2] for bad in done.bad] == [(key(slot), slot) for slot in range(4)]
    assert place.fs.calls["list_dir"] == 1


def test_a_failed_write_names_its_blocks_and_want_of_space(place: Place) -> None:
    views = [memoryview(content(h)) for h in keys(6)]
    place.fs.fail("pwritev", errno.EIO, skip=1)
    done = place.writer.write(keys(6), [0, 1, 2, 3, 4, 5], views)
    assert (done.written, done.failed, done.is_full) == ([0, 1, 2, 3], [4, 5], False)
    assert done.is_device_failure
    place.fs.fail("pwritev", errno.ENOSPC)
    done = place.writer.write(keys(2), [8, 9], views[:2])
    assert (done.written, done.failed, done.is_full) == ([], [0, 1], True)
    assert not done.is_device_failure


def test_durable_writes_are_synced_before_they_are_reported(place: Place) -> None:
    writer = BlockWriter(place.files, is_durable=True, at_device=nullcontext())
    writer.write(keys(2), [0, 1], [memoryview(content(h)) for h in keys(2)])
    assert place.fs.calls["sync"] == 1
    place.fs.fail("sync", errno.EIO)
    done = writer.write(keys(1), [2], [memoryview(content(key(0)))])
    assert done.failed == [0]
