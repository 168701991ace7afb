"""The arena between processes: kill -9 of any of them, before and after the scheduler is in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcascade.errors import InUseError
from kvcascade.tiers.cpu.arena import Arena, ArenaRole
from kvcascade.tiers.cpu.arena_file import sweep
from kvcascade.tiers.cpu.header import ArenaGeometry

ROOT = Path(__file__).resolve().parents[2]
GEOMETRY = ArenaGeometry(slots=4, rank_bytes=4096, world_size=2)

CHILD = """
import os, sys
from kvcascade.errors import KVCascadeError
from kvcascade.tiers.cpu.arena import Arena, ArenaRole
from kvcascade.tiers.cpu.header import ArenaGeometry
folder, rank = sys.argv[1], sys.argv[2]
role = ArenaRole.scheduler() if rank == "scheduler" else ArenaRole.worker(int(rank))
try:
    arena = Arena.open(ArenaGeometry(4, 4096, 2), "engine", role, arena_dir=folder)
except KVCascadeError as error:
    print(type(error).__name__, flush=True)
    raise SystemExit(1)
print(os.fstat(arena._fd).st_ino, flush=True)
for line in sys.stdin:
    if line.startswith("write"):
        arena.slots[:, 4096 * role.rank : 4096 * (role.rank + 1)] = int(line.split()[1])
        print("done", flush=True)
    elif line.startswith("read"):
        print(int(arena.slots[0, 0]), int(arena.slots[0, 4096]), flush=True)
arena.close()
"""


class Peer:
    """A child process that holds the arena and does as it is told."""

    def __init__(self, folder: Path, rank: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder), rank],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.rank = rank

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.line()

    def end(self) -> int:
        """A clean exit."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        code = self.process.wait(60)
        self.process.stdout.close()
        return code

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(60)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


class Peers:
    """Starts peers, and ends those a test leaves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Peer] = []

    def start(self, *ranks: str) -> list[Peer]:
        started = [Peer(self.folder, rank) for rank in ranks]
        self.all += started
        return started


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    group = Peers(tmp_path)
    yield group
    for peer in group.all:
        peer.kill()  # closes the pipes of those that have ended by themselves, too


def names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]


def test_workers_that_start_at_once_and_the_scheduler_share_one_arena(
    peers: Peers, tmp_path: Path
) -> None:
    workers = peers.start("0", "1")
    inodes = {worker.line() for worker in workers}
    with Arena.open(GEOMETRY, "engine", ArenaRole.scheduler(), arena_dir=str(tmp_path)) as arena:
        assert inodes == {str(os.fstat(arena._fd).st_ino)}
        assert names(tmp_path) == []
        assert [worker.ask(f"write {5 + i}") for i, worker in enumerate(workers)] == ["done"] * 2
        assert (arena.slots[:, :4096] == 5).all() and (arena.slots[:, 4096:] == 6).all()
    assert [worker.end() for worker in workers] == [0, 0]
    assert names(tmp_path) == []


def test_killing_everything_after_start_up_leaves_nothing(peers: Peers, tmp_path: Path) -> None:
    workers = peers.start("0", "1")
    for worker in workers:
        worker.line()
    (scheduler,) = peers.start("scheduler")
    assert scheduler.line()
    assert names(tmp_path) == []
    for peer in [*workers, scheduler]:
        peer.kill()
    assert names(tmp_path) == []


def test_the_others_keep_their_memory_when_one_is_killed(peers: Peers, tmp_path: Path) -> None:
    workers = peers.start("0", "1")
    for worker in workers:
        worker.line()
    with Arena.open(GEOMETRY, "engine", ArenaRole.scheduler(), arena_dir=str(tmp_path)) as arena:
        workers[1].ask("write 9")
        workers[1].kill()
        assert arena.missing_ranks() == [1]
        assert (arena.slots[:, 4096:] == 9).all()
        assert workers[0].ask("read") == "0 9"


def test_killing_workers_before_the_scheduler_leaves_a_file_that_the_next_start_removes(
    peers: Peers, tmp_path: Path
) -> None:
    workers = peers.start("0", "1")
    for worker in workers:
        worker.line()
    for worker in workers:
        worker.kill()
    assert len(names(tmp_path)) == 1
    with pytest.raises(InUseError, match="no worker of this engine made it"):
        Arena.open(
            GEOMETRY,
            "engine",
            ArenaRole.scheduler(),
            arena_dir=str(tmp_path),
            clock=iter(range(0, 1000, 20)).__next__,
            wait=lambda seconds: None,
        )
    assert names(tmp_path) == [], "even a scheduler that fails has swept it away"
    with Arena.open(GEOMETRY, "engine", ArenaRole.worker(0), arena_dir=str(tmp_path)) as arena:
        assert (arena.slots == 0).all()


def test_a_killed_peer_of_another_engine_is_swept(peers: Peers, tmp_path: Path) -> None:
    (worker,) = peers.start("0")
    worker.line()
    assert sweep(str(tmp_path)) == [], "it lives"
    worker.kill()
    assert len(sweep(str(tmp_path))) == 1
    assert names(tmp_path) == []


def test_two_engines_that_share_an_id_do_not_mix(peers: Peers, tmp_path: Path) -> None:
    first, second = peers.start("0", "0")
    answers = [first.line(), second.line()]
    assert "InUseError" in answers and sum(answer.isdigit() for answer in answers) == 1


def test_an_exception_at_start_up_leaves_nothing(peers: Peers, tmp_path: Path) -> None:
    (worker,) = peers.start("0")
    worker.line()
    assert worker.end() == 0
    assert names(tmp_path) == []
    assert os.listdir(tmp_path) == []
