"""The bytes of a path with one writer are what FORMAT.md says.

The reader here knows that page and nothing of the code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import xxhash

import kvcascade

BLOCK_BYTES, BLOCKS, TAIL_CELLS, HEADER_BYTES = 4096, 20, 512, 4096
KEYS = [f"block {n:026}".encode() for n in range(BLOCKS)]
LOW, ALL = (1 << 32) - 1, (1 << 64) - 1


def u(data: bytes) -> int:
    """A number, little endian."""
    return int.from_bytes(data, "little")


def payload(n: int) -> bytes:
    """The bytes of a block."""
    return bytes([n]) * BLOCK_BYTES


class PathBytes:
    """A closed path with one namespace, read as a whole."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (self.folder,) = (each for each in root.iterdir() if (each / "namespace.json").exists())
        self.about: dict[str, Any] = json.loads((self.folder / "namespace.json").read_text())
        table = str(self.folder / "blocks")
        with lmdb.open(table, readonly=True, lock=False, max_dbs=4) as found:
            names = (b"blocks", b"slots", b"meta")
            tables = {name: found.open_db(name, create=False) for name in names}
            with found.begin() as reading:
                read = [dict(reading.cursor(tables[name])) for name in names]
        self.blocks, self.slots, self.meta = read
        self.presence = (self.folder / "presence").read_bytes()

    def entry(self, n: int) -> tuple[int, int, int]:
        """Slot, check and checksum of a block."""
        value = self.blocks[KEYS[n]]
        assert len(value) == 16
        return u(value[:4]), u(value[4:8]), u(value[8:])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> PathBytes:
    root = tmp_path_factory.mktemp("path")
    opened = kvcascade.open(
        root, namespace="mine", block_bytes=BLOCK_BYTES, capacity="64MiB", min_free="0B"
    )
    with opened as cache:
        assert all(each.is_there for each in cache.put(KEYS, [payload(n) for n in range(BLOCKS)]))
    return PathBytes(root)


def test_names_and_record(made: PathBytes) -> None:
    assert (made.about["format"], made.about["format_version"]) == ("kvcascade-namespace", 3)
    assert made.about["index_bytes"] == (made.folder / "blocks" / "data.mdb").stat().st_size
    assert not (made.folder / "blocks" / "lock.mdb").exists()
    record = json.loads((made.root / ".kvcascade" / "path.json").read_text())
    assert record["version"] == 1 and record["paths"] == [str(made.root)]
    assert record["options"]["capacity_bytes"] == 64 << 20
    assert record["min_shares"] == {} and record["epochs"] == {}
    note = json.loads((made.root / ".kvcascade" / "writer.json").read_text())
    assert note.keys() == {"name", "host", "pid", "pid_namespace", "protocol", "since_s"}
    assert (made.folder / "state" / "session").read_text().isdigit()


def test_the_block_table(made: PathBytes) -> None:
    assert made.blocks.keys() == set(KEYS)
    assert u(made.meta[b"format"]) == 3 and u(made.meta[b"epoch"]) == 0
    for n, key in enumerate(KEYS):
        slot, check, checksum = made.entry(n)
        assert made.slots[slot.to_bytes(4, "big")] == key
        hashed = xxhash.xxh3_64_intdigest(key)
        assert checksum == xxhash.xxh3_64_intdigest(payload(n), seed=hashed)
        mixed = hashed ^ checksum ^ slot * 0x9E3779B97F4A7C15 & ALL
        assert check == (mixed * 0xC2B2AE3D27D4EB4F & ALL) >> 32


def test_the_presence_table(made: PathBytes) -> None:
    data = made.presence
    slots = u(data[8:16])
    assert data[:8] == b"KVCPRES1" and xxhash.xxh3_64_intdigest(data[:80]) == u(data[80:88])
    assert u(data[128:136]) == 0 and u(data[136:144]) == u(made.meta[b"commit"])
    assert u(data[144:152]) != 0, "it was closed cleanly"
    cells = 1 << (2 * slots - 1).bit_length()
    words = np.frombuffer(data, "<u8", cells + TAIL_CELLS, HEADER_BYTES)
    checksums_at = HEADER_BYTES + 8 * (cells + TAIL_CELLS)
    checksums = np.frombuffer(data, "<u8", slots, checksums_at)
    homes = np.frombuffer(data, "<u4", slots, checksums_at + 8 * slots)
    assert len(data) == checksums_at + 12 * slots
    assert np.count_nonzero(words) == BLOCKS
    for n, key in enumerate(KEYS):
        slot, _, checksum = made.entry(n)
        hashed = xxhash.xxh3_64_intdigest(key)
        at = (hashed & LOW) % cells
        while words[at] != (hashed >> 32 << 32 | slot + 1):
            assert words[at] != 0, "no empty cell before the block"
            at += 1
        assert (checksums[slot], homes[slot]) == (checksum, hashed & LOW)


def test_the_payloads_lie_in_the_segments(made: PathBytes) -> None:
    per_segment = made.about["slots_per_segment"]
    for n in range(BLOCKS):
        slot, _, _ = made.entry(n)
        segment = made.folder / "segments" / f"{slot // per_segment:06}.safetensors"
        with segment.open("rb") as file:
            start = 8 + u(file.read(8))
            file.seek(start + slot % per_segment * BLOCK_BYTES)
            assert file.read(BLOCK_BYTES) == payload(n)
            file.seek(start + per_segment * BLOCK_BYTES + slot % per_segment * 128)
            assert file.read(128) == bytes(128), "there are no slot records"
