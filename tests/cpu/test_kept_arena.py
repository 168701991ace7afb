"""An arena that outlives its processes: taken over complete, by the same namespace only."""

from __future__ import annotations

import fcntl
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cascade import key
from support.children import Start

from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.cpu import arena_file
from kvcascade.tiers.cpu.arena import Arena, ArenaRole
from kvcascade.tiers.cpu.arena_file import (
    TURN_TIMEOUT_S,
    kept_arenas,
    sweep,
)
from kvcascade.tiers.cpu.cpu_backend import CpuBackend
from kvcascade.tiers.cpu.header import ArenaGeometry, read_record
from kvcascade.tiers.cpu.locks import try_flock, turn_in
from kvcascade.tiers.cpu.slot_table import (
    MAX_KEY_BYTES,
    NO_EPOCH,
    RECORD_BYTES,
    KeptDirectory,
    SlotTable,
    table_bytes,
)
from kvcascade.tiers.policies import create
from kvcascade.tools.commands.shm.kept_arenas import drop_kept, kept_header

GEOMETRY = ArenaGeometry(slots=8, rank_bytes=4096, world_size=1, kept=True)
OURS, THEIRS = b"o" * 32, b"t" * 32
WORKER, SCHEDULER = ArenaRole.worker(0), ArenaRole.scheduler()

OWNER = """
import os, signal, sys
from kvcascade.tiers.base import BlockHash
from kvcascade.tiers.cpu.arena import Arena, ArenaRole
from kvcascade.tiers.cpu.header import ArenaGeometry
geometry = ArenaGeometry(8, 4096, 1, kept=True)
worker = Arena.open(geometry, "first", ArenaRole.worker(0), arena_dir=sys.argv[1])
scheduler = Arena.open(geometry, "first", ArenaRole.scheduler(), arena_dir=sys.argv[1])
worker.slots[3] = 7
table = scheduler.slot_table()
table.begin(b"o" * 32)
table.mark([BlockHash(b"block")], [3])
print("ready", flush=True)
sys.stdin.read()
"""


def open_both(folder: Path, engine: str) -> tuple[Arena, Arena]:
    worker = Arena.open(GEOMETRY, engine, WORKER, arena_dir=str(folder))
    return worker, Arena.open(GEOMETRY, engine, SCHEDULER, arena_dir=str(folder))


def table_of(slots: int) -> tuple[SlotTable, bytearray]:
    import numpy as np

    memory = bytearray(table_bytes(slots))
    return SlotTable(np.frombuffer(memory, np.uint8)), memory


def test_what_is_complete_is_there_for_the_next_engine(tmp_path: Path) -> None:
    worker, scheduler = open_both(tmp_path, "first")
    assert not scheduler.slot_table().begin(OURS)
    worker.slots[5] = 42
    scheduler.slot_table().mark([key(1)], [5])
    worker.close()
    scheduler.close()
    assert len(kept_arenas(str(tmp_path))) == 1
    worker, scheduler = open_both(tmp_path, "second")
    assert scheduler.slot_table().begin(OURS)
    assert scheduler.slot_table().complete() == ([key(1)], [5])
    assert (worker.slots[5] == 42).all()
    worker.close()
    scheduler.close()
    assert len(os.listdir(tmp_path)) == 1, "it is the same file still"


def test_after_kill_9_too_and_never_from_the_living(tmp_path: Path, child: Start) -> None:
    owner = child(OWNER, tmp_path)
    (kept,) = kept_arenas(str(tmp_path))
    header = kept_header(kept)
    assert header is not None and header[1], "a live process holds it"
    assert not drop_kept(kept)
    other, others_scheduler = open_both(tmp_path, "other")
    assert not others_scheduler.slot_table().begin(OURS), "a new, empty arena"
    owner.kill()
    owner.wait(60)
    worker, scheduler = open_both(tmp_path, "second")
    assert scheduler.slot_table().begin(OURS)
    assert scheduler.slot_table().complete() == ([BlockHash(b"block")], [3])
    assert (worker.slots[3] == 7).all()
    for arena in (worker, scheduler, other, others_scheduler):
        arena.close()


