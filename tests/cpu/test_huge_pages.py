"""Huge pages for shared memory: who is asked, what is asked for, and how it is mapped."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from kvcascade.tiers.cpu import arena_file as files
from kvcascade.tiers.cpu import huge_pages
from kvcascade.tiers.cpu.arena import Arena, ArenaRole
from kvcascade.tiers.cpu.arena_limits import MachineMemory, probe_machine
from kvcascade.tiers.cpu.header import ArenaGeometry, round_up
from kvcascade.tiers.cpu.huge_pages import (
    GATHER_TIMEOUT_S,
    HUGE_PAGE_BYTES,
    PIECE_BYTES,
    address_of,
    gather,
    has_huge_pages,
    map_file,
    may_share_huge_pages,
)

COLLAPSE = 25
MEMORY = MachineMemory(1 << 40, 1 << 40, 4096, False, may_gather=True)


@pytest.fixture
def fd() -> Iterator[int]:
    """Shared memory of four pieces and a bit, without a page yet."""
    with TemporaryFile(dir="/dev/shm") as file:
        os.ftruncate(file.fileno(), 4 * PIECE_BYTES + 4096)
        yield file.fileno()


@dataclass
class FakeKernel:
    """Collapses nothing, and says it did; or that it did not, from some call on."""

    fails_from: int = 1 << 60
    asked: list[int] = field(default_factory=list)

    def madvise(self, address: int, length: int, advice: int) -> int:
        if advice != COLLAPSE:
            return 0
        self.asked.append(length)
        return -1 if len(self.asked) > self.fails_from else 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    kernel = FakeKernel()
    monkeypatch.setattr(huge_pages, "madvise", kernel.madvise)
    return kernel


@pytest.mark.parametrize(
    ("enabled", "shared", "expected"),
    [
        ("always [madvise] never", "always advise [never] deny force", (True, True)),
        ("[always] madvise never", "always advise never [deny] force", (True, False)),
        ("always madvise [never]", "[always] advise never deny force", (False, False)),
        ("always [madvise] never", None, (True, False)),
        (None, None, (False, False)),
    ],
)
def test_whether_there_are_huge_pages(
    tmp_path: Path, enabled: str | None, shared: str | None, expected: tuple[bool, bool]
) -> None:
    for name, text in (("enabled", enabled), ("shmem_enabled", shared)):
        if text is not None:
            (tmp_path / name).write_text(text + "\n")
    assert (has_huge_pages(tmp_path), may_share_huge_pages(tmp_path)) == expected


@pytest.mark.parametrize("length", [4096, HUGE_PAGE_BYTES + 1, 3 * HUGE_PAGE_BYTES])
def test_a_mapped_file_is_the_file(fd: int, length: int) -> None:
    memory = map_file(fd, length)
    assert len(memory) == length and not memory.readonly
    assert length < HUGE_PAGE_BYTES or address_of(memory) % HUGE_PAGE_BYTES == 0
    memory[length - 3 :] = b"end"
    assert os.pread(fd, 3, length - 3) == b"end"
    os.pwrite(fd, b"start", 0)
    assert bytes(memory[:5]) == b"start"


@pytest.mark.parametrize("page_bytes", [HUGE_PAGE_BYTES, 1 << 30], ids=["2 MiB", "1 GiB"])
def test_nothing_beside_its_room_is_replaced_on_hugetlbfs(
    fd: int, page_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the kernel maps whole pages, as this one here does: `ksys_mmap_pgoff` rounds up."""
    rooms: list[tuple[int, int]] = []
    mapped: list[tuple[int, int]] = []
    make_room = huge_pages.aligned_room

    def noted_room(*what: int) -> tuple[mmap.mmap, memoryview]:
        room, view = make_room(*what)
        rooms.append((address_of(room), address_of(room) + len(room)))
        return room, view

    def map_pages(where: int, length: int, *_: int) -> int:
        mapped.append((where, where + round_up(length, page_bytes)))
        return where

    statvfs = os.statvfs_result((page_bytes, *[0] * 9))
    monkeypatch.setattr(os, "fstatvfs", lambda _: statvfs)
    monkeypatch.setattr(huge_pages, "aligned_room", noted_room)
    monkeypatch.setattr(huge_pages, "_mmap", map_pages)
    for slots in range(1, 40):
        map_file(fd, 3 * HUGE_PAGE_BYTES + slots * (128 << 10))
        (first, last), (start, end) = rooms[-1], mapped[-1]
        assert start % page_bytes == 0 and first <= start and end <= last


