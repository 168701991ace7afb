"""A namespace leaves: at once for whoever asks for it, and for good even if its remover dies."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from support.memory_file_system import MemoryFileSystem
from support.path_rig import PathRig, RigNode

from kvcascade.errors import InUseError, NoSpaceError, TierIOError
from kvcascade.tiers.nvme.disk.filesystem import FileSystem, RealFileSystem
from kvcascade.tiers.nvme.namespace import (
    LOCK,
    MAX_LEFTOVERS,
    namespaces_under,
    remove_namespace,
)
from kvcascade.tiers.nvme.path.path_messages import PathOptions
from kvcascade.tiers.nvme.path.writer.path_capacity import PathCapacity

LEFTOVER = ".removing-model-0123456789ab.{:016x}"
BLOCKS = list(range(24))


class Dying(RealFileSystem):
    """Its process ends when it has given the directory another name and deleted some of it."""

    def __init__(self, gone: str = "") -> None:
        super().__init__()
        self._gone = gone

    def remove_tree(self, path: Path) -> None:
        for name in self._gone.split():
            target = path / name
            shutil.rmtree(target) if target.is_dir() else target.unlink()
        raise KeyboardInterrupt


def filled(root: Path) -> Path:
    """A closed namespace with blocks."""
    rig = PathRig(roots=(root,), real=RealFileSystem())
    node = RigNode(rig)
    for start in range(0, len(BLOCKS), 4):
        node.store(BLOCKS[start : start + 4])
    assert node.welcome is not None
    rig.close()
    return root / node.welcome.folder


def capacity(fs: FileSystem, root: Path, capacity_bytes: int) -> PathCapacity:
    return PathCapacity(fs, [root], PathOptions(capacity_bytes), lambda: 0.0)


def left(root: Path) -> list[Path]:
    """What is left of removed namespaces."""
    return sorted(root.glob(".removing-*"))


@pytest.mark.parametrize("gone", ["", "namespace.json", "lock namespace.json state", "segments"])
def test_a_remover_that_dies_leaves_nothing_of_that_name(tmp_path: Path, gone: str) -> None:
    folder = filled(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        remove_namespace(Dying(gone), folder)
    assert not folder.exists() and len(left(tmp_path)) == 1
    assert namespaces_under(RealFileSystem(), tmp_path) == []
    rig = PathRig(roots=(tmp_path,), real=RealFileSystem())
    node = RigNode(rig)
    assert node.held(BLOCKS) == []
    node.store(BLOCKS[:4])
    assert left(tmp_path) == [] and node.held(BLOCKS) == BLOCKS[:4]
    rig.close()


def test_who_comes_while_it_is_deleted_is_not_disturbed(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    rigs: list[PathRig] = []
    nodes: list[RigNode] = []

    class Overtaken(RealFileSystem):
        def remove_tree(self, path: Path) -> None:
            rigs.append(PathRig(roots=(tmp_path,), real=RealFileSystem()))
            nodes.append(RigNode(rigs[0]))
            nodes[0].store([100, 101])
            super().remove_tree(path)

    assert remove_namespace(Overtaken(), folder)
    nodes[0].store([102])
    assert nodes[0].held([*BLOCKS, 100, 101, 102]) == [100, 101, 102]
    rigs[0].close()


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_who_waits_for_the_lock_of_a_removed_one_begins_anew(
    tmp_path: Path, is_made_anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, folder, away = RealFileSystem(), tmp_path / "one", tmp_path / "away"
    folder.mkdir(mode=0o700)
    held = fs.lock(folder / LOCK)

    def pause(_: float) -> None:
        folder.rename(away)
        if is_made_anew:
            folder.mkdir(mode=0o700)
        held.release()

    monkeypatch.setattr("kvcascade.tiers.nvme.disk.filesystem.time.sleep", pause)
    if not is_made_anew:
        with pytest.raises(FileNotFoundError):
            fs.lock(folder / LOCK, shared=True, wait_s=1.0)
        assert os.listdir(tmp_path) == ["away"]
        return
    lock = fs.lock(folder / LOCK, shared=True, wait_s=1.0)
    with pytest.raises(InUseError):
        fs.lock(folder / LOCK)
    fs.lock(away / LOCK).release()  # or it would hold both
    lock.release()


def test_only_what_is_ours_is_deleted(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    root = tmp_path / "root"
    for folder in (outside, root):
        folder.mkdir()
    (outside / "precious").write_text("precious")
    (root / LEFTOVER.format(1)).symlink_to(outside)
    (root / LEFTOVER.format(2)).mkdir(mode=0o700)
    (root / LEFTOVER.format(2) / "link").symlink_to(outside)
    (root / LEFTOVER.format(3)).write_text("a file")
    others = [".removing-", ".removing-model", ".removing-model-0123456789ab", ".removing-x.12"]
    for name in others:
        (root / name).mkdir(mode=0o700)
    with capacity(RealFileSystem(), root, 1 << 30).claim(0, 0, 0):
        pass
    assert (outside / "precious").read_text() == "precious"
    kept = {LEFTOVER.format(1), LEFTOVER.format(3), *others}
    assert {path.name for path in left(root)} == kept


def test_a_few_are_deleted_at_a_time(tmp_path: Path) -> None:
    for number in range(MAX_LEFTOVERS + 3):
        (tmp_path / LEFTOVER.format(number)).mkdir(mode=0o700)
    for expected in (3, 0):
        with capacity(RealFileSystem(), tmp_path, 1 << 30).claim(0, 0, 0):
            assert len(left(tmp_path)) == expected


def test_what_the_device_does_not_let_go_of_counts(tmp_path: Path) -> None:
    rig = PathRig(roots=(tmp_path,))
    node = RigNode(rig)
    node.store(BLOCKS[:4])
    assert node.welcome is not None
    rig.close()
    fs, folder = rig.fs, tmp_path / node.welcome.folder
    used_bytes = fs.used_bytes(folder)
    fs.fail("remove_tree", errno.EIO, times=2)
    with pytest.raises(TierIOError, match="removing"):
        remove_namespace(fs, folder)
    room = capacity(fs, tmp_path, used_bytes)
    with pytest.raises(NoSpaceError, match="capacity"):
        with room.claim(0, 0, used_bytes // 2):
            pass
    with room.claim(0, 0, used_bytes // 2):
        assert fs.used_bytes(tmp_path) < used_bytes // 2


def test_a_namespace_behind_a_link_is_none_and_stops_no_other(tmp_path: Path) -> None:
    """As after a move of one model's folder to another disk."""
    rig = PathRig(120, roots=(tmp_path / "path",), real=RealFileSystem())
    moved, other = RigNode(rig, "moved"), RigNode(rig, "other")
    other.store(BLOCKS[:4])
    rig.close()
    assert moved.welcome is not None
    folder = rig.roots[0] / moved.welcome.folder
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert [one.path.name for one in namespaces_under(RealFileSystem(), rig.roots[0])] == [
        other.welcome.folder  # type: ignore[union-attr]
    ]
    rig.start()
    assert RigNode(rig, "other").held(BLOCKS) == BLOCKS[:4] and RigNode(rig, "new").welcome


@pytest.mark.parametrize("fs", [RealFileSystem(), MemoryFileSystem()], ids=["real", "memory"])
def test_when_it_was_closed_it_was_used(tmp_path: Path, fs: FileSystem) -> None:
    """An engine that served for a month is not the first to lose its cache when it is restarted."""
    rig = PathRig(roots=(tmp_path,), real=fs)
    rig.fs.notes = iter(rig.wall, None)
    node = RigNode(rig)
    assert node.welcome is not None
    lock = tmp_path / node.welcome.folder / LOCK
    if lock.exists():
        os.utime(lock, (1.0, 1.0))  # long ago, as the clock goes
    opened_at = fs.modified_at(lock)
    rig.step(seconds=1.0)
    rig.close()
    (found,) = namespaces_under(fs, tmp_path)
    assert found.last_used == fs.modified_at(lock) > opened_at
