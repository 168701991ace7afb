"""Every file of the NVMe tier, damaged in every way: blocks may be missing, never wrong.

A damaged index or description is refused with one sentence, and nothing on disk changes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb
import numpy as np
import pytest
from support.cache_rig import flip, segment
from support.children import environment
from support.keys import key, keys
from support.nvme_rig import BLOCK, Rig, config_for, filled

from kvcascade.errors import CorruptionError, FormatError, KVCascadeError
from kvcascade.tiers.nvme.index.clean_close import SavedSlots, pack_saved_slots, write_mark
from kvcascade.tiers.nvme.segments.format import FORMAT_VERSION, SLOT_RECORD_BYTES

SLOTS, PER_SEGMENT = 32, 8
HEADER = 4096
KEYS = keys(SLOTS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed tier that is full; returns its namespace directory."""
    return filled(config_for([tmp_path], slots=SLOTS, per_segment=PER_SEGMENT), SLOTS)


def reopen(folder: Path) -> Rig:
    return Rig(config_for([folder.parent], slots=SLOTS, per_segment=PER_SEGMENT))


def survivors(folder: Path) -> int:
    """Open, check every block, write over all of it, and check again."""
    rig = reopen(folder)
    rig.maintain()
    good = sum(rig.check(block_hash) for block_hash in KEYS)
    assert not any(rig.check(h) for h in KEYS if rig.policy.get(h) is None)
    rig.check_sums()
    new = [key(1000 + i) for i in range(rig.backend.available)]
    rig.backend.get_num_free_blocks()
    rig.store(new)
    assert all(rig.check(block_hash) for block_hash in new)
    rig.close()
    return good


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


Damage = Callable[[Path], object]
SEGMENT_DAMAGE: dict[str, tuple[Damage, int]] = {
    "first payload byte": (lambda p: flip(p, HEADER), 31),
    "last payload byte": (lambda p: flip(p, HEADER + PER_SEGMENT * BLOCK - 1), 31),
    "zeroed slot": (lambda p: patch(p, HEADER + BLOCK, bytes(BLOCK)), 31),
    "another block's bytes": (
        lambda p: patch(p, HEADER, p.read_bytes()[HEADER + BLOCK : HEADER + 2 * BLOCK]),
        31,
    ),
    "header length": (lambda p: patch(p, 0, b"\xff" * 8), 32),
    "header text": (lambda p: flip(p, 30), 32),
    "header zeroed": (lambda p: patch(p, 0, bytes(HEADER)), 32),
    "truncated": (lambda p: os.truncate(p, HEADER + 3 * BLOCK), 27),
    "truncated to nothing": (lambda p: os.truncate(p, 0), 24),
    "extended": (lambda p: os.truncate(p, p.stat().st_size + 12345), 32),
    "deleted": (lambda p: p.unlink(), 24),
    "a record": (lambda p: flip(p, HEADER + PER_SEGMENT * BLOCK + 40), 32),
    "all records": (
        lambda p: patch(
            p, HEADER + PER_SEGMENT * BLOCK, os.urandom(PER_SEGMENT * SLOT_RECORD_BYTES)
        ),
        32,
    ),
    "replaced by noise": (lambda p: p.write_bytes(os.urandom(p.stat().st_size)), 24),
}


@pytest.mark.parametrize("name", SEGMENT_DAMAGE)
def test_a_damaged_segment_costs_its_own_blocks(folder: Path, name: str) -> None:
    damage, left = SEGMENT_DAMAGE[name]
    damage(segment(folder))
    assert survivors(folder) == left


def test_swapped_segments_serve_nothing(folder: Path) -> None:
    first, second = segment(folder, 0), segment(folder, 1)
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)
    assert survivors(folder) == SLOTS - 2 * PER_SEGMENT


