"""The file system in memory says what is there as the machine's own does."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.memory_file_system import MemoryFileSystem

from kvcascade.tiers.nvme.disk.filesystem import FileSystem, RealFileSystem


@pytest.mark.parametrize("make", [RealFileSystem, MemoryFileSystem])
def test_what_is_there_exists(make: type[FileSystem], tmp_path: Path) -> None:
    fs, folder = make(), tmp_path / "name"

    def found() -> list[str]:
        asked = ["name", "name/a", "name/b", "name/lock", "na", "name/a/b", "name2"]
        return [name for name in asked if fs.exists(tmp_path / name)]

    assert fs.exists(tmp_path) and found() == []
    fs.make_dir(folder)
    assert found() == ["name"]
    fs.open(folder / "a", create=True).close()
    fs.lock(folder / "lock").release()
    assert found() == ["name", "name/a", "name/lock"]
    fs.rename(folder / "a", folder / "b")
    assert found() == ["name", "name/b", "name/lock"]
    fs.unlink(folder / "b")
    fs.rename(folder, tmp_path / "name2")
    assert found() == ["name2"]
    fs.remove_tree(tmp_path / "name2")
    assert found() == []


def test_a_folder_in_memory_is_there_if_something_is_in_it(tmp_path: Path) -> None:
    fs = MemoryFileSystem()
    fs.open(tmp_path / "made" / "by" / "nobody", create=True)
    assert fs.exists(tmp_path / "made") and fs.exists(tmp_path / "made" / "by")
    assert not fs.exists(tmp_path / "ma")
