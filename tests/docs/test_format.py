"""What lies on the disk and in shared memory is what FORMAT.md says, byte by byte.

The reader here knows that page and nothing of the code: it is what somebody else would write.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from safetensors import safe_open
from support.cache_rig import call
from support.path_rig import PathRig, RigNode, key_of

import kvcascade
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.cpu.arena import Arena, ArenaRole
from kvcascade.tiers.cpu.header import ArenaGeometry
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.path_messages import Chain, Touch

BLOCK_BYTES, BLOCKS, TAIL_CELLS, HEADER_BYTES = 4096, 20, 512, 4096
KEYS = [f"block {n:026}".encode() for n in range(BLOCKS)]
TOKENS = 32
PROMPTS = [range(5), range(3, 9)]
"""Blocks of two prompts; engines note each of them."""
LOW, ALL = (1 << 32) - 1, (1 << 64) - 1


def u(data: bytes) -> int:
    """A number, little endian."""
    return int.from_bytes(data, "little")


def payload(n: int) -> bytes:
    """The bytes of a block."""
    return bytes([n]) * BLOCK_BYTES


class Namespace:
    """A closed path with one namespace, read as a whole."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (self.folder,) = (each for each in root.iterdir() if (each / "namespace.json").exists())
        self.about: dict[str, Any] = json.loads((self.folder / "namespace.json").read_text())
        table = str(self.folder / "blocks")
        with lmdb.open(table, readonly=True, lock=False, max_dbs=4) as found:
            self.last_transaction = found.info()["last_txnid"]
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


def header_and_rest(path: Path, *tensors: str) -> tuple[dict[str, Any], bytes]:
    """The two parts of a safetensors file of ours."""
    data = path.read_bytes()
    begin = 8 + u(data[:8])
    assert begin % 4096 == 0
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(tensors)
    return json.loads(data[8:begin]), data[begin:]


def checksum(block_hash: bytes, data: bytes) -> int:
    """Of a block."""
    return xxhash.xxh3_64_intdigest(data, seed=xxhash.xxh3_64_intdigest(block_hash))


def array(folder: Path, name: str) -> tuple[bytes, npt.NDArray[Any]]:
    """Header and elements of a mapped array."""
    data = (folder / "state" / f"{name}.arr").read_bytes()
    assert data[:8] == b"KVCARR1\0" and not any(data[40:64])
    kind = np.dtype(data[8:16].rstrip(b"\0").decode())
    elements = np.frombuffer(data[64:], kind)
    assert len(elements) == u(data[16:24])
    return data[:64], elements


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    root = tmp_path_factory.mktemp("path")
    opened = kvcascade.open(
        root, namespace="some/modèle.", block_bytes=BLOCK_BYTES, capacity="64MiB", min_free="0B"
    )
    with opened as cache:
        assert all(each.is_there for each in cache.put(KEYS, [payload(n) for n in range(BLOCKS)]))
    return Namespace(root)


def test_names_and_description(made: Namespace) -> None:
    fields = made.about["fields"]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    assert made.folder.name == f"some-mod-le-{fingerprint[:12]}"
    assert (made.about["format"], made.about["format_version"]) == ("kvcascade-namespace", 3)
    assert (made.about["fingerprint"], made.about["label"]) == (fingerprint, "some/modèle.")
    assert made.about["block_bytes"] % 4096 == 0
    assert (made.about["part"], made.about["parts"]) == (0, 1)
    assert made.about["index_bytes"] == (made.folder / "blocks" / "data.mdb").stat().st_size
    assert not (made.folder / "blocks" / "lock.mdb").exists()
    assert (made.folder / "state" / "session").read_text().isdigit()
    for path in made.folder.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


def test_what_is_recorded_with_the_path(made: Namespace) -> None:
    record = json.loads((made.root / ".kvcascade" / "path.json").read_text())
    assert record["version"] == 1 and record["paths"] == [str(made.root)]
    assert record["options"]["capacity_bytes"] == 64 << 20
    assert record["min_shares"] == {} and record["epochs"] == {}
    note = json.loads((made.root / ".kvcascade" / "writer.json").read_text())
    assert note.keys() == {"name", "host", "pid", "pid_namespace", "protocol", "since_s"}


