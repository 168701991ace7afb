"""The arena inside one process: two opens are two peers, as the locks belong to the open file."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from kvcascade.errors import (
    ClosedError,
    ConfigError,
    FormatError,
    InUseError,
    KVCascadeError,
    NoSpaceError,
)
from kvcascade.tiers.cpu import arena_file as files
from kvcascade.tiers.cpu import prefault
from kvcascade.tiers.cpu.arena import Arena, ArenaRole
from kvcascade.tiers.cpu.arena_file import JOIN_TIMEOUT_S, MAKE_TIMEOUT_S, arena_path, sweep
from kvcascade.tiers.cpu.arena_limits import MachineMemory, check_capacity, probe_machine
from kvcascade.tiers.cpu.header import HEADER_BYTES, ArenaGeometry

GEOMETRY = ArenaGeometry(slots=6, rank_bytes=3000, world_size=2)
SCHEDULER = ArenaRole.scheduler()
ALONE = ArenaRole.scheduler(expect_workers=False)


@dataclass
class FakeTime:
    """A clock that moves when somebody waits."""

    now: float = 0.0
    waits: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def open_arena(
    folder: Path,
    role: ArenaRole,
    geometry: ArenaGeometry = GEOMETRY,
    *,
    engine: str = "engine",
    memory: MachineMemory | None = None,
    time: FakeTime | None = None,
) -> Arena:
    time = time or FakeTime()
    probe = probe_machine if memory is None else (lambda _: memory)
    return Arena.open(
        geometry,
        engine,
        role,
        arena_dir=str(folder),
        clock=time.clock,
        wait=time.wait,
        probe=probe,
    )


def inode(arena: Arena) -> int:
    """Number of the file that is mapped, with or without a name."""
    return os.fstat(arena._fd).st_ino


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_all_roles_see_the_same_bytes(tmp_path: Path) -> None:
    with (
        open_arena(tmp_path, ArenaRole.worker(0)) as first,
        open_arena(tmp_path, ArenaRole.worker(1)) as second,
        open_arena(tmp_path, SCHEDULER) as scheduler,
    ):
        assert inode(first) == inode(second) == inode(scheduler)
        first.slots[4, :3000] = 11
        second.slots[4, 3000:6000] = 22
        row = scheduler.slots[4]
        assert (row[:3000] == 11).all() and (row[3000:6000] == 22).all()
        assert (row[6000:] == 0).all() and (scheduler.slots[3] == 0).all()
        assert len(row) == GEOMETRY.slot_bytes == 8192
        assert scheduler.slots.ctypes.data % 4096 == 0


def test_the_name_goes_when_all_have_mapped(tmp_path: Path) -> None:
    with open_arena(tmp_path, ArenaRole.worker(0)) as first:
        path = arena_path(str(tmp_path), "engine")
        assert names(tmp_path) == [os.path.basename(path)]
        assert os.stat(path).st_mode & 0o777 == 0o600
        with open_arena(tmp_path, ArenaRole.worker(1)):
            assert os.path.exists(path), "the scheduler has still to find it"
            with open_arena(tmp_path, SCHEDULER) as scheduler:
                assert names(tmp_path) == []
                first.slots[0] = 5
                assert (scheduler.slots[0] == 5).all()


def test_a_driver_may_open_the_scheduler_first(tmp_path: Path) -> None:
    with open_arena(tmp_path, ALONE) as scheduler, open_arena(tmp_path, ArenaRole.worker(1)):
        assert scheduler.missing_ranks() == [0]
        assert len(names(tmp_path)) == 1
        with open_arena(tmp_path, ArenaRole.worker(0)):
            assert scheduler.missing_ranks() == [] and names(tmp_path) == []


def test_another_geometry_is_refused_and_named(tmp_path: Path) -> None:
    with open_arena(tmp_path, ArenaRole.worker(0)):
        other = ArenaGeometry(slots=7, rank_bytes=3000, world_size=2)
        with pytest.raises(FormatError, match=r"slots=6.*slots=7.*same configuration"):
            open_arena(tmp_path, ArenaRole.worker(1), other)
        with open_arena(tmp_path, ArenaRole.worker(1)):
            pass


def test_a_rank_cannot_be_taken_twice(tmp_path: Path) -> None:
    with open_arena(tmp_path, ArenaRole.worker(0)) as first:
        with pytest.raises(InUseError, match=f"rank 0 is already there .process {os.getpid()}."):
            open_arena(tmp_path, ArenaRole.worker(0))
        with open_arena(tmp_path, ArenaRole.worker(1)), open_arena(tmp_path, SCHEDULER) as last:
            assert inode(last) == inode(first), "the intruder has done no harm"


def test_two_schedulers_are_refused(tmp_path: Path) -> None:
    with open_arena(tmp_path, ALONE), pytest.raises(InUseError, match="scheduler is already"):
        open_arena(tmp_path, ALONE)


def test_a_second_engine_with_the_same_id_gets_its_own_memory_once_the_first_is_up(
    tmp_path: Path,
) -> None:
    with (
        open_arena(tmp_path, ArenaRole.worker(0)) as a,
        open_arena(tmp_path, ArenaRole.worker(1)),
        open_arena(tmp_path, SCHEDULER),
        open_arena(tmp_path, ArenaRole.worker(0)) as b,
    ):
        assert inode(a) != inode(b)


def test_the_scheduler_makes_nothing_of_its_own(tmp_path: Path) -> None:
    time = FakeTime()
    with pytest.raises(InUseError, match="no worker of this engine made it"):
        open_arena(tmp_path, SCHEDULER, time=time)
    assert names(tmp_path) == []
    assert 0 < time.now <= JOIN_TIMEOUT_S + 1


def test_the_scheduler_names_the_ranks_that_are_missing(tmp_path: Path) -> None:
    with (
        open_arena(tmp_path, ArenaRole.worker(1)),
        pytest.raises(InUseError, match=r"rank \[0\] have not mapped"),
    ):
        open_arena(tmp_path, SCHEDULER)


def test_layout_digests_reach_the_scheduler(tmp_path: Path) -> None:
    with (
        open_arena(tmp_path, ArenaRole.worker(0)),
        open_arena(tmp_path, ArenaRole.worker(1)) as second,
        open_arena(tmp_path, SCHEDULER) as scheduler,
    ):
        second.publish_layout(b"0123456789abcdef")
        assert scheduler.layout_digests() == [None, b"0123456789abcdef"]


def test_a_closed_arena_says_so(tmp_path: Path) -> None:
    arena = open_arena(tmp_path, ArenaRole.worker(0))
    arena.close()
    arena.close()
    assert names(tmp_path) == []
    with pytest.raises(ClosedError):
        arena.slots  # noqa: B018
    with pytest.raises(ClosedError):
        arena.layout_digests()


def test_views_that_outlive_close_stay_valid(tmp_path: Path) -> None:
    arena = open_arena(tmp_path, ArenaRole.worker(0))
    view = memoryview(arena.slots[1])
    arena.close()
    view[:3] = b"xyz"
    assert bytes(view[:3]) == b"xyz"


def test_close_gives_the_rank_back(tmp_path: Path) -> None:
    with open_arena(tmp_path, ArenaRole.worker(1)):
        open_arena(tmp_path, ArenaRole.worker(0)).close()
        # The name went with that close; the next worker makes a new arena.
        with open_arena(tmp_path, ArenaRole.worker(0)) as again:
            assert Path(again.path).exists()


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (MachineMemory(1 << 40, 40_000, 4096, False), "has 39.1 KiB free; lower it"),
        (MachineMemory(30_000, 1 << 40, 4096, False), "29.3 KiB of memory is available; lower"),
    ],
)
def test_too_little_memory_is_refused_before_anything_is_there(
    tmp_path: Path, memory: MachineMemory, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reserve(*_: object) -> bool:
        raise AssertionError("nothing may be allocated")

    monkeypatch.setattr(files, "_reserve", reserve)
    with pytest.raises(ConfigError, match="capacity: the cpu tier asks for 52.0 KiB") as caught:
        open_arena(tmp_path, ArenaRole.worker(0), memory=memory)
    assert words in str(caught.value)
    assert names(tmp_path) == []


def test_memory_of_hugetlbfs_is_not_looked_for_in_the_free_memory(tmp_path: Path) -> None:
    memory = MachineMemory(0, 1 << 40, 1 << 16, True)
    with open_arena(tmp_path, ArenaRole.worker(0), memory=memory) as arena:
        assert os.stat(arena.path).st_size == 1 << 16, "sizes are multiples of its pages"
        check_capacity(1 << 30, str(tmp_path), memory)


def test_a_full_file_system_is_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoSpaceError, match="capacity: 52.0 KiB could not be reserved"):
        open_arena(tmp_path, ArenaRole.worker(0))
    assert names(tmp_path) == []


def test_a_limit_of_file_sizes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(fd: int, size: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", limited)
    with pytest.raises(NoSpaceError, match="raise the limit of file sizes with `ulimit -f`"):
        open_arena(tmp_path, ArenaRole.worker(0))
    assert names(tmp_path) == []


def test_pages_are_reserved(tmp_path: Path) -> None:
    with open_arena(tmp_path, ArenaRole.worker(0)) as arena:
        info = os.stat(arena.path)
        assert info.st_blocks * 512 >= info.st_size == HEADER_BYTES + GEOMETRY.data_bytes


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_of_the_world_is_refused(tmp_path: Path, rank: int) -> None:
    with pytest.raises(ConfigError, match=f"rank {rank} of a world of 2"):
        open_arena(tmp_path, ArenaRole.worker(rank))


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(ConfigError, match="arena_dir: .* is no directory"):
            open_arena(folder, ArenaRole.worker(0))


@pytest.mark.parametrize("kind", ["symlink", "folder", "socket", "open mode"])
def test_something_else_under_the_name_is_left_alone(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(arena_path(str(tmp_path), "engine"))
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    if kind == "symlink":
        path.symlink_to(victim)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            monkeypatch.chdir(path.parent)  # a socket's path may not be long
            listener.bind(path.name)
    else:
        path.write_bytes(b"precious")
        path.chmod(0o644)
    with pytest.raises(KVCascadeError, match="remove it or set another arena_dir"):
        open_arena(tmp_path, ArenaRole.worker(0))
    assert victim.read_bytes() == b"precious"
    assert path.exists()


def leave_behind(folder: Path, engine: str) -> Path:
    """What a killed engine leaves: its file, unlocked."""
    arena = open_arena(folder, ArenaRole.worker(0), engine=engine)
    path = Path(arena.path)
    spare = folder / "spare"
    os.link(path, spare)
    arena.close()
    spare.rename(path)
    return path


def test_opening_removes_what_dead_engines_left(tmp_path: Path) -> None:
    stale = leave_behind(tmp_path, "dead")
    own = leave_behind(tmp_path, "engine")
    inode = own.stat().st_ino
    with open_arena(tmp_path, ArenaRole.worker(0)) as arena:
        assert not stale.exists()
        assert names(tmp_path) == [own.name]
        assert (own.stat().st_ino, arena.path) == (own.stat().st_ino, str(own))
        assert (arena.slots == 0).all() and inode != 0


def test_sweep_leaves_what_lives_and_what_is_not_ours(tmp_path: Path) -> None:
    stale = leave_behind(tmp_path, "dead")
    (tmp_path / "kvcascade-notes.txt").write_text("keep")
    foreign = tmp_path / ("kvcascade-" + "0" * 32)
    foreign.write_bytes(b"no arena at all")
    with open_arena(tmp_path, ArenaRole.worker(0), engine="live") as live:
        leave_behind(tmp_path, "dead")
        assert sweep(str(tmp_path)) == [str(stale)]
        assert os.path.exists(live.path)
    assert names(tmp_path) == sorted(["kvcascade-notes.txt", foreign.name])
    assert sweep(str(tmp_path / "nowhere")) == []
    assert sweep("no\0path") == sweep("no\udcffpath\ud800") == []


def test_a_stub_of_a_maker_that_died_early_is_replaced(tmp_path: Path) -> None:
    path = Path(arena_path(str(tmp_path), "engine"))
    path.touch(0o600)
    with open_arena(tmp_path, ArenaRole.worker(0)) as arena:
        assert arena.path == str(path)


def test_an_arena_whose_maker_is_gone_is_never_joined(tmp_path: Path) -> None:
    """A worker of a dead engine still hangs on its memory; the next engine starts afresh."""
    maker = open_arena(tmp_path, ArenaRole.worker(0))
    hanging = open_arena(tmp_path, ArenaRole.worker(1))
    hanging.slots[:] = 66
    spare = tmp_path / "spare"
    os.link(maker.path, spare)
    maker.close()
    spare.rename(maker.path)
    with (
        open_arena(tmp_path, ArenaRole.worker(0)) as fresh,
        open_arena(tmp_path, ArenaRole.worker(1)) as second,
    ):
        assert inode(fresh) == inode(second) != inode(hanging)
        assert (fresh.slots == 0).all() and (hanging.slots == 66).all()
    hanging.close()


def test_a_maker_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second peer comes while the first is still reserving memory, and never gets on."""
    time, caught = FakeTime(), []

    def reserve(*asked: Any) -> bool:
        with pytest.raises(InUseError, match="was not ready within 600 s") as error:
            open_arena(tmp_path, ArenaRole.worker(1), time=time)
        caught.append(error)
        return real(*asked)

    real = files._reserve
    monkeypatch.setattr(files, "_reserve", reserve)
    open_arena(tmp_path, ArenaRole.worker(0)).close()
    assert len(caught) == 1 and time.now == pytest.approx(MAKE_TIMEOUT_S)


