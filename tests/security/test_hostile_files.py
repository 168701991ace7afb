"""Files that somebody made or damaged on purpose: an error, never a crash or a read outside."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import path_engine
from support.children import environment
from support.hostile import BLOCKS
from support.path_cache import (
    OPTIONS,
    PER_SEGMENT,
    engine_on,
    fill_path,
    folder_in,
    try_engine_on,
)
from support.path_engine import PathEngine

from kvcascade.errors import CorruptionError, KVCascadeError
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.cpu import header as arena_header
from kvcascade.tiers.nvme.path.writer.path_options import PATH_FOLDER
from kvcascade.tiers.nvme.segments.format import (
    FORMAT_VERSION,
    parse_description,
)
from kvcascade.tools.commands.carry.carried import parse_record

ROUNDS = 40
SOAK_PROCESSES = 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed tier; returns its namespace directory."""
    return fill_path(tmp_path, BLOCKS)


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
    data = folder / "blocks" / "data.mdb"
    good = data.read_bytes()
    for _ in range(SOAK_PROCESSES):
        data.write_bytes(good)
        attack(folder.parent, random.SystemRandom().randrange(1 << 30), ROUNDS)


# ---- parsers ---------------------------------------------------------------------------------


@given(st.binary(max_size=400))
def test_noise_never_parses(data: bytes) -> None:
    assert parse_record(data) is None
    with pytest.raises(KVCascadeError):
        parse_description(data, "/somewhere")
    with pytest.raises(KVCascadeError):
        arena_header.read_fixed(data, "arena")


NUMBERS = {
    "block_bytes": 4096,
    "slots_per_segment": 8,
    "index_bytes": 1 << 20,
    "part": 0,
    "parts": 1,
}


@pytest.mark.parametrize("number", [-1, 1 << 62, 1 << 200, 1.5, None, "8", [8], True])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_description_with_wild_numbers_is_refused(name: str, number: object) -> None:
    document: dict[str, object] = {
        "format": "kvcascade-namespace",
        "format_version": FORMAT_VERSION,
        "fields": {},
        "fingerprint": "00",
        **NUMBERS,
    }
    assert parse_description(json.dumps(document).encode(), "/somewhere") == document
    document[name] = number
    with pytest.raises(CorruptionError, match="no valid"):
        parse_description(json.dumps(document).encode(), "/somewhere")


_MEMORY = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from support.path_cache import try_engine_on
for root in sys.argv[1:]:
    engine = try_engine_on(Path(root))
    if isinstance(engine, str):
        print("refused:", engine)
        continue
    print("served", sum(outcome.value == "ok" for outcome in engine.get(range(64))))
    engine.close()
"""

HUGE_FILES = {
    "": "served 64",
    "segments/000000.safetensors": "served 64",
    "blocks/data.mdb": "served 64",
    "blocks/clean": "served 64",
    "presence": "served 64",
    "namespace.json": "refused",
    "state/lru_stamp.arr": "served 64",
    "state/session": "served 64",
    "lock": "served 64",
    "../.kvcascade/path.json": "refused",
    "../.kvcascade/writer.json": "served 64",
    "../.kvcascade/writer.lock": "served 64",
}
"""By name of the file that is a terabyte long: the answer of an engine. With "", no file is."""


def test_a_file_of_a_terabyte_costs_no_memory(folder: Path, tmp_path: Path) -> None:
    roots = [tmp_path / f"huge{i}" for i in range(len(HUGE_FILES))]
    for root, name in zip(roots, HUGE_FILES, strict=True):
        shutil.copytree(folder, root / folder.name)
        shutil.copytree(
            folder.parent / PATH_FOLDER, root / PATH_FOLDER, ignore=lambda *_: ["writer.sock"]
        )
        if name:
            os.truncate(root / folder.name / name, 1 << 40)
    command = [sys.executable, "-c", _MEMORY, *map(str, roots)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-1000:]
    told = done.stdout.splitlines()
    found = {n: line.partition(":")[0] for n, line in zip(HUGE_FILES, told, strict=True)}
    assert found == HUGE_FILES, told


# ---- names -----------------------------------------------------------------------------------


LINKS = {
    "segments/000001.safetensors": BLOCKS - PER_SEGMENT,
    "segments": None,
    "blocks/data.mdb": None,
    "blocks/clean": BLOCKS,
    "blocks": None,
    "presence": None,
    "state/lru_stamp.arr": None,
    "state/session": None,
    "state": None,
    "namespace.json": None,
    "lock": None,
    "../.kvcascade": None,
    "../.kvcascade/path.json": None,
    "../.kvcascade/writer.json": BLOCKS,
    "../.kvcascade/writer.lock": None,
}
"""Number of blocks that are served if this is a link; None: the path is refused for it."""
FOREIGN = range(5000, 5000 + BLOCKS)


@pytest.fixture
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed tier of the same model with other blocks; returns its namespace directory."""
    engine = engine_on(root := tmp_path_factory.mktemp("outside"))
    engine.store(FOREIGN)
    engine.close()
    return folder_in(root)