def test_swapped_slots_and_records_serve_nothing(folder: Path) -> None:
    path = segment(folder)
    data = path.read_bytes()
    records = HEADER + PER_SEGMENT * BLOCK
    patch(path, HEADER, data[HEADER + BLOCK : HEADER + 2 * BLOCK] + data[HEADER : HEADER + BLOCK])
    size = SLOT_RECORD_BYTES
    patch(path, records, data[records + size : records + 2 * size] + data[records : records + size])
    assert survivors(folder) == SLOTS - 2


@pytest.mark.parametrize("kind", ["symlink", "folder", "fifo"])
def test_a_segment_that_is_no_file_is_left_alone(folder: Path, kind: str, tmp_path: Path) -> None:
    path, outside = segment(folder), tmp_path / "outside"
    outside.write_bytes(path.read_bytes())
    before = outside.read_bytes()
    path.unlink()
    if kind == "symlink":
        path.symlink_to(outside)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    assert survivors(folder) == SLOTS - PER_SEGMENT
    assert outside.read_bytes() == before


def test_damage_while_open_is_a_miss(folder: Path) -> None:
    rig = reopen(folder)
    patch(segment(folder, 2), HEADER, os.urandom(PER_SEGMENT * BLOCK))
    assert sum(rig.check(block_hash) for block_hash in KEYS) == SLOTS - PER_SEGMENT
    assert rig.tier.store.counters.corrupt == PER_SEGMENT
    assert len(rig.policy) == SLOTS - PER_SEGMENT
    rig.check_sums()
    rig.close()