def test_a_peer_waits_until_the_maker_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, peer_waits, maker_is_ready = files._reserve, Event(), Event()
    peers: list[Future[Arena]] = []

    def wait(seconds: float) -> None:
        peer_waits.set()
        assert maker_is_ready.wait(60)

    def join() -> Arena:
        role, folder = ArenaRole.worker(1), str(tmp_path)
        return Arena.open(GEOMETRY, "engine", role, arena_dir=folder, wait=wait)

    def reserve(*asked: Any) -> bool:
        peers.append(pool.submit(join))
        assert peer_waits.wait(60), "the peer found the file and is not let in"
        return real(*asked)

    monkeypatch.setattr(files, "_reserve", reserve)
    with ThreadPoolExecutor(1) as pool, open_arena(tmp_path, ArenaRole.worker(0)) as maker:
        maker_is_ready.set()
        with peers[0].result(60) as peer:
            assert inode(peer) == inode(maker)


@pytest.mark.parametrize("role", [ArenaRole.worker(1), ALONE], ids=["worker", "scheduler"])
def test_prefault_changes_no_byte(tmp_path: Path, role: ArenaRole) -> None:
    geometry = ArenaGeometry(40, 5000, 2)
    with open_arena(tmp_path, role, geometry) as arena:
        data = np.random.default_rng(0).integers(0, 256, arena.slots.shape, dtype=np.uint8)
        arena.slots[:] = data
        arena.prefault()
        assert (arena.slots == data).all()


