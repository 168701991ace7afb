"""Namespaces that cannot be opened while a writer begins: they are kept, and opened later."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from support.memory_file_system import MemoryFileSystem
from support.path_rig import ROOT, PathRig, RigNode

from kvcascade.errors import TierIOError
from kvcascade.tiers.nvme.disk.filesystem import File, FileLock, RealFileSystem
from kvcascade.tiers.nvme.namespace import DESCRIPTION, LOCK
from kvcascade.tiers.nvme.path.path_messages import Committed
from kvcascade.tiers.nvme.path.writer.path_capacity import RETRY_AFTER_S

WIDE = 300
"""Segments of a path that has room for three namespaces and more."""
COLD, WARM = range(0, 40), range(100, 180)
"""Blocks of two namespaces."""
READS = 3
"""Times that a writer reads the description of each namespace at its start."""


class LacksFiles(MemoryFileSystem):
    """Some calls for one name fail, because the process has too many open files."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_at: Path | None = None
        self.times = 0
        """Number of calls that fail from now on."""

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> File:
        self._check(path)
        return super().open(path, create=create, direct=direct)

    def lock(self, path: Path, *, shared: bool = False, wait_s: float = 0.0) -> FileLock:
        self._check(path)
        return super().lock(path, shared=shared, wait_s=wait_s)

    def _check(self, path: Path) -> None:
        if path == self.fails_at and self.times > 0:
            self.times -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))


def folder_of(node: RigNode, root: Path = ROOT) -> Path:
    """Directory of the namespace of a node."""
    assert node.welcome is not None
    return root / node.welcome.folder


def fill(node: RigNode, keys: range) -> None:
    """Store blocks, and wait for segments."""
    for start in range(keys.start, keys.stop, 8):
        node.store(range(start, start + 8), steps=100)
        node.rig.step(seconds=1.0)


def with_two(rig: PathRig) -> tuple[Path, Path]:
    """Store blocks of a cold and of a warm namespace; return their directories."""
    cold, warm = RigNode(rig, "cold"), RigNode(rig, "warm")
    fill(cold, COLD)
    fill(warm, WARM)
    rig.close()
    return folder_of(cold, rig.roots[0]), folder_of(warm, rig.roots[0])


@pytest.mark.parametrize("times", range(1, READS + 2))
@pytest.mark.parametrize("name", [DESCRIPTION, LOCK])
def test_an_error_that_passes_costs_no_namespace(
    name: str, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The next segment is made in room that no namespace has, not in that of a warm cache."""
    fs = LacksFiles()
    rig = PathRig(WIDE, real=fs)
    _, warm = with_two(rig)
    fs.fails_at, fs.times = warm / name, times
    rig.start()
    is_last_read = name == LOCK or times >= READS
    assert caplog.text.count("cannot be opened for now, and is kept") == is_last_read
    fs.times = 0
    assert RigNode(rig, "new").store([1]) == [Committed.OK]
    capacity = rig.writer.path.space.capacity
    with capacity.claim(0, 0, capacity.share_bytes):
        assert fs.exists(warm)
    assert RigNode(rig, "warm").held(WARM) == list(WARM)


def test_what_could_not_be_opened_counts_and_gives_its_room_later() -> None:
    fs = LacksFiles()
    rig = PathRig(WIDE, real=fs)
    cold, warm = with_two(rig)
    rig.start()
    space = rig.writer.path.space
    taken = space.own_bytes(0)
    rig.kill()
    fs.drop_locks()
    fs.fails_at, fs.times = cold / LOCK, 1
    rig.start()
    space = rig.writer.path.space
    assert space.own_bytes(0) == taken
    oldest = space.idle.oldest(None)
    assert oldest is not None and oldest[0] == warm.name, "the other one rests"
    rig.wall.now_s -= 6 * 3600.0  # the clock is set right
    rig.step(seconds=RETRY_AFTER_S)
    assert space.take_coldest(None, {0})
    rig.step()
    assert cold.name in rig.writer.namespaces


def test_a_writer_begins_later_if_a_namespace_cannot_be_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would take the room of that namespace for free."""
    rig = PathRig(WIDE, roots=(tmp_path,), real=RealFileSystem())
    _, warm = with_two(rig)

    def lacking(path: str) -> object:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", lacking)
        for _ in range(2):
            with pytest.raises(TierIOError, match="ulimit -n"):
                rig.start()
    RealFileSystem().lock(warm / LOCK).release()
    rig.start()
    assert RigNode(rig, "warm").held(WARM) == list(WARM)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_namespace_that_another_program_removes_at_the_start_is_forgotten(
    is_last: bool, tmp_path: Path
) -> None:
    class Removes(RealFileSystem):
        """Between the list and the look, somebody removes a namespace."""

        reads = 0

        def read(self, path: Path, limit: int) -> bytes:
            data = super().read(path, limit)
            if path.name == DESCRIPTION and path.parent.name.startswith("warm"):
                self.reads += 1
                if self.reads == READS - 1 + is_last:
                    shutil.rmtree(path.parent)
            return data

    rig = PathRig(WIDE, roots=(tmp_path,), real=RealFileSystem())
    cold, warm = with_two(rig)
    rig.files = Removes()
    rig.start()
    assert not RigNode(rig, "warm").held(WARM)
    assert RigNode(rig, "cold").held(COLD) == list(COLD)