def test_the_block_table(made: Namespace) -> None:
    assert made.blocks.keys() == set(KEYS)
    assert u(made.meta[b"format"]) == 3 and u(made.meta[b"epoch"]) == 0
    shape = f"{BLOCK_BYTES}/{made.about['slots_per_segment']}".encode()
    assert made.meta[b"identity"] == bytes.fromhex(made.about["fingerprint"]) + shape
    assert made.meta[b"totals"] == (BLOCKS * BLOCK_BYTES).to_bytes(8, "little") + bytes(8)
    day = np.frombuffer(made.meta[b"day"][8:], "<u8").reshape(97, 2)
    assert day[u(made.meta[b"day"][:8]) % 97].tolist() == [BLOCKS * BLOCK_BYTES, 0]
    mark = (made.folder / "blocks" / "clean").read_bytes()
    assert mark[:8] == b"KVCCLEAN" and mark[16:] == xxhash.xxh3_64_digest(mark[:16])
    assert u(mark[8:16]) == made.last_transaction
    for n, key in enumerate(KEYS):
        slot, check, stated = made.entry(n)
        assert made.slots[slot.to_bytes(4, "big")] == key
        hashed = xxhash.xxh3_64_intdigest(key)
        assert stated == checksum(key, payload(n))
        mixed = hashed ^ stated ^ slot * 0x9E3779B97F4A7C15 & ALL
        assert check == (mixed * 0xC2B2AE3D27D4EB4F & ALL) >> 32


def test_the_presence_table(made: Namespace) -> None:
    data = made.presence
    slots = u(data[8:16])
    assert data[:8] == b"KVCPRES2" and xxhash.xxh3_64_intdigest(data[:80]) == u(data[80:88])
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
        slot, _, stated = made.entry(n)
        hashed = xxhash.xxh3_64_intdigest(key, seed=1)
        at = (hashed & LOW) % cells
        while words[at] != (hashed >> 32 << 32 | slot + 1):
            assert words[at] != 0, "no empty cell before the block"
            at += 1
        assert (checksums[slot], homes[slot]) == (stated, hashed & LOW)