def test_ranks_that_come_together_take_the_same_arena_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes while the first has the kept arena locked, and has no name for it yet."""
    pair = ArenaGeometry(slots=8, rank_bytes=4096, world_size=2, kept=True)
    second = ArenaRole.worker(1)

    def opened(role: ArenaRole, engine: str, wait: Callable[[float], object]) -> Arena:
        folder = str(tmp_path)
        return Arena.open(pair, engine, role, arena_dir=folder, wait=wait)  # type: ignore[arg-type]

    pause, is_late, link, late = threading.Event(), threading.Event(), os.link, list[Arena]()

    def wait(seconds: float) -> None:
        is_late.set()
        pause.wait(seconds)

    def come() -> None:
        late.append(opened(second, "next", wait))
        is_late.set()

    def link_late(*what: object, **more: object) -> None:
        monkeypatch.setattr(os, "link", link)
        peer.start()
        assert is_late.wait(60)
        link(*what, **more)  # type: ignore[arg-type]

    before = [opened(role, "first", pause.wait) for role in (WORKER, second, SCHEDULER)]
    for arena in before:
        arena.close()
    (inode,) = (os.stat(path).st_ino for path in kept_arenas(str(tmp_path)))
    peer = threading.Thread(target=come)
    monkeypatch.setattr(os, "link", link_late)
    first = opened(WORKER, "next", pause.wait)
    peer.join(60)
    assert os.fstat(late[0]._fd).st_ino == os.fstat(first._fd).st_ino == inode
    pids = [read_record(first._mapped(), rank).pid for rank in range(2)]
    assert pids == [os.getpid()] * 2, "a second takeover would have cleared the other's record"
    scheduler = opened(SCHEDULER, "next", pause.wait)
    assert [os.stat(path).st_ino for path in tmp_path.iterdir()] == [inode], "no second arena"
    for arena in (first, *late, scheduler):
        arena.close()


def test_a_stopped_process_in_its_turn_holds_nobody_up(tmp_path: Path) -> None:
    waited = list[float]()
    with turn_in(str(tmp_path), iter(())):
        worker = Arena.open(
            GEOMETRY,
            "first",
            WORKER,
            arena_dir=str(tmp_path),
            wait=waited.append,
            clock=lambda: 0.0,
        )
    assert sum(waited) == pytest.approx(TURN_TIMEOUT_S)
    worker.close()
    with turn_in(str(tmp_path), iter(())):
        pass
    assert len(os.listdir(tmp_path)) <= 1, "a turn leaves nothing behind"


def test_another_namespace_gets_the_memory_but_not_the_blocks(tmp_path: Path) -> None:
    worker, scheduler = open_both(tmp_path, "first")
    scheduler.slot_table().begin(OURS)
    scheduler.slot_table().mark([key(1)], [5])
    worker.close()
    scheduler.close()
    worker, scheduler = open_both(tmp_path, "second")
    assert not scheduler.slot_table().begin(THEIRS)
    assert scheduler.slot_table().complete() == ([], [])
    worker.close()
    scheduler.close()


def test_a_reset_since_then_leaves_nothing_of_it(tmp_path: Path) -> None:
    """By another engine, that is: the one that died had emptied the table if it had known."""
    worker, scheduler = open_both(tmp_path, "first")
    scheduler.slot_table().begin(OURS, 7)
    scheduler.slot_table().mark([key(1)], [5], 7)
    worker.close()
    scheduler.close()
    worker, scheduler = open_both(tmp_path, "second")
    assert not scheduler.slot_table().begin(OURS, 8)
    assert scheduler.slot_table().complete() == ([], [])
    assert scheduler.slot_table().begin(OURS, 8)
    worker.close()
    scheduler.close()


@pytest.mark.parametrize("resets_below", [0, 1], ids=["alone", "over NVMe"])
def test_what_comes_after_a_reset_is_not_for_the_next_engine(resets_below: int) -> None:
    """It may be of weights that were updated in place."""
    epoch = 3
    table, _ = table_of(8)
    table.begin(OURS, epoch)
    backend = CpuBackend(64, 8)
    policy = create("lru", 8, KeptDirectory(8, table, lambda: epoch))

    def store(number: int) -> None:
        (status,) = backend.allocate_blocks([key(number)])
        policy.insert(key(number), status)
        policy.mark_ready([key(number)], [status.block_id])

    store(1)
    assert table.begin(OURS, epoch) and table.complete()[0] == [key(1)]
    policy.clear()
    epoch += resets_below
    store(2)
    assert not table.begin(OURS, epoch) and table.complete()[0] == []


def test_another_shape_is_left_alone(tmp_path: Path) -> None:
    for arena in open_both(tmp_path, "first"):
        arena.close()
    other = ArenaGeometry(slots=9, rank_bytes=4096, world_size=1, kept=True)
    Arena.open(other, "second", WORKER, arena_dir=str(tmp_path)).close()
    assert len(kept_arenas(str(tmp_path))) == 2


def test_sweeping_spares_what_is_kept_and_dropping_does_not(tmp_path: Path) -> None:
    for arena in open_both(tmp_path, "first"):
        arena.close()
    assert sweep(str(tmp_path)) == []
    (kept,) = kept_arenas(str(tmp_path))
    assert not drop_kept(str(tmp_path / "kvcascade-other"))
    assert drop_kept(kept)
    assert os.listdir(tmp_path) == []


def test_nothing_is_kept_without_the_option(tmp_path: Path) -> None:
    geometry = ArenaGeometry(slots=8, rank_bytes=4096, world_size=1)
    worker = Arena.open(geometry, "first", WORKER, arena_dir=str(tmp_path))
    Arena.open(geometry, "first", SCHEDULER, arena_dir=str(tmp_path)).close()
    worker.close()
    assert os.listdir(tmp_path) == []


def test_a_helper_that_still_writes_holds_the_memory(tmp_path: Path) -> None:
    worker, scheduler = open_both(tmp_path, "first")
    helper = scheduler.duplicate()
    worker.close()
    scheduler.close()
    (kept,) = kept_arenas(str(tmp_path))
    header = kept_header(kept)
    assert header is not None and header[1]
    os.close(helper)
    header = kept_header(kept)
    assert header is not None and not header[1]


def test_the_directory_keeps_the_table_true() -> None:
    table, _ = table_of(8)
    table.begin(OURS)
    backend = CpuBackend(64, 8)
    policy = create("lru", 8, KeptDirectory(8, table))
    hashes = [key(i) for i in range(5)]
    statuses = backend.allocate_blocks(hashes)
    policy.insert_many(hashes, statuses)
    assert table.complete() == ([], []), "their bytes are on the way"
    for status in statuses:
        status.ref_cnt = 0
    policy.mark_ready(hashes, [status.block_id for status in statuses])
    assert set(table.complete()[0]) == set(hashes)
    evicted = policy.evict(2, ())
    assert evicted is not None
    policy.remove(hashes[0])
    gone = {hashes[0], *(block_hash for block_hash, _ in evicted)}
    assert set(table.complete()[0]) == set(hashes) - gone
    policy.clear()
    assert table.complete() == ([], [])


def test_slots_that_are_adopted_are_not_handed_out() -> None:
    backend = CpuBackend(64, 8)
    adopted = backend.adopt([2, 5])
    assert [status.block_id for status in adopted] == [2, 5]
    assert [status.ref_cnt for status in adopted] == [0, 0]
    others = backend.allocate_blocks([key(i) for i in range(6)])
    assert sorted(status.block_id for status in others) == [0, 1, 3, 4, 6, 7]
    for status in adopted:
        backend.free(status)
    assert backend.get_num_free_blocks() == 2


@given(st.integers(0, 2**32), st.integers(1, 255))
def test_a_damaged_record_is_no_block(seed: int, flip: int) -> None:
    table, memory = table_of(4)
    table.begin(OURS)
    table.mark([key(i) for i in range(4)], [0, 1, 2, 3])
    place = random.Random(seed).randrange(RECORD_BYTES, len(memory))
    memory[place] ^= flip
    keys, slots = table.complete()
    assert len(keys) == 3 and (place // RECORD_BYTES - 1) not in slots


@pytest.mark.parametrize("length", [1, MAX_KEY_BYTES, MAX_KEY_BYTES + 1])
def test_keys_of_every_length(length: int) -> None:
    table, _ = table_of(2)
    block_hash = BlockHash(b"k" * length)
    table.mark([block_hash], [1])
    assert table.complete() == (([block_hash], [1]) if length <= MAX_KEY_BYTES else ([], []))


TAKER = """
import os, signal, sys
from kvcascade.tiers.cpu.arena import Arena, ArenaRole
from kvcascade.tiers.cpu.header import ArenaGeometry
worker = Arena.open(
    ArenaGeometry(8, 4096, 1, kept=True), "second", ArenaRole.worker(0), arena_dir=sys.argv[1]
)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_start_that_is_cut_off_leaves_the_blocks_to_the_next(
    tmp_path: Path, child: Start
) -> None:
    """The workers have given the arena the engine's name, and no scheduler came."""
    worker, scheduler = open_both(tmp_path, "first")
    table = scheduler.slot_table()
    table.begin(OURS)
    table.mark([key(1)], [3])
    del table
    worker.close()
    scheduler.close()
    taker = child(TAKER, tmp_path)
    assert not kept_arenas(str(tmp_path))
    taker.kill()
    taker.wait()
    worker, scheduler = open_both(tmp_path, "third")
    assert scheduler.slot_table().begin(OURS)
    assert scheduler.slot_table().complete() == ([key(1)], [3])
    worker.close()
    scheduler.close()
    assert len(list(tmp_path.glob("kvcascade-*"))) == 1