def test_it_is_unmapped_with_its_last_view(fd: int) -> None:
    def is_mapped() -> bool:
        return f"{address:x}-" in Path("/proc/self/maps").read_text()

    memory = map_file(fd, HUGE_PAGE_BYTES)
    address, part = address_of(memory), memory[4096:8192]
    del memory
    assert is_mapped()
    del part
    assert not is_mapped()


def test_a_file_that_cannot_be_mapped_there_is_mapped_anywhere(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_mmap", lambda *_: -1)
    map_file(fd, HUGE_PAGE_BYTES)[:2] = b"ab"
    assert os.pread(fd, 2, 0) == b"ab"


def test_all_whole_huge_pages_are_asked_for(fd: int, kernel: FakeKernel) -> None:
    length = 2 * PIECE_BYTES + 3 * HUGE_PAGE_BYTES + 4096
    assert gather(fd, length, lambda: 0.0)
    assert sorted(kernel.asked) == [3 * HUGE_PAGE_BYTES, PIECE_BYTES, PIECE_BYTES]


def test_a_kernel_that_has_none_is_asked_once(fd: int, kernel: FakeKernel) -> None:
    kernel.fails_from = 0
    assert not gather(fd, 4 * PIECE_BYTES, lambda: 0.0)
    assert kernel.asked == [PIECE_BYTES]


def test_one_piece_of_four_without_is_too_much(fd: int, kernel: FakeKernel) -> None:
    kernel.fails_from = 3
    assert not gather(fd, 4 * PIECE_BYTES, lambda: 0.0)
    assert len(kernel.asked) == 4


def test_what_takes_too_long_is_left(fd: int, kernel: FakeKernel) -> None:
    clock = count(0, GATHER_TIMEOUT_S / 2)  # begun, first piece, second piece: late
    assert not gather(fd, 4 * PIECE_BYTES, lambda: next(clock))
    assert kernel.asked == [PIECE_BYTES]


def test_too_small_or_no_room_and_nobody_is_asked(
    fd: int, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    assert not gather(fd, HUGE_PAGE_BYTES - 1, lambda: 0.0)
    monkeypatch.setattr(os, "pwrite", full)
    assert not gather(fd, 4 * PIECE_BYTES, lambda: 0.0)
    assert kernel.asked == []


def test_what_this_kernel_gives_is_mapped_by_huge_pages(fd: int) -> None:
    if not probe_machine("/dev/shm").may_gather or not gather(fd, 4 * PIECE_BYTES, lambda: 0.0):
        pytest.skip("this machine has no huge pages for shared memory")
    memory = map_file(fd, 4 * PIECE_BYTES)
    before = _mapped_kib("ShmemPmdMapped")
    memory[:: HUGE_PAGE_BYTES // 2] = bytes(len(memory[:: HUGE_PAGE_BYTES // 2]))
    assert (_mapped_kib("ShmemPmdMapped") - before) << 10 == 4 * PIECE_BYTES
    assert not any(memory[:: mmap.PAGESIZE])


def _mapped_kib(name: str) -> int:
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@pytest.mark.parametrize("is_gathered", [False, True])
def test_all_who_map_an_arena_know_and_who_takes_it_over_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gathered: bool
) -> None:
    def opened(engine: str, role: ArenaRole) -> Arena:
        return Arena.open(geometry, engine, role, arena_dir=str(tmp_path), probe=lambda _: MEMORY)

    monkeypatch.setattr(files, "gather", lambda *_: is_gathered)
    geometry = ArenaGeometry(slots=8, rank_bytes=4096, world_size=1, kept=True)
    with opened("first", ArenaRole.worker(0)) as worker:
        with opened("first", ArenaRole.scheduler()) as scheduler:
            assert worker.is_huge == scheduler.is_huge == is_gathered
    monkeypatch.setattr(files, "gather", None)
    with opened("second", ArenaRole.worker(0)) as heir:
        assert heir.is_huge == is_gathered


def test_hugetlbfs_needs_no_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "gather", None)
    memory = MachineMemory(0, 1 << 40, HUGE_PAGE_BYTES, True)
    geometry, role = ArenaGeometry(4, 4096, 1), ArenaRole.worker(0)
    with Arena.open(
        geometry, "engine", role, arena_dir=str(tmp_path), probe=lambda _: memory
    ) as arena:
        assert arena.is_huge
