"""Commands on a path of several folders that was copied or moved, or that lacks one of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cache_rig import call
from support.path_cache import engine_on, fill_path, folder_in
from support.path_engine import PathEngine

import kvcascade
from kvcascade.errors import ConfigError
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.namespace import DESCRIPTION
from kvcascade.tiers.nvme.path.writer.path_options import PATH_FILE, PATH_FOLDER
from kvcascade.tools.commands.command_line import ExitCode

BLOCKS = 20
MOUNT = "mount its disk"
ON_A_COPY = [
    ["gc", "PATH", "--older-than", "0s"],
    ["gc", "PATH", "-n", "NAME", "--remove-namespace"],
    ["inspect", "PATH"],
    ["inspect", "PATH/NAME"],
    ["verify", "PATH", "--repair"],
    ["export", "PATH", "OUT"],
    ["top", "PATH", "--once"],
]


@pytest.fixture
def original(tmp_path: Path) -> list[Path]:
    """The two folders of a closed path."""
    roots = [tmp_path / "x" / "a", tmp_path / "x" / "b"]
    fill_path(roots, BLOCKS)
    return roots


@pytest.fixture
def copy(tmp_path: Path, original: list[Path]) -> list[Path]:
    """The folders of a copy; its record names those of the original."""
    shutil.copytree(tmp_path / "x", tmp_path / "y", ignore=shutil.ignore_patterns("*.sock"))
    return [tmp_path / "y" / "a", tmp_path / "y" / "b"]


@pytest.fixture
def engine(original: list[Path], copy: list[Path]) -> Iterator[PathEngine]:
    """An engine of the original."""
    made = engine_on(original)
    yield made
    made.close()


def run(words: list[str], root: Path) -> tuple[int, str]:
    """Status and sentence of a command on a path."""
    values = {"PATH": str(root), "NAME": folder_in(root).name, "OUT": str(root.parent / "out")}
    for name, value in values.items():
        words = [word.replace(name, value) for word in words]
    answer = call(*words)
    return answer.code, answer.err


def files_in(root: Path) -> dict[Path, bytes]:
    """Payload and descriptions of a path."""
    kinds = ("segments/*", "namespace.json")
    return {file: file.read_bytes() for kind in kinds for file in root.rglob(kind)}


@pytest.mark.parametrize("words", ON_A_COPY, ids=" ".join)
def test_a_command_on_a_copy_leaves_the_original_alone(
    original: list[Path], copy: list[Path], engine: PathEngine, words: list[str]
) -> None:
    """It took the other folders from the record, so `gc` deleted segments that were in use."""
    before = files_in(original[0].parent)
    code, said = run(words, copy[0])
    assert files_in(original[0].parent) == before
    assert list(engine.get(range(BLOCKS))) == [BlockOutcome.OK] * BLOCKS
    assert code == ExitCode.USAGE and "--also" in said, said
    assert all(str(folder) in said for folder in (*original, copy[0]))


def test_all_folders_of_a_copy_are_given(
    original: list[Path], copy: list[Path], engine: PathEngine
) -> None:
    before = files_in(original[0].parent)
    also = ("--also", copy[1], "--json")
    assert call("verify", copy[0], *also).one["ok"] == BLOCKS
    assert call("inspect", copy[0], *also).one["parts_missing"] == []
    assert call("gc", copy[0], "--older-than", "0s", *also).one["blocks_removed"] == BLOCKS
    name = folder_in(copy[0]).name
    assert call("gc", copy[0], "-n", name, "--remove-namespace", *also).one["was_removed"]
    assert not files_in(copy[0].parent)
    assert files_in(original[0].parent) == before
    assert list(engine.get(range(BLOCKS))) == [BlockOutcome.OK] * BLOCKS


def test_a_copy_is_no_path_of_its_own(
    original: list[Path], copy: list[Path], tmp_path: Path
) -> None:
    """`import` opened the copy with the other folders of the original."""
    before = files_in(original[0].parent)
    out = tmp_path / "out.safetensors"
    assert call("export", original[0], out).code == ExitCode.OK
    for words in (["import", copy[0], out], ["store", copy[0]]):
        for also in ([], ["--also", copy[1]]):
            answer = call(*words, *also)
            assert answer.code == ExitCode.USAGE and PATH_FILE in answer.err
    for given in (copy[0], copy):
        with pytest.raises(ConfigError, match=f"not {copy[0]}"):
            kvcascade.open(given, namespace="mine", block_bytes=4096)
    assert files_in(original[0].parent) == before


def test_a_path_is_also_found_by_another_name(
    original: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(original[0])
    monkeypatch.chdir(tmp_path / "x")
    for name in (tmp_path / "link", Path("a"), tmp_path / "x" / ".." / "x" / "a"):
        assert call("verify", name, "--json").one["ok"] == BLOCKS, name


def test_a_path_that_was_moved_needs_all_its_folders(original: list[Path], tmp_path: Path) -> None:
    (tmp_path / "x").rename(tmp_path / "z")
    first, second = tmp_path / "z" / "a", tmp_path / "z" / "b"
    answer = call("verify", first)
    assert answer.code == ExitCode.USAGE and "--also" in answer.err
    assert call("verify", first, "--also", second, "--json").one["ok"] == BLOCKS


@pytest.mark.parametrize("left", ["nothing", "mount point", "link to nothing"])
@pytest.mark.parametrize(
    "words",
    [["verify"], ["gc", "--max-size", "1"], ["export", "OUT"], ["import", "FILE"], ["store"]],
    ids=" ".join,
)
def test_a_missing_folder_is_no_wrong_call(
    original: list[Path], tmp_path: Path, words: list[str], left: str
) -> None:
    """The sentence said to give the folder with `--also`, or to create it."""
    file = tmp_path / "file"
    assert call("export", original[0], file).code == ExitCode.OK
    original[1].rename(tmp_path / "away")
    if left == "mount point":
        original[1].mkdir()
    if left == "link to nothing":
        original[1].symlink_to(tmp_path / "gone")
    command, *rest = words
    places = {"FILE": file, "OUT": tmp_path / "out"}
    answer = call(command, original[0], *(places.get(word, word) for word in rest))
    assert answer.code == ExitCode.CANNOT_OPEN, answer.err
    assert str(original[1]) in answer.err
    assert MOUNT in answer.err or (left == "link to nothing" and "check the path" in answer.err)
    assert original[1].exists() is (left == "mount point")


@pytest.mark.parametrize(
    "words",
    [["gc", "-n", "NAME", "--remove-namespace"], ["inspect"], ["verify"], ["import", "FILE"]],
    ids=" ".join,
)
def test_a_folder_given_with_also_that_is_missing_is_named(
    original: list[Path], tmp_path: Path, words: list[str]
) -> None:
    file, gone = tmp_path / "file", tmp_path / "gone"
    assert call("export", original[0], file).code == ExitCode.OK
    places = {"FILE": file, "NAME": folder_in(original[0]).name}
    command, *rest = words
    rest = [str(places.get(word, word)) for word in rest]
    answer = call(command, original[0], *rest, "--also", gone)
    assert answer.code == ExitCode.CANNOT_OPEN, answer.err
    assert str(gone) in answer.err and MOUNT in answer.err and not gone.exists()


def test_a_link_to_nothing_given_with_also_is_named(original: list[Path], tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    answer = call("inspect", original[0], "--also", link)
    assert answer.code == ExitCode.CANNOT_OPEN and MOUNT in answer.err
    assert f"{link} is a folder of this tier and is not there (it is a link to" in answer.err


def test_a_missing_folder_hides_nothing_of_the_others(original: list[Path], tmp_path: Path) -> None:
    original[1].rename(tmp_path / "away")
    for command in (["inspect"], ["top", "--once"]):
        answer = call(command[0], original[0], *command[1:], "--json")
        assert answer.code == ExitCode.PROBLEMS and MOUNT in answer.out
    found = call("inspect", original[0], "--json").one
    assert found["blocks"] == BLOCKS and found["parts_missing"] == [1]


def test_the_version_of_a_later_folder_is_said(original: list[Path]) -> None:
    """The sentence said that version 3 is not read, which is that of the first folder."""
    later = folder_in(original[1]) / DESCRIPTION
    later.write_text(later.read_text().replace('"format_version": 3', '"format_version": 4'))
    assert call("inspect", original[0], "--json").one["state"] == "version 4"
    assert "has format version 4, which" in call("verify", original[0]).err


def test_a_path_that_is_mounted_read_only_lacks_no_permission(
    original: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.statvfs(original[0])
    values = [*found[:8], found.f_flag | os.ST_RDONLY, found.f_namemax]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    answer = call("store", original[0])
    assert answer.code == ExitCode.CANNOT_OPEN and "Read-only file system" in answer.err


@pytest.mark.parametrize(
    "command",
    [
        *(["inspect", ""], ["verify", ""], ["gc", ""], ["store", ""], ["top", "", "--once"]),
        *(["inspect", ".", "--also", ""], ["store", ".", "--also", ""]),
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a shell variable that is not set: `store` made a cache of that folder."""
    monkeypatch.chdir(tmp_path)
    answer = call(*command)
    assert answer.code == ExitCode.USAGE and "it is empty; give a folder" in answer.err


