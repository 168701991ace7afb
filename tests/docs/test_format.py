"""What lies on the disk and in shared memory is what FORMAT.md says, byte by byte.

The reader here knows that page and nothing of the code: it is what somebody else would write.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from safetensors import safe_open
from support.cache_rig import UsageRig, call, config_of
from support.nvme_rig import content, key

from kvcascade.assembly.chain_notes import ChainNotes
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.cpu.arena import Arena, ArenaRole
from kvcascade.tiers.cpu.header import ArenaGeometry
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.segments.chain_book import ChainBook
from kvcascade.tiers.nvme.segments.chains import CHAINS, ChainLog, cells_for

FIELDS = {"model": "some/modèle", "dtype": "float16"}
BLOCKS, TOKENS = 20, 32
PROMPTS = [range(5), range(3, 9)]
"""Blocks of two prompts; engines note each of them."""


def u(data: bytes) -> int:
    """A number, little endian."""
    return int.from_bytes(data, "little")


@dataclass
class Namespace:
    """A namespace directory, read as a whole."""

    folder: Path

    def __post_init__(self) -> None:
        self.about = json.loads((self.folder / "namespace.json").read_text())
        with lmdb.open(str(self.folder / "index"), readonly=True, lock=False, max_dbs=4) as found:
            tables = {name: found.open_db(name, create=False) for name in (b"blocks", b"meta")}
            self.last_transaction = found.info()["last_txnid"]
            with found.begin() as reading:
                self.blocks = dict(reading.cursor(tables[b"blocks"]))
                self.meta = dict(reading.cursor(tables[b"meta"]))

    def array(self, name: str) -> tuple[bytes, npt.NDArray[Any]]:
        """Header and elements of a mapped array."""
        data = (self.folder / "state" / f"{name}.arr").read_bytes()
        assert data[:8] == b"KVCARR1\0" and not any(data[40:64])
        kind = np.dtype(data[8:16].rstrip(b"\0").decode())
        elements = np.frombuffer(data[64:], kind)
        assert len(elements) == u(data[16:24])
        return data[:64], elements

    def segment(self, number: int) -> tuple[dict[str, Any], bytes]:
        """Header of a segment file, and what comes behind it."""
        return header_and_rest(self.folder / "segments" / f"{number:06d}.safetensors")


def header_and_rest(path: Path) -> tuple[dict[str, Any], bytes]:
    """The two parts of a safetensors file of ours."""
    data = path.read_bytes()
    begin = 8 + u(data[:8])
    assert begin % 4096 == 0
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == {"blocks", "slots"}
    return json.loads(data[8:begin]), data[begin:]


def check_record(record: bytes, payload: bytes, block_hash: bytes) -> None:
    """A slot record is whole, and its payload is the right one."""
    assert record[:4] == b"KVCS" and u(record[4:8]) == zlib.crc32(record[8:])
    assert record[33 : 33 + record[32]] == block_hash
    assert not any(record[33 + record[32] :])
    assert u(record[24:28]) == len(payload)
    assert u(record[16:24]) == checksum(block_hash, payload)


def checksum(block_hash: bytes, payload: bytes) -> int:
    """Of a block."""
    return xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(block_hash))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    """A closed cache, of which half the blocks were used again."""
    root = tmp_path_factory.mktemp("kv")
    rig = UsageRig(config_of(root, NamespaceKey("some/modèle.", FIELDS)))
    rig.store([key(i) for i in range(BLOCKS)])
    rig.policy.touch([key(i) for i in range(0, BLOCKS, 2)])
    log = ChainLog(rig.tier.arrays.unsealed()(CHAINS, cells_for(32), np.uint64))
    notes = ChainNotes(ChainBook(log, lambda: 1000.0).write)
    for prompt in PROMPTS:
        ends = {bytes(key(n)): TOKENS * (i + 1) for i, n in enumerate(prompt)}
        notes.note(ends, dict.fromkeys(ends, True))
    notes.close()
    rig.close()
    (folder,) = (path for path in root.iterdir() if path.is_dir())
    return Namespace(folder)


def test_names_and_description(made: Namespace) -> None:
    text = json.dumps(FIELDS, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    assert made.folder.name == f"some-mod-le-{fingerprint[:12]}"
    assert made.about["format"] == "kvcascade-namespace" and made.about["format_version"] == 2
    assert (made.about["fingerprint"], made.about["fields"]) == (fingerprint, FIELDS)
    assert made.about["block_bytes"] % 4096 == 0
    assert (made.about["part"], made.about["parts"]) == (0, 1)
    assert made.folder.parent.joinpath(".kvcascade.lock").read_text().isdigit()
    assert (made.folder / "lock").read_text().isdigit()
    for path in made.folder.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


def test_segments_and_entries(made: Namespace) -> None:
    size, slots = made.about["block_bytes"], made.about["slots_per_segment"]
    assert made.blocks.keys() == {key(i) for i in range(BLOCKS)}
    for block_hash, entry in made.blocks.items():
        assert entry[24:] == xxhash.xxh3_64_digest(entry[:24] + block_hash)
        number, at = divmod(u(entry[:4]), slots)
        head, data = made.segment(number)
        payload = data[at * size :][: u(entry[4:8])]
        record = data[slots * size + at * 128 :][:128]
        assert payload == content(BlockHash(block_hash))
        check_record(record, payload, block_hash)
        assert (u(record[16:24]), u(record[8:16])) == (u(entry[8:16]), u(entry[16:24]))
        assert u(record[8:16]) >> 40 == 1 and u(record[28:32]) == 0
        assert head["__metadata__"] == {
            "format": "kvcascade-segment",
            "format_version": "2",
            "fingerprint": made.about["fingerprint"],
            "segment": str(number),
        }
        assert (head["blocks"]["shape"], head["slots"]["shape"]) == ([slots, size], [slots, 128])
        assert len(data) == slots * (size + 128)
    assert len({entry[16:24] for entry in made.blocks.values()}) == BLOCKS


def test_what_the_index_notes(made: Namespace) -> None:
    meta, size = made.meta, made.about["block_bytes"]
    assert {name: u(meta[name]) for name in (b"format", b"session", b"uses0")} == {
        b"format": 2, b"session": 1, b"uses0": 1,
    }  # fmt: skip
    numbers = size.to_bytes(4, "little") + made.about["slots_per_segment"].to_bytes(4, "little")
    assert meta[b"identity"] == bytes.fromhex(made.about["fingerprint"]) + numbers
    saved, check = meta[b"state0"][:-8], meta[b"state0"][-8:]
    assert check == xxhash.xxh3_64_digest(saved)
    runs = np.frombuffer(saved[16:], "<i4").reshape(-1, 2)
    segments = len(list((made.folder / "segments").iterdir()))
    assert (u(saved[:8]), u(saved[8:16])) == (0, BLOCKS)
    assert runs[:, 1].sum() + BLOCKS == segments * made.about["slots_per_segment"]
    assert meta[b"totals"] == (BLOCKS * size).to_bytes(8, "little") + bytes(8)
    day = np.frombuffer(meta[b"day"][8:], "<u8").reshape(97, 2)
    assert day[u(meta[b"day"][:8]) % 97].tolist() == [BLOCKS * size, 0]
    assert u(meta[b"boot"][:8]) == 0 and 0 < len(meta[b"boot"]) - 8 <= 64
    assert not {b"epoch", b"live0", b"taken"} & {name for name in meta if any(meta[name])}
    mark = (made.folder / "index" / "clean").read_bytes()
    assert mark[:8] == b"KVCCLEAN" and mark[16:] == xxhash.xxh3_64_digest(mark[:16])
    assert u(mark[8:16]) == made.last_transaction


def test_owners_and_epochs(made: Namespace) -> None:
    owners = (made.folder / "owners").read_bytes()
    segments = len(list((made.folder / "segments").iterdir()))
    assert owners == bytes(256) + b"\1" * segments, "of state number 0, and nothing else"
    assert made.array("epoch")[1].tolist() == [0] * 65


def test_recency_and_uses(made: Namespace) -> None:
    header, ends = made.array("0/lru_ends")
    log, stamp = made.array("0/lru_log")[1], made.array("0/lru_stamp")[1]
    assert u(header[24:32]) == 1 and u(header[32:40]) == xxhash.xxh3_64_intdigest(ends.tobytes())
    used = np.flatnonzero(stamp).tolist()
    assert sorted(u(entry[:4]) for entry in made.blocks.values()) == used
    assert ends[2] == BLOCKS and all(log[(stamp[s] - 1) % len(log)] == s for s in used)
    last = int(log[(ends[1] - 1) % len(log)])
    assert last == u(made.blocks[key(0)][:4]), "heads outlive tails"
    times = made.array("0/use_times")[1]
    assert [times[u(made.blocks[key(i)][:4])] for i in range(4)] == [1, 0, 1, 0]


def test_which_block_follows_which(made: Namespace) -> None:
    cells = made.array("0/chains")[1]
    heads = [[u(key(n)[7::-1]) or 1 for n in prompt] for prompt in PROMPTS]
    at = 1
    for expected in heads:
        n = int(cells[at]) & 0xFFFFFFFF
        run = cells[at : at + 4 + n].copy()
        assert (int(run[0]) >> 32, n) == (0x6B76636E, len(expected))
        assert run[1] == 0 and divmod(int(run[2]), 1 << 32) == (0, TOKENS)
        seconds, check = divmod(int(run[3]), 1 << 32)
        run[3] = seconds << 32
        assert check == xxhash.xxh3_64_intdigest(run.tobytes()) & 0xFFFFFFFF
        assert (seconds, run[4:].tolist()) == (1000, expected)
        at += 4 + n
    assert cells[0] == at - 1


def test_export_files(made: Namespace, tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    assert call("export", made.folder, path).code == 0
    head, data = header_and_rest(path)
    facts, (rows, size) = head["__metadata__"], head["blocks"]["shape"]
    assert (facts["format"], facts["format_version"]) == ("kvcascade-export", "1")
    assert (json.loads(facts["fields"]), json.loads(facts["about"])) == (FIELDS, {})
    assert facts["fingerprint"] == made.about["fingerprint"] and facts["label"] == "some/modèle."
    assert int(facts["slots_per_segment"]) == made.about["slots_per_segment"]
    found: set[bytes] = set()
    for row in range(rows):
        record = data[rows * size + row * 128 :][:128]
        block_hash = record[33 : 33 + record[32]]
        check_record(record, data[row * size :][: u(record[24:28])], block_hash)
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
    assert u(data[12:16]) == zlib.crc32(data[16:128]) and not any(data[80:128])
    assert [u(data[i : i + 8]) for i in (16, 24, 32)] == [6, 8192, 5000]
    assert u(data[40:44]) == 1 and u(data[44:48]) & 0b011 == 0b010 and u(data[128:132]) == 1
    assert u(data[516:520]) == 2 and data[528:544] == bytes(range(16))
    assert data[4096 + 2 * 8192 :][:5000] == b"\7" * 5000
    table = data[4096 + 6 * 8192 :]
    assert len(data) % 4096 == 0 and table[:40] == bytes(range(32)) + (3).to_bytes(8, "little")
    row = table[3 * 64 :][:64]
    assert row[:8] == b"\5" + bytes(7) and row[8:56] == b"block".ljust(48, b"\0")
    assert u(row[56:]) == xxhash.xxh3_64_intdigest(b"block" + (2).to_bytes(8, "little"))
