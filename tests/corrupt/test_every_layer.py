"""Every file of a tier x every kind of damage: fewer blocks or a refused start, never wrong bytes.

One table, so that no pair is forgotten. Whatever is lost is named: by a counter of blocks that did
not match, by a line in the log, or by the sentence with which the start is refused.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.nvme_rig import BLOCK, Rig, config_for, content, key

from kvcascade.errors import KVCascadeError
from kvcascade.tiers.cpu import header as arena_header

SLOTS, PER_SEGMENT = 32, 8
HEADER = 4096
RECORDS = HEADER + PER_SEGMENT * BLOCK
KEYS = [key(i) for i in range(SLOTS)]


def rig_in(root: Path) -> Rig:
    return Rig(config_for([root], slots=SLOTS, per_segment=PER_SEGMENT))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path with a closed tier that is full."""
    root = tmp_path_factory.mktemp("cache")
    rig = rig_in(root)
    rig.store(KEYS)
    rig.close()
    return root


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with other blocks: its files are valid, and not these."""
    root = tmp_path_factory.mktemp("other")
    rig = rig_in(root)
    rig.store([key(5000 + i) for i in range(SLOTS)])
    rig.reset()
    rig.store([key(6000 + i) for i in range(SLOTS - 3)])
    rig.close()
    return root


LAYERS: dict[str, tuple[str, int]] = {
    "payload": ("segments/000000.safetensors", HEADER + 5),
    "segment header": ("segments/000000.safetensors", 12),
    "slot records": ("segments/000000.safetensors", RECORDS + 20),
    "index pages": ("index/data.mdb", 3 * 4096 + 12),
    "index head": ("index/data.mdb", 16),
    "index readers": ("index/lock.mdb", 0),
    "description": ("namespace.json", 30),
    "lock": ("lock", 0),
    "epoch": ("state/epoch.arr", 64),
    "recency stamps": ("state/0/lru_stamp.arr", 80),
    "recency log": ("state/0/lru_log.arr", 80),
    "recency ends": ("state/0/lru_ends.arr", 70),
}

Damage = Callable[[Path, int, Path], object]


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int, twin: Path) -> None:
    data = path.read_bytes()
    patch(path, offset, bytes([data[min(offset, len(data) - 1)] ^ 0x40]))


def zero(path: Path, offset: int, twin: Path) -> None:
    patch(path, offset, bytes(min(4096, max(1, path.stat().st_size - offset))))


def noise(path: Path, offset: int, twin: Path) -> None:
    patch(path, offset, os.urandom(min(4096, max(1, path.stat().st_size - offset))))


def swap(path: Path, offset: int, twin: Path) -> None:
    shutil.copyfile(twin, path)


DAMAGES: dict[str, Damage] = {
    "flip": flip,
    "zero": zero,
    "noise": noise,
    "swap": swap,
    "truncate": lambda path, offset, twin: os.truncate(path, offset),
    "empty": lambda path, offset, twin: os.truncate(path, 0),
    "extend": lambda path, offset, twin: os.truncate(path, path.stat().st_size + 9999),
    "delete": lambda path, offset, twin: path.unlink(),
}


def survivors(root: Path) -> tuple[int, int]:
    """Blocks served, each one right, and blocks that did not match; new ones can be stored."""
    rig = rig_in(root)
    served = sum(rig.check(block_hash) for block_hash in KEYS)
    for i in range(SLOTS):  # what a foreign file may name
        rig.check(key(5000 + i))
        rig.check(key(6000 + i))
    corrupt = rig.tier.store.counters.corrupt
    rig.close()
    rig = rig_in(root)
    assert sum(rig.check(block_hash) for block_hash in KEYS) == served
    rig.close()
    return served, corrupt


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("layer", LAYERS)
def test_damage(
    layer: str,
    how: str,
    cache: Path,
    other: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = tmp_path / "root"
    shutil.copytree(cache, root)
    (folder,) = (path for path in root.iterdir() if path.is_dir())
    (twin_folder,) = (path for path in other.iterdir() if path.is_dir())
    name, offset = LAYERS[layer]
    DAMAGES[how](folder / name, offset, twin_folder / name)
    try:
        served, corrupt = survivors(root)
    except KVCascadeError as refusal:
        assert layer in ("index pages", "index head", "description", "epoch"), refusal
        assert str(folder) in str(refusal) and "\n" not in str(refusal)
        wanted = "--rebuild-index" if layer.startswith("index") else "remove"
        assert wanted in str(refusal), "it says what to do"
        return
    if served < SLOTS:
        assert corrupt or caplog.records, "nothing is lost without a word"
    if name.startswith("segments"):
        assert served >= SLOTS - PER_SEGMENT, "the rest of the cache is served"
    elif layer.startswith(("recency", "lock", "index readers")):
        assert served == SLOTS, "nothing depends on it"


@pytest.mark.parametrize("how", ["flip", "zero", "noise"])
@pytest.mark.parametrize("offset", [0, 9, 13, 20, 44, 70, 130])
def test_a_damaged_arena_header_is_never_joined(how: str, offset: int, tmp_path: Path) -> None:
    """Fixed part: a checksum; state: not ready. Nobody maps memory of another shape by mistake."""
    page = bytearray(arena_header.HEADER_BYTES)
    geometry = arena_header.ArenaGeometry(slots=4, rank_bytes=4096, world_size=2)
    made = arena_header.ArenaHeader(geometry, arena_header.Creator(7, 8), b"t" * 16)
    arena_header.write_fixed(memoryview(page), made)
    arena_header.mark_ready(memoryview(page))
    file = tmp_path / "arena"
    file.write_bytes(page)
    DAMAGES[how](file, offset, file)
    found = file.read_bytes()
    if found == bytes(page) or not arena_header.is_ready(found):
        return
    try:
        assert arena_header.read_fixed(found, "arena") == made, "what is read is what was written"
    except KVCascadeError as refusal:
        assert "arena" in str(refusal)


def test_the_content_of_a_block_names_the_block() -> None:
    """The swap above bites: other blocks have other bytes."""
    assert content(key(0)) != content(key(5000))