def test_lost_records_are_written_anew(folder: Path) -> None:
    for number in range(SLOTS // PER_SEGMENT):
        patch(
            segment(folder, number),
            HEADER + PER_SEGMENT * BLOCK,
            bytes(PER_SEGMENT * SLOT_RECORD_BYTES),
        )
    rig = reopen(folder)
    assert rig.policy.evict(1, ()) is None, "nobody can tell what lies where"
    rig.backend.get_num_free_blocks()
    assert rig.tier.store.counters.records_repaired > 0
    assert rig.policy.evict(1, ()) is not None
    rig.close(clean=False)


ARRAY_DAMAGE: dict[str, Damage] = {
    "noise": lambda p: patch(p, 64, os.urandom(p.stat().st_size - 64)),
    "header": lambda p: patch(p, 0, os.urandom(64)),
    "length": lambda p: patch(p, 16, b"\xff" * 8),
    "truncated": lambda p: os.truncate(p, 70),
    "empty": lambda p: os.truncate(p, 0),
    "deleted": lambda p: p.unlink(),
}


@pytest.mark.parametrize("name", ARRAY_DAMAGE)
def test_damaged_recency_loses_recency_only(folder: Path, name: str) -> None:
    paths = list((folder / "state" / "0").iterdir())
    assert paths
    for path in paths:
        ARRAY_DAMAGE[name](path)
    assert survivors(folder) == SLOTS


@pytest.mark.parametrize("name", ARRAY_DAMAGE)
def test_a_damaged_epoch_loses_blocks_at_most(folder: Path, name: str) -> None:
    ARRAY_DAMAGE[name](folder / "state" / "epoch.arr")
    assert survivors(folder) in (0, SLOTS)


def refused(folder: Path, error: type[KVCascadeError], *parts: str) -> None:
    """Opening fails with one sentence, and changes no byte."""
    ours = [p for p in folder.rglob("*") if p.is_file() and p.name not in ("lock", "lock.mdb")]
    before = {path: path.read_bytes() for path in ours}
    with pytest.raises(error) as caught:
        reopen(folder)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    assert {path: path.read_bytes() for path in ours} == before


def patch_metas(path: Path, offset: int, data: bytes) -> None:
    """Both meta pages of LMDB."""
    patch(path, offset, data)
    patch(path, 4096 + offset, data)


INDEX_DAMAGE: dict[str, Damage] = {
    "empty": lambda p: os.truncate(p, 0),
    "one byte": lambda p: os.truncate(p, 1),
    "one page": lambda p: os.truncate(p, 4096),
    "two pages": lambda p: os.truncate(p, 8192),
    "no last page": lambda p: os.truncate(p, p.stat().st_size - 4096),
    "noise": lambda p: p.write_bytes(random.Random(1).randbytes(p.stat().st_size)),
    "zeros": lambda p: p.write_bytes(bytes(p.stat().st_size)),
    "meta pages": lambda p: patch(p, 0, bytes(8192)),
    "meta magic": lambda p: patch_metas(p, 16, b"nope"),
    "page size": lambda p: patch(p, 40, b"\xff" * 4),
    "last page": lambda p: patch_metas(p, 136, b"\xff" * 8),
    "all but the meta pages": lambda p: patch(p, 8192, bytes(p.stat().st_size - 8192)),
    "deleted": lambda p: p.unlink(),
}


@pytest.mark.parametrize("name", INDEX_DAMAGE)
def test_a_damaged_index_is_refused(folder: Path, name: str) -> None:
    INDEX_DAMAGE[name](folder / "index" / "data.mdb")
    remedy = f"kvcascade verify --rebuild-index {folder}`"
    refused(folder, CorruptionError, str(folder / "index"), remedy)


def test_an_index_of_another_namespace_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = config_for([other], slots=SLOTS, per_segment=4)
    rig = Rig(config)
    rig.close()
    data = (rig.tier.namespace.folders[0] / "index" / "data.mdb").read_bytes()
    (folder / "index" / "data.mdb").write_bytes(data)
    refused(folder, CorruptionError, "another namespace")


def test_a_linked_index_is_refused(folder: Path, tmp_path: Path) -> None:
    data = folder / "index" / "data.mdb"
    target = tmp_path / "target"
    data.rename(target)
    data.symlink_to(target)
    refused(folder, KVCascadeError, "index")


_PAGE_FLIPS = """
import random, sys
from pathlib import Path
from support.nvme_rig import Rig, config_for, key
from kvcascade.errors import KVCascadeError
root, seed = Path(sys.argv[1]), int(sys.argv[2])
data = next(root.glob("*/index/data.mdb"))
good, rng = data.read_bytes(), random.Random(seed)
opened = refused = 0
for _ in range(25):
    damaged = bytearray(good)
    for _ in range(rng.choice((1, 4, 64))):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    data.write_bytes(damaged)
    try:
        rig = Rig(config_for([root], slots=32, per_segment=8))
    except KVCascadeError:
        refused += 1
        continue
    for i in range(32):
        rig.check(key(i))
    rig.store([key(100 + i) for i in rng.sample(range(1000), 8)])
    try:
        rig.close()
    except KVCascadeError:
        pass
    opened += 1
print(opened, refused)
"""


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_in_index_pages(folder: Path, seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PAGE_FLIPS, str(folder.parent), str(seed)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    opened, refused = map(int, done.stdout.split())
    assert opened > 5 and refused > 0, "the damage must bite, and not always"


def change_index(folder: Path, meta: dict[bytes, bytes], gone: Sequence[bytes] = ()) -> None:
    """Rewrite entries as somebody would who knows the format."""
    with lmdb.open(str(folder / "index"), max_dbs=4) as env:
        tables = {name: env.open_db(name) for name in (b"meta", b"blocks")}
        with env.begin(write=True) as txn:
            for name, value in meta.items():
                txn.put(name, value, db=tables[b"meta"])
            for name in gone:
                assert txn.delete(name, db=tables[b"blocks"])
            transaction = txn.id()
    write_mark(folder / "index", transaction)


def test_a_changed_epoch_in_the_index_loses_blocks_at_most(folder: Path) -> None:
    """It looks as if they had been stored after a reset."""
    change_index(folder, {b"epoch": (5).to_bytes(8, "little")})
    assert survivors(folder) == 0


def test_free_slots_that_do_not_match_their_checksum_are_found_anew(folder: Path) -> None:
    saved = pack_saved_slots(SavedSlots(0, SLOTS, np.zeros((0, 2), dtype=np.int32)))
    change_index(folder, {b"state0": bytes([saved[0] ^ 1]) + saved[1:]})
    assert survivors(folder) == SLOTS


def test_a_lie_about_free_slots_costs_blocks_at_most(folder: Path) -> None:
    """Everything adds up, but the free slots hold blocks, and those in use hold none."""
    rig = reopen(folder)
    entries = {h: rig.policy.get(h) for h in KEYS}
    slots = {h: status.block_id for h, status in entries.items() if status is not None}
    rig.close()
    gone = [h for h, slot in slots.items() if slot >= SLOTS - PER_SEGMENT]
    free = np.array([[0, PER_SEGMENT]], dtype=np.int32)
    lie = pack_saved_slots(SavedSlots(0, SLOTS - PER_SEGMENT, free))
    change_index(folder, {b"state0": lie}, gone)
    rig = reopen(folder)
    assert rig.backend.get_num_free_blocks() == PER_SEGMENT, "it is believed"
    new = [key(1000 + i) for i in range(4 * SLOTS)]
    for start in range(0, len(new), 4):
        rig.store(new[start : start + 4])
        for block_hash in (*KEYS, *new):
            rig.check(block_hash)
        rig.maintain()
    assert sum(rig.check(block_hash) for block_hash in new) > 0
    rig.close()


DESCRIPTION_DAMAGE: dict[str, Damage] = {
    "empty": lambda p: p.write_text(""),
    "cut": lambda p: os.truncate(p, 50),
    "noise": lambda p: p.write_bytes(b"\xff\x00" * 40),
    "deep": lambda p: p.write_text("[" * 100_000),
    "huge": lambda p: p.write_text('"' + "x" * (2 << 20) + '"'),
    "other fields": lambda p: p.write_text(p.read_text().replace("float16", "float32")),
    "huge segments": lambda p: p.write_text(
        p.read_text().replace('"slots_per_segment": 8', f'"slots_per_segment": {2**62}')
    ),
}


@pytest.mark.parametrize("name", DESCRIPTION_DAMAGE)
def test_a_damaged_description_is_refused(folder: Path, name: str) -> None:
    DESCRIPTION_DAMAGE[name](folder / "namespace.json")
    refused(folder, KVCascadeError, str(folder))


def test_an_unknown_version_is_refused(folder: Path) -> None:
    path = folder / "namespace.json"
    document = json.loads(path.read_text()) | {"format_version": 99}
    path.write_text(json.dumps(document))
    refused(folder, FormatError, "99", str(folder))


def test_a_lost_description_is_written_anew(folder: Path) -> None:
    (folder / "namespace.json").unlink()
    assert survivors(folder) == SLOTS
    assert json.loads((folder / "namespace.json").read_text())["format_version"] == FORMAT_VERSION


@pytest.mark.parametrize("name", ["index", "state", "segments"])
def test_a_linked_folder_is_refused(folder: Path, name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(KVCascadeError):
        reopen(folder)


@pytest.mark.parametrize("name", ["lock", "owners"])
def test_lock_files_may_hold_anything(folder: Path, name: str) -> None:
    (folder / name).write_bytes(random.Random(3).randbytes(1000))
    assert survivors(folder) == SLOTS
    (folder / name).unlink()
    assert survivors(folder) == 0, "all was overwritten"


@pytest.mark.parametrize("name", ["lock", "owners"])
@pytest.mark.parametrize("kind", ["symlink", "folder"])
def test_a_lock_that_is_no_file_is_refused(
    folder: Path, kind: str, name: str, tmp_path: Path
) -> None:
    lock, outside = folder / name, tmp_path / "precious"
    outside.write_text("precious")
    lock.unlink()
    if kind == "symlink":
        lock.symlink_to(outside)
    else:
        lock.mkdir()
    with pytest.raises(KVCascadeError):
        reopen(folder)
    assert outside.read_text() == "precious"
