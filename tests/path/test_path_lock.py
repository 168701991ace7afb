"""Election of a writer by the kernel's lock, and its socket behind a path of any length."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.forks import idle_fork, said_by_fork
from support.memory_file_system import MemoryFileSystem

from kvcascade.errors import ConfigError, NoSpaceError, TierIOError
from kvcascade.tiers.nvme.disk.filesystem import FileSystem, RealFileLock, RealFileSystem
from kvcascade.tiers.nvme.path import path_lock
from kvcascade.tiers.nvme.path.path_lock import BACKLOG, LOCK_NAME, PathDoor, try_lead
from kvcascade.tiers.nvme.path.writer.path_options import PATH_FOLDER

HOLDER = """
import sys
from pathlib import Path
from typing import Any
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.path_lock import try_lead
assert try_lead(RealFileSystem(), Path(sys.argv[1])) is not None
print("leads", flush=True)
sys.stdin.read()
"""


def file_systems(tmp_path: Path) -> list[tuple[FileSystem, Path]]:
    memory = MemoryFileSystem()
    memory.make_dir(Path("/tier"))
    return [(RealFileSystem(), tmp_path), (memory, Path("/tier"))]


def test_one_of_two_leads_and_the_next_one_after_it(tmp_path: Path) -> None:
    for fs, root in file_systems(tmp_path):
        first = try_lead(fs, root)
        assert first is not None and first.is_in_place()
        assert try_lead(fs, root) is None
        first.release()
        assert not first.is_in_place()
        second = try_lead(fs, root)
        assert second is not None
        second.release()


def test_a_killed_process_leads_no_more(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"leads\n"
        assert try_lead(RealFileSystem(), tmp_path) is None
    finally:
        child.kill()
        child.communicate(timeout=30)
    assert try_lead(RealFileSystem(), tmp_path) is not None


def test_a_leader_sees_that_its_tier_was_replaced(tmp_path: Path) -> None:
    lead = try_lead(RealFileSystem(), tmp_path)
    assert lead is not None
    door = PathDoor(tmp_path)
    os.rename(tmp_path / PATH_FOLDER, tmp_path / "elsewhere")
    assert not lead.is_in_place()
    assert not door.is_in_place()
    successor = try_lead(RealFileSystem(), tmp_path)
    assert successor is not None and successor.is_in_place()
    assert not lead.is_in_place()
    shutil.rmtree(tmp_path / PATH_FOLDER)
    assert not successor.is_in_place()
    door.close()


def test_the_lock_in_memory_tells_of_a_replaced_file_too() -> None:
    fs = MemoryFileSystem()
    fs.make_dir(Path("/tier"))
    lead = try_lead(fs, Path("/tier"))
    assert lead is not None
    fs.rename(Path("/tier/.kvcascade"), Path("/tier/elsewhere"))
    assert not lead.is_in_place()


@pytest.mark.parametrize("length", [20, 200])
def test_a_socket_is_reached_behind_a_path_of_any_length(tmp_path: Path, length: int) -> None:
    root = tmp_path / ("x" * length)
    root.mkdir()
    lead = try_lead(RealFileSystem(), root)
    assert lead is not None
    door = PathDoor(root)
    assert door.connect() is None
    for _ in range(2):  # the second replaces what a dead writer left
        listener = door.listen()
        link = door.connect()
        assert link is not None
        peer, _ = listener.accept()
        link.sendall(b"hello")
        assert peer.recv(5) == b"hello"
        for each in (link, peer, listener):
            each.close()
        assert door.connect() is None
    assert (root / PATH_FOLDER / "writer.sock").stat().st_mode & 0o777 == 0o600
    door.close()
    lead.release()


def test_a_full_backlog_is_no_error_and_a_later_connection_succeeds(tmp_path: Path) -> None:
    lead = try_lead(RealFileSystem(), tmp_path)
    assert lead is not None
    door = PathDoor(tmp_path)
    with ExitStack() as held:
        held.callback(lead.release)
        held.callback(door.close)
        listener = held.enter_context(door.listen())
        waiting = 0
        while (link := door.connect()) is not None:
            held.enter_context(link)
            waiting += 1
        assert waiting >= BACKLOG
        held.enter_context(listener.accept()[0])
        link = door.connect()
        assert link is not None
        held.enter_context(link)


def test_a_path_that_others_may_write_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / PATH_FOLDER).mkdir()
    (tmp_path / PATH_FOLDER).chmod(0o777)
    with pytest.raises(ConfigError, match="as one user"):
        try_lead(RealFileSystem(), tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        try_lead(RealFileSystem(), tmp_path / "missing")


def test_a_lock_ends_with_its_process_although_a_forked_one_lives(tmp_path: Path) -> None:
    lock = try_lead(RealFileSystem(), tmp_path)
    assert isinstance(lock, RealFileLock)
    assert said_by_fork(lock.is_in_place) == "False" and lock.is_in_place()
    with idle_fork():
        os.close(lock._fd)  # as the kernel does if the process is killed
        lock._fd = -1
        place = tmp_path / PATH_FOLDER / LOCK_NAME
        RealFileSystem().lock(place, wait_s=10.0).release()  # the fork may just begin


@pytest.mark.parametrize("ask", [PathDoor.listen, PathDoor.connect])
def test_no_descriptor_for_a_socket_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[PathDoor], object]
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    (tmp_path / PATH_FOLDER).mkdir()
    door = PathDoor(tmp_path)
    monkeypatch.setattr(socket, "socket", none_left)
    with pytest.raises(TierIOError, match="raise the limit with `ulimit -n`"):
        ask(door)
    door.close()


def test_a_full_disk_has_room_for_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XFS needs about 256 KiB of free space for a new file, and the disk has none left."""
    lead = try_lead(RealFileSystem(), tmp_path)
    assert lead is not None
    door, room = PathDoor(tmp_path), tmp_path / PATH_FOLDER / "writer.room"
    monkeypatch.setattr(path_lock, "is_xfs", lambda _: False)
    door.listen().close()
    assert not room.exists(), "others need none"
    monkeypatch.setattr(path_lock, "is_xfs", lambda _: True)
    door.listen().close()
    assert room.stat().st_size == 512 << 10
    assert room.stat().st_blocks * 512 >= 512 << 10

    class FullDisk(socket.socket):
        def bind(self, address: Any) -> None:
            if room.exists() or not was_there:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().bind(address)

    was_there = True
    monkeypatch.setattr(socket, "socket", FullDisk)
    door.listen().close()
    assert room.exists(), "there is room for the next one"
    was_there = False
    with pytest.raises(NoSpaceError, match="writer.sock"):
        door.listen()
    door.close()
    lead.release()
