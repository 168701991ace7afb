"""A namespace leaves: at once for whoever asks for it, and for good even if its remover dies."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.cache_rig import call
from support.memory_file_system import MemoryFileSystem
from support.nvme_peer import Peer
from support.nvme_rig import Rig, config_for, filled, key

from kvcascade.errors import InUseError, NoSpaceError
from kvcascade.tiers.nvme.disk.filesystem import FileSystem, RealFileSystem
from kvcascade.tiers.nvme.namespace import (
    LOCK,
    MAX_LEFTOVERS,
    NamespaceKey,
    namespaces_under,
    open_namespace,
    remove_namespace,
)
from kvcascade.tiers.nvme.tier import NvmeTierConfig
from kvcascade.tiers.nvme.writer.capacity import SpaceBudget

SLOTS = 32
LEFTOVER = ".removing-model-0123456789ab.{:016x}"


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


@pytest.fixture
def config(tmp_path: Path) -> NvmeTierConfig:
    return config_for([tmp_path], slots=SLOTS)


def left(root: Path) -> list[Path]:
    """What is left of removed namespaces."""
    return sorted(root.glob(".removing-*"))


@pytest.mark.parametrize("gone", ["", "namespace.json", "lock namespace.json index", "segments"])
def test_a_remover_that_dies_leaves_nothing_of_that_name(
    config: NvmeTierConfig, tmp_path: Path, gone: str
) -> None:
    folder = filled(config, SLOTS)
    with pytest.raises(KeyboardInterrupt):
        remove_namespace(Dying(gone), folder)
    assert not folder.exists() and len(left(tmp_path)) == 1
    assert namespaces_under(RealFileSystem(), tmp_path) == []
    assert "no namespace" in call("inspect", tmp_path, "--json").document["message"]
    other = config_for([tmp_path], slots=4 * SLOTS, per_segment=16)
    rig = Rig(other)  # laid out anew, with another capacity
    assert left(tmp_path) == [] and rig.tier.report.blocks == 0
    rig.store_bit_by_bit([key(i) for i in range(SLOTS)])
    assert all(rig.check(key(i)) for i in range(SLOTS))
    rig.close()


def test_who_comes_while_it_is_deleted_is_not_disturbed(config: NvmeTierConfig) -> None:
    folder = filled(config, SLOTS)
    peers: list[Peer] = []

    class Overtaken(RealFileSystem):
        def remove_tree(self, path: Path) -> None:
            peers.append(Peer(replace(config, ready_bytes=1)))
            peers[0].store(range(100, 104))
            super().remove_tree(path)

    assert remove_namespace(Overtaken(), folder)
    with peers[0] as first, Peer(replace(config, ready_bytes=1)) as second:
        second.store(range(200, 204))
        assert set(first.ask("own")).isdisjoint(second.ask("own"))
        everything = [*range(SLOTS), *range(100, 104), *range(200, 204)]
        assert first.hits(everything) == second.hits(everything) == 8


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


def test_only_what_is_ours_is_deleted(config: NvmeTierConfig, tmp_path: Path) -> None:
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
    Rig(replace(config, paths=(root,))).close()
    assert (outside / "precious").read_text() == "precious"
    kept = {LEFTOVER.format(1), LEFTOVER.format(3), *others}
    assert {path.name for path in left(root)} == kept


def test_a_few_are_deleted_at_a_time(tmp_path: Path) -> None:
    for number in range(MAX_LEFTOVERS + 3):
        (tmp_path / LEFTOVER.format(number)).mkdir(mode=0o700)
    budget = SpaceBudget(RealFileSystem(), [tmp_path / "own"], 1 << 30, 0)
    for expected in (3, 0):
        with budget.claim(0, 0):
            assert len(left(tmp_path)) == expected


def test_what_the_device_does_not_let_go_of_counts(config: NvmeTierConfig, tmp_path: Path) -> None:
    fs = MemoryFileSystem()
    old = replace(config, key=NamespaceKey("old", {"n": 1}))
    Rig(old, fs=fs).close()
    used_bytes = fs.used_bytes(tmp_path)
    fs.fail("remove_tree", errno.EIO, times=2)
    with pytest.raises(OSError, match="removing"):
        remove_namespace(fs, tmp_path / old.key.directory_name)
    budget = SpaceBudget(fs, [tmp_path / "own"], used_bytes, 0)
    with pytest.raises(NoSpaceError, match="over all namespaces"):
        with budget.claim(0, used_bytes // 2):
            pass
    with budget.claim(0, used_bytes // 2):
        assert fs.used_bytes(tmp_path) < used_bytes // 2


@pytest.mark.parametrize("fs", [RealFileSystem(), MemoryFileSystem()], ids=["real", "memory"])
def test_when_it_was_closed_it_was_used(tmp_path: Path, fs: FileSystem) -> None:
    """An engine that served for a month is not the first to lose its cache when it is restarted."""
    fs.make_dir(tmp_path)
    namespace = open_namespace(fs, [tmp_path], NamespaceKey("served", {"model": "m"}))
    namespace.owners.leave_gate()
    lock = namespace.folders[0] / LOCK
    if lock.exists():
        os.utime(lock, (1.0, 1.0))  # long ago, as the clock goes
    opened_at = fs.modified_at(lock)
    namespace.close()
    (found,) = namespaces_under(fs, tmp_path)
    assert found.last_used == fs.modified_at(lock) > opened_at