def test_segments(made: Namespace) -> None:
    size, slots = made.about["block_bytes"], made.about["slots_per_segment"]
    for n in range(BLOCKS):
        number, at = divmod(made.entry(n)[0], slots)
        path = made.folder / "segments" / f"{number:06}.safetensors"
        head, data = header_and_rest(path, "blocks")
        assert data[at * size :][:size] == payload(n)
        assert head["blocks"]["shape"] == [slots, size] and len(data) == slots * size
        assert head["__metadata__"] == {
            "format": "kvcascade-segment",
            "format_version": "3",
            "fingerprint": made.about["fingerprint"],
            "segment": str(number),
        }


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Directory of a namespace whose blocks were used, and the slots of blocks 0 to 19."""
    rig = PathRig(roots=(tmp_path_factory.mktemp("used"),), real=RealFileSystem())
    node = RigNode(rig)
    for start in range(0, BLOCKS, 4):
        node.store(list(range(start, start + 4)))
    rig.send(node.client, Touch([key_of(n) for n in range(0, BLOCKS, 2)]))
    for prompt in PROMPTS:
        rig.send(node.client, Chain(b"".join(key_of(n)[:8] for n in prompt), 0, TOKENS))
    rig.step()
    assert node.welcome is not None
    presence = rig.writer.namespaces[node.welcome.folder].presence
    slots = [presence.find(key_of(n)) for n in range(BLOCKS)]
    rig.close()
    return rig.roots[0] / node.welcome.folder, slots


def test_recency_and_uses(used: tuple[Path, list[int]]) -> None:
    folder, slots = used
    header, ends = array(folder, "lru_ends")
    log, stamp = array(folder, "lru_log")[1], array(folder, "lru_stamp")[1]
    session = int((folder / "state" / "session").read_text())
    check = xxhash.xxh3_64_intdigest(ends.tobytes())
    assert (u(header[24:32]), u(header[32:40])) == (session, check)
    assert sorted(slots) == np.flatnonzero(stamp).tolist()
    assert ends[2] == BLOCKS and all(log[(stamp[s] - 1) % len(log)] == s for s in slots)
    assert int(log[(ends[1] - 1) % len(log)]) == slots[0], "heads outlive tails"
    times = array(folder, "use_times")[1]
    assert [times[slot] for slot in slots[:4]] == [1, 0, 1, 0]


def test_which_block_follows_which(used: tuple[Path, list[int]]) -> None:
    cells = array(used[0], "chains")[1]
    heads = [[int.from_bytes(key_of(n)[:8], "big") or 1 for n in prompt] for prompt in PROMPTS]
    at = 1
    for expected in heads:
        n = int(cells[at]) & 0xFFFFFFFF
        run = cells[at : at + 4 + n].copy()
        assert (int(run[0]) >> 32, n) == (0x6B76636E, len(expected))
        assert run[1] == 0 and divmod(int(run[2]), 1 << 32) == (0, TOKENS)
        seconds, check = divmod(int(run[3]), 1 << 32)
        run[3] = seconds << 32
        assert check == xxhash.xxh3_64_intdigest(run.tobytes()) & 0xFFFFFFFF
        assert seconds >= 1_700_000_000 and run[4:].tolist() == expected
        at += 4 + n
    assert cells[0] == at - 1


def test_export_files(made: Namespace, tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    assert call("export", made.folder, path).code == 0
    head, data = header_and_rest(path, "blocks", "slots")
    facts, (rows, size) = head["__metadata__"], head["blocks"]["shape"]
    assert (facts["format"], facts["format_version"]) == ("kvcascade-export", "1")
    assert (json.loads(facts["fields"]), json.loads(facts["about"])) == (made.about["fields"], {})
    assert facts["fingerprint"] == made.about["fingerprint"] and facts["label"] == "some/modèle."
    assert int(facts["slots_per_segment"]) == made.about["slots_per_segment"]
    found: set[bytes] = set()
    for row in range(rows):
        record = data[rows * size + row * 128 :][:128]
        block_hash = record[33 : 33 + record[32]]
        assert record[:4] == b"KVCS" and u(record[4:8]) == zlib.crc32(record[8:])
        assert not any((*record[8:16], *record[28:32], *record[33 + record[32] :]))
        assert u(record[16:24]) == checksum(block_hash, data[row * size :][: u(record[24:28])])
        found.add(block_hash)
    assert found == made.blocks.keys()


def test_arenas(tmp_path: Path) -> None:
    geometry = ArenaGeometry(slots=6, rank_bytes=5000, world_size=1, kept=True)
    worker = Arena.open(geometry, "engine", ArenaRole.worker(0), arena_dir=str(tmp_path))
    worker.publish_layout(bytes(range(16)))
    scheduler = Arena.open(geometry, "engine", ArenaRole.scheduler(), arena_dir=str(tmp_path))
    scheduler.slot_table().begin(bytes(range(32)), 3)
    scheduler.slot_table().mark([BlockHash(b"block")], [2], 3)
    worker.slots[2] = 7
    worker.close()
    scheduler.close()
    (path,) = tmp_path.iterdir()
    assert re.fullmatch("kvcascade-kept-[0-9a-f]{32}", path.name)
    data = path.read_bytes()
    assert data[:8] == b"KVCARENA" and u(data[8:12]) == 1
    assert u(data[12:16]) == zlib.crc32(data[16:128]) and not any(data[48:128])
    assert [u(data[i : i + 8]) for i in (16, 24, 32)] == [6, 8192, 5000]
    assert u(data[40:44]) == 1 and u(data[44:48]) & 0b011 == 0b010 and u(data[128:132]) == 1
    assert u(data[512:516]) == os.getpid() and u(data[516:520]) == 2
    assert not any(data[520:528]) and data[528:544] == bytes(range(16))
    assert data[4096 + 2 * 8192 :][:5000] == b"\7" * 5000
    table = data[4096 + 6 * 8192 :]
    assert len(data) % 4096 == 0 and table[:40] == bytes(range(32)) + (3).to_bytes(8, "little")
    row = table[3 * 64 :][:64]
    assert row[:8] == b"\5" + bytes(7) and row[8:56] == b"block".ljust(48, b"\0")
    assert u(row[56:]) == xxhash.xxh3_64_intdigest(b"block" + (2).to_bytes(8, "little"))