@pytest.mark.parametrize("name", LINKS)
def test_a_link_leads_nowhere(folder: Path, foreign: Path, name: str) -> None:
    """Whatever is replaced by a link to somebody's file: that file is neither read nor changed."""
    target, outside = folder / name, foreign / name
    target.rename(foreign.parent / "away")
    target.symlink_to(outside)
    before = {p: p.read_bytes() for p in [outside, *outside.rglob("*")] if p.is_file()}
    engine = try_engine_on(folder.parent)
    if isinstance(engine, str):
        assert LINKS[name] is None and re.search("symbolic links|kind of file", engine), engine
        assert f"the link {target.parent.resolve() / target.name} by" in engine, engine
    else:
        assert list(engine.get(range(BLOCKS))).count(BlockOutcome.OK) == LINKS[name]
        assert BlockOutcome.OK not in engine.get(FOREIGN)
        engine.put(range(1000, 1008))
        engine.close()
    assert {p: p.read_bytes() for p in [outside, *outside.rglob("*")] if p.is_file()} == before


OTHER_KINDS = [
    "segments",
    "blocks",
    "blocks/data.mdb",
    "presence",
    "state",
    "state/lru_stamp.arr",
    "namespace.json",
    "lock",
    "../.kvcascade",
    "../.kvcascade/path.json",
    "../.kvcascade/writer.lock",
]


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_another_kind_of_file_is_named(folder: Path, name: str, tmp_path: Path) -> None:
    """A pipe or a socket in place of a file or folder, and a folder in place of a file."""
    target = folder / name
    target = target.parent.resolve() / target.name
    was_file = target.is_file()
    target.rename(tmp_path / "away")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    makers: list[Callable[[], object]] = [
        lambda: os.mkfifo(target, 0o600),
        lambda: (tmp_path / "socket").rename(target),
        lambda: target.mkdir(0o700) if was_file else target.touch(0o600),
    ]
    for make in makers:
        make()
        told = try_engine_on(folder.parent)
        assert isinstance(told, str) and f"; restore {target}, or remove it" in told
        target.rmdir() if target.is_dir() else target.unlink()


HOSTILE_KEYS = [b"../../../etc/passwd", b"/etc/passwd", b"\0" * 36, b"a/b\n$(reboot)", b"\xff" * 64]


def test_keys_are_never_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(tmp_path)
    engine.store([0])
    before = {path for path in tmp_path.rglob("*")}
    monkeypatch.setattr(path_engine, "key", HOSTILE_KEYS.__getitem__)
    numbers = range(len(HOSTILE_KEYS))
    engine.store(numbers)
    assert set(engine.get(numbers)) == {BlockOutcome.OK}
    made = {path for path in tmp_path.rglob("*")} - before
    assert all(path.match("segments/00000?.safetensors") for path in made)
    engine.close()


@pytest.mark.parametrize("label", ["../../up", "/etc/passwd", "..", ".", "", "a\0b", "ü" * 300])
def test_a_label_stays_inside_the_path(tmp_path: Path, label: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    PathEngine([root], OPTIONS, is_thread=True, label=label).open().close()
    assert folder_in(root).parent == root
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
