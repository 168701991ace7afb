"""Files that somebody made or damaged on purpose: an error, never a crash or a read outside."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.children import environment
from support.hostile import PER_SEGMENT, SLOTS
from support.keys import key, keys
from support.nvme_rig import Rig, config_for, filled

from kvcascade.errors import KVCascadeError
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.cpu import header as arena_header
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.segments.format import (
    FORMAT_VERSION,
    SLOT_RECORD_BYTES,
    parse_description,
    parse_entry,
    parse_record,
)

ROUNDS = 40
SOAK_PROCESSES = 100
KEYS = keys(SLOTS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed tier that is full; returns its namespace directory."""
    return filled(config_for([tmp_path], slots=SLOTS, per_segment=PER_SEGMENT), SLOTS)


def reopen(folder: Path) -> Rig:
    return Rig(config_for([folder.parent], slots=SLOTS, per_segment=PER_SEGMENT))


def attack(root: Path, seed: int, rounds: int) -> None:
    """Open damaged indexes in a process of its own."""
    command = [sys.executable, "-m", "support.hostile", str(root), str(seed), str(rounds)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    told = f"seed {seed}: {done.stdout[-100:]} {done.stderr[-1000:]}"
    assert done.returncode == 0 and "survived" in done.stdout, told


def test_a_hostile_index_ends_no_process(folder: Path) -> None:
    attack(folder.parent, random.SystemRandom().randrange(1 << 30), ROUNDS)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_hostile_indexes_for_long(folder: Path) -> None:
    data = folder / "index" / "data.mdb"
    good = data.read_bytes()
    for _ in range(SOAK_PROCESSES):
        data.write_bytes(good)
        attack(folder.parent, random.SystemRandom().randrange(1 << 30), ROUNDS)


# ---- parsers ---------------------------------------------------------------------------------


@given(st.binary(max_size=400))
def test_noise_never_parses(data: bytes) -> None:
    assert parse_record(data) is None
    assert parse_entry(b"key", data) is None
    with pytest.raises(KVCascadeError):
        parse_description(data, "/somewhere")
    with pytest.raises(KVCascadeError):
        arena_header.read_fixed(data, "arena")


_HUGE = st.sampled_from([0, -1, 1 << 31, 1 << 62, 1 << 200, 1.5, None, "8", [8], True])


@given(_HUGE, _HUGE)
def test_a_description_with_wild_numbers_is_refused(block_bytes: object, slots: object) -> None:
    document = {
        "format": "kvcascade-namespace",
        "format_version": FORMAT_VERSION,
        "fields": {},
        "block_bytes": block_bytes,
        "slots_per_segment": slots,
    }
    with pytest.raises(KVCascadeError):
        parse_description(json.dumps(document).encode(), "/somewhere")


_MEMORY = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from support.nvme_rig import Rig, config_for
from kvcascade.errors import KVCascadeError
for root in sys.argv[1:]:
    try:
        Rig(config_for([Path(root)], slots=64, per_segment=8)).close()
        print("opened", root)
    except KVCascadeError as error:
        print("refused", error)
"""

HUGE_FILES = (
    "segments/000000.safetensors",
    "index/data.mdb",
    "index/lock.mdb",
    "namespace.json",
    "state/0/lru_stamp.arr",
    "state/epoch.arr",
    "lock",
    "owners",
)


def test_a_file_of_a_terabyte_costs_no_memory(folder: Path, tmp_path: Path) -> None:
    roots = [tmp_path / f"huge{i}" for i in range(len(HUGE_FILES))]
    for root, name in zip(roots, HUGE_FILES, strict=True):
        shutil.copytree(folder, root / folder.name)
        os.truncate(root / folder.name / name, 1 << 40)
    command = [sys.executable, "-c", _MEMORY, *map(str, roots)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-1000:]
    told = done.stdout.splitlines()
    assert len(told) == len(roots)
    assert all(line.startswith(("opened", "refused")) for line in told)


# ---- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "segments/000001.safetensors",
        "segments",
        "index/data.mdb",
        "index/lock.mdb",
        "index",
        "state/0/lru_stamp.arr",
        "state/epoch.arr",
        "namespace.json",
        "lock",
    ],
)
def test_a_link_leads_nowhere(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """Whatever is replaced by a link to somebody's file: that file is neither read nor changed."""
    target, outside = folder / name, tmp_path_factory.mktemp("outside") / "precious"
    target.rename(outside)
    target.symlink_to(outside)
    before = {p: p.read_bytes() for p in [outside, *outside.rglob("*")] if p.is_file()}
    try:
        rig = reopen(folder)
        rig.store([key(1000 + i) for i in range(8)])
        assert all(rig.check(h) for h in KEYS if rig.policy.get(h) is not None)
        rig.close()
    except KVCascadeError:
        pass
    assert {p: p.read_bytes() for p in [outside, *outside.rglob("*")] if p.is_file()} == before


HOSTILE_KEYS = [b"../../../etc/passwd", b"/etc/passwd", b"\0" * 36, b"a/b\n$(reboot)", b"\xff" * 64]


def test_keys_are_never_names(tmp_path: Path) -> None:
    rig = Rig(config_for([tmp_path], slots=SLOTS, per_segment=PER_SEGMENT))
    before = {path for path in tmp_path.rglob("*")}
    hashes = [BlockHash(name) for name in HOSTILE_KEYS]
    rig.store(hashes)
    assert all(rig.check(block_hash) for block_hash in hashes)
    assert {path for path in tmp_path.rglob("*")} == before
    rig.close()


@pytest.mark.parametrize("label", ["../../up", "/etc/passwd", "..", ".", "", "a\0b", "ü" * 300])
def test_a_label_stays_inside_the_path(tmp_path: Path, label: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    config = config_for([root], slots=SLOTS, per_segment=PER_SEGMENT)
    rig = Rig(replace(config, key=NamespaceKey(label, {"label": label})))
    (name,) = [path.name for path in root.iterdir() if path.is_dir()]
    assert rig.tier.namespace.folders[0] == root / name
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    rig.close()


def test_a_record_that_lies_about_its_key_moves_nothing(folder: Path) -> None:
    """Slot records say whom to evict: one that names another block evicts nobody."""
    segment = folder / "segments" / "000000.safetensors"
    records = segment.stat().st_size - PER_SEGMENT * SLOT_RECORD_BYTES
    with segment.open("r+b") as file:
        file.seek(records)
        first, second = file.read(SLOT_RECORD_BYTES), file.read(SLOT_RECORD_BYTES)
        file.seek(records)
        file.write(second + first)
    rig = reopen(folder)
    assert sum(rig.check(block_hash) for block_hash in KEYS) == SLOTS
    rig.store([key(1000 + i) for i in range(8)])
    assert all(rig.check(key(1000 + i)) for i in range(8))
    rig.check_sums()
    rig.close()
