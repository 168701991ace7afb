"""`kvcascade shm`: arenas that outlive their engines."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvcascade.config.machine import Machine
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.cpu import header
from kvcascade.tiers.cpu.arena import Arena, ArenaRole
from kvcascade.tiers.cpu.header import ArenaGeometry
from kvcascade.tools.__main__ import main
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.shm import kept_arenas

GEOMETRY = ArenaGeometry(slots=8, rank_bytes=4096, world_size=1, kept=True)


def keep_one(folder: Path) -> list[Arena]:
    worker = Arena.open(GEOMETRY, "engine", ArenaRole.worker(0), arena_dir=str(folder))
    scheduler = Arena.open(GEOMETRY, "engine", ArenaRole.scheduler(), arena_dir=str(folder))
    scheduler.slot_table().begin(b"f" * 32)
    scheduler.slot_table().mark([BlockHash(b"a"), BlockHash(b"b")], [0, 4])
    return [worker, scheduler]


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    main(["shm", *arguments, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_listed_while_it_lives_and_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--arena-dir", str(tmp_path))
    assert asked(capsys, "ls", *where)["arenas"] == []
    arenas = keep_one(tmp_path)
    (live,) = asked(capsys, "ls", *where)["arenas"]
    assert (live["blocks"], live["slots"], live["is_live"]) == (2, 8, True)
    assert main(["shm", "drop", live["name"], *where]) == ExitCode.IN_USE
    for arena in arenas:
        arena.close()
    (left,) = asked(capsys, "ls", *where)["arenas"]
    assert not left["is_live"]
    assert main(["shm", "ls", *where]) == ExitCode.OK
    assert left["name"][:20] in capsys.readouterr().out
    assert asked(capsys, "drop", *where)["dropped"] == [left["name"]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["ls", "drop"])
def test_a_folder_without_arenas_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main(["shm", command, "--arena-dir", str(tmp_path)]) == ExitCode.OK
    said = capsys.readouterr().out
    assert f"no arena is kept in {tmp_path};" in said and "--arena-dir" in said


def test_an_arena_of_another_version_is_listed_and_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arena in keep_one(tmp_path):
        arena.close()
    where = ("--arena-dir", str(tmp_path))
    monkeypatch.setattr(header, "VERSION", header.VERSION + 1)
    (other,) = asked(capsys, "ls", *where)["arenas"]
    assert other["slots"] is other["blocks"] is other["block_bytes"] is None
    assert other["size_bytes"] > 8 * 4096 and not other["is_live"]
    assert main(["shm", "ls", *where]) == ExitCode.OK
    assert "another version" in capsys.readouterr().out
    assert kept_arenas.kept_blocks(tmp_path, (b"f" * 32).hex()) is None
    assert asked(capsys, "drop", *where)["dropped"] == [other["name"]]


def leave_behind(folder: Path) -> Path:
    """An arena whose engine was killed before it had a scheduler."""
    geometry = dataclasses.replace(GEOMETRY, kept=False)
    arena = Arena.open(geometry, "killed", ArenaRole.worker(0), arena_dir=str(folder))
    left, spare = Path(arena.path), folder / "spare"
    os.link(left, spare)
    arena.close()
    return spare.rename(left)


@pytest.mark.parametrize("command", ["check", "doctor", "ls", "drop"])
def test_what_a_killed_start_left_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Its memory counted as taken, and no command showed it."""
    where = ("--arena-dir", str(tmp_path))
    geometry = dataclasses.replace(GEOMETRY, kept=False)
    config = tmp_path / "kv.json"
    cpu = {"type": "cpu", "capacity": "1MiB", "arena_dir": str(tmp_path)}
    config.write_text(json.dumps({"spec_name": "CascadeOffloadingSpec", "tiers": [cpu]}))
    with Arena.open(geometry, "starts", ArenaRole.worker(0), arena_dir=str(tmp_path)) as held:
        left = leave_behind(tmp_path)
        main(["shm", command, *where] if command in ("ls", "drop") else [command, str(config)])
        assert not left.exists() and Path(held.path).exists()
    said = capsys.readouterr().out
    assert ("removed 1 left by engines" in said) == (command in ("ls", "drop"))


def test_only_what_no_engine_holds_counts_as_room(tmp_path: Path) -> None:
    """The next engine takes such an arena over. `check` counted those of live engines, too."""
    arenas = keep_one(tmp_path)
    assert Machine().kept_by_arenas(tmp_path) == 0
    for arena in arenas:
        arena.close()
    assert Machine().kept_by_arenas(tmp_path) >= GEOMETRY.file_bytes
    arenas = keep_one(tmp_path)
    assert Machine().kept_by_arenas(tmp_path) == 0, "the next engine holds it"
    for arena in arenas:
        arena.close()


def test_an_arena_that_is_dropped_meanwhile_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arena in keep_one(tmp_path):
        arena.close()
    read = kept_arenas.kept_header

    def dropped(path: str) -> Any:
        found = read(path)
        os.unlink(path)
        return found

    monkeypatch.setattr(kept_arenas, "kept_header", dropped)
    assert asked(capsys, "ls", "--arena-dir", str(tmp_path))["arenas"] == []
    for arena in keep_one(tmp_path):
        arena.close()
    assert kept_arenas.kept_blocks(tmp_path, (b"f" * 32).hex()) is None


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    assert main(["shm", "drop", "nothing", "--arena-dir", str(tmp_path)]) == ExitCode.CANNOT_OPEN


@pytest.mark.parametrize("command", ["ls", "drop"])
def test_a_folder_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    where = str(tmp_path / "nowhere")
    assert main(["shm", command, "--arena-dir", where]) == ExitCode.CANNOT_OPEN
    said = capsys.readouterr().err
    assert where in said and said.count("\n") == 1