def test_a_name_that_is_no_text_is_a_path(tmp_path: Path) -> None:
    """LMDB was given the name as text."""
    fill_path(tmp_path / "kv", BLOCKS)
    root = (tmp_path / "kv").rename(tmp_path / os.fsdecode(b"\xff"))
    assert call("verify", root, "--json").one["ok"] == BLOCKS


def test_names_of_one_folder_are_the_same(tmp_path: Path) -> None:
    fs = RealFileSystem()
    one, two, link = tmp_path / "one", tmp_path / "two", tmp_path / "link"
    one.mkdir()
    two.mkdir()
    link.symlink_to(one)
    assert fs.is_same(one, link) and fs.is_same(link, one)
    assert not fs.is_same(one, two)
    assert not fs.is_same(one, tmp_path / "none") and not fs.is_same(one, Path("\0"))


@pytest.mark.parametrize("paths", [[], ["\0", "/b"], ["", ""]])
def test_names_that_an_editor_left_are_no_other_folders(tmp_path: Path, paths: list[str]) -> None:
    fill_path(tmp_path, 1)
    record = tmp_path / PATH_FOLDER / PATH_FILE
    record.write_text(json.dumps(json.loads(record.read_text()) | {"paths": paths}))
    answer = call("verify", tmp_path)
    assert answer.code == ExitCode.USAGE and answer.err.count("\n") == 1