def test_a_sweep_between_two_locks_of_a_taker_takes_nothing_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops the exclusive lock before it gives the shared one."""
    worker, scheduler = open_both(tmp_path, "first")
    worker.close()
    scheduler.close()
    swept: list[str] = []

    def not_at_once(fd: int, *, exclusive: bool) -> bool:
        if not (exclusive or swept):
            fcntl.flock(fd, fcntl.LOCK_UN)
            swept.extend(sweep(str(tmp_path)))
        return try_flock(fd, exclusive=exclusive)

    with monkeypatch.context() as patch:
        patch.setattr(arena_file, "try_flock", not_at_once)
        worker = Arena.open(GEOMETRY, "second", WORKER, arena_dir=str(tmp_path))
    assert swept == [worker.path] and os.path.exists(worker.path)
    assert not kept_arenas(str(tmp_path)), "it was taken over again"
    worker.close()


def test_blocks_of_an_unknown_epoch_are_not_those_of_the_next_known_one() -> None:
    """Another engine may have reset the path meanwhile."""
    table, memory = table_of(8)
    table.begin(OURS, NO_EPOCH)
    table.mark([key(1)], [1], NO_EPOCH)
    table.mark([key(2)], [2], 5)
    assert table.begin(OURS, 5) and table.complete() == ([key(2)], [2])
    del table, memory


def test_processes_that_close_at_once_leave_one_lasting_name(tmp_path: Path) -> None:
    four = ArenaGeometry(slots=8, rank_bytes=4096, world_size=4, kept=True)
    for number in range(30):
        folder = tmp_path / str(number)
        folder.mkdir()
        workers = [
            Arena.open(four, "engine", ArenaRole.worker(rank), arena_dir=str(folder))
            for rank in range(4)
        ]
        threads = [threading.Thread(target=worker.close) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(kept_arenas(str(folder))) == 1