def test_prefault_on_an_old_kernel_touches_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched = []

    def no_such_advice(address: int, length: int, advice: int) -> int:
        ctypes.set_errno(22)
        return -1

    def touch(start: int, length: int) -> None:
        touched.append(length)
        real(start, length)

    real = prefault.touch
    monkeypatch.setattr(prefault, "madvise", no_such_advice)
    monkeypatch.setattr(prefault, "touch", touch)
    with open_arena(tmp_path, ALONE, ArenaGeometry(10, 4096, 1)) as arena:
        arena.slots[:] = 9
        arena.prefault()
        assert (arena.slots == 9).all()
    assert sum(touched) == 10 * 4096


def test_prefault_without_memory_is_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(address: int, length: int, advice: int) -> int:
        ctypes.set_errno(14)
        return -1

    monkeypatch.setattr(prefault, "madvise", no_memory)
    with open_arena(tmp_path, ALONE) as arena, pytest.raises(NoSpaceError, match="faulting in"):
        arena.prefault()


def test_this_machine_can_be_asked(tmp_path: Path) -> None:
    memory = probe_machine(str(tmp_path))
    assert memory.available_bytes > 0 and memory.dir_free_bytes > 0
    assert memory.block_bytes == 4096 and not memory.huge
    with pytest.raises(KVCascadeError):
        probe_machine(str(tmp_path / "nowhere"))
