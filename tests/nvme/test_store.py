"""Writing and reading through a device that fails on command."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest
from support.keys import key, keys
from support.memory_file_system import MemoryFileSystem
from support.nvme_rig import BLOCK, Rig, config_for, content

from kvcascade.tiers.base import BlockHash, BlockOutcome
from kvcascade.tiers.nvme.disk.transfers import HANDOVER_S, TransferLimit
from kvcascade.tiers.nvme.index import block_index
from kvcascade.tiers.nvme.segments import store as store_module
from kvcascade.tiers.nvme.segments.store import Durability

OK, GONE, CORRUPT = BlockOutcome.OK, BlockOutcome.GONE, BlockOutcome.CORRUPT
IO_ERROR, NO_SPACE = BlockOutcome.IO_ERROR, BlockOutcome.NO_SPACE


@pytest.fixture
def fs() -> MemoryFileSystem:
    return MemoryFileSystem()


@pytest.fixture
def rig(fs: MemoryFileSystem, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(config_for([tmp_path], slots=32), fs=fs)
    yield rig
    fs.heal()
    rig.close(clean=False)


def test_adjacent_blocks_are_one_call(rig: Rig, fs: MemoryFileSystem) -> None:
    before = fs.calls["pwritev"]
    assert set(rig.store(keys(8))) == {OK}
    assert fs.calls["pwritev"] - before == 2, "one for the payload, one for the records"


def test_a_run_is_cut_at_the_segment(rig: Rig, fs: MemoryFileSystem) -> None:
    before = fs.calls["pwritev"]
    assert set(rig.store(keys(12))) == {OK}
    assert fs.calls["pwritev"] - before == 4
    assert all(rig.check(block_hash) for block_hash in keys(12))


def test_short_transfers_are_completed(rig: Rig, fs: MemoryFileSystem) -> None:
    fs.short_transfers = True
    assert set(rig.store(keys(6))) == {OK}
    assert all(rig.check(block_hash) for block_hash in keys(6))


@pytest.mark.parametrize(
    ("number", "outcome"),
    [(errno.EIO, IO_ERROR), (errno.ENOSPC, NO_SPACE), (errno.EDQUOT, NO_SPACE)],
)
@pytest.mark.parametrize("skip", [0, 1, 2, 3])
def test_a_failed_write_is_an_outcome(
    rig: Rig, fs: MemoryFileSystem, number: int, outcome: BlockOutcome, skip: int
) -> None:
    fs.fail("pwritev", number, skip=skip)
    outcomes = rig.store(keys(12))
    assert outcomes.count(outcome) in (4, 8) and outcomes.count(OK) in (8, 4)
    for block_hash, one in zip(keys(12), outcomes, strict=True):
        assert rig.check(block_hash) == (one is OK)
    rig.check_sums()
    assert set(rig.store(keys(12))) == {OK}, "what failed is offered again and fits"


def test_a_failed_read_leaves_the_block(rig: Rig, fs: MemoryFileSystem) -> None:
    rig.store(keys(1))
    fs.fail("preadv", errno.EIO)
    result = rig.load(key(0))
    assert result is not None and result[0] is IO_ERROR
    assert rig.check(key(0))
    assert rig.tier.store.counters.io_errors == 1


def test_a_device_that_moves_nothing_is_an_error(
    rig: Rig, fs: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.store(keys(1))
    monkeypatch.setattr(fs, "limit", lambda wanted: 0)
    result = rig.load(key(0))
    assert result is not None and result[0] is IO_ERROR
    assert rig.store([key(5)]) == [IO_ERROR]


def test_a_failed_sync_keeps_the_block_out_of_the_index(tmp_path: Path) -> None:
    fs = MemoryFileSystem()
    rig = Rig(replace(config_for([tmp_path]), durability=Durability.POWER), fs=fs)
    fs.fail("sync", errno.EIO)
    assert rig.store(keys(2)) == [IO_ERROR, IO_ERROR]
    assert rig.tier.index.count() == 0
    assert rig.store(keys(2)) == [OK, OK]
    rig.close()


def test_keys_too_long_are_refused(rig: Rig) -> None:
    long, empty = BlockHash(b"k" * 65), BlockHash(b"")
    assert rig.store([long, key(1), empty]) == [
        BlockOutcome.CANCELLED,
        OK,
        BlockOutcome.CANCELLED,
    ]
    assert rig.check(key(1)) and not rig.check(long)
    assert rig.store([BlockHash(b"k" * 64)]) == [OK]
    assert rig.tier.store.counters.refused_keys == 2


def test_another_blocks_bytes_never_match(rig: Rig) -> None:
    rig.store(keys(2))
    values = rig.tier.directory.values_of(keys(2))
    first, second = (rig.policy.get(block_hash) for block_hash in keys(2))
    assert first is not None and second is not None
    buffers = [memoryview(bytearray(BLOCK)) for _ in range(2)]
    read = rig.tier.store.read
    assert read(keys(2), [first.block_id, second.block_id], buffers, values) == [OK, OK]
    assert read(keys(2), [second.block_id, first.block_id], buffers, values) == [GONE, GONE]


def test_what_is_right_is_told_while_the_cache_has_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "CACHED_BYTES", 2 * BLOCK)
    rig.store(keys(5))
    slots = [status.block_id for status in map(rig.policy.get, keys(5)) if status is not None]
    rig.tier.segments.write_run(slots[1], [memoryview(bytes(BLOCK))])
    told: list[list[int]] = []
    buffers = [memoryview(bytearray(BLOCK)) for _ in range(5)]

    def note(positions: list[int]) -> None:
        assert all(bytes(buffers[i]) == content(key(i)) for i in positions)
        told.append(positions)

    outcomes = rig.tier.store.read(keys(5), slots, buffers, on_right=note)
    assert outcomes == [OK, CORRUPT, OK, OK, OK]
    assert told == [[0], [2, 3], [4]]


def test_an_entry_that_changed_while_reading_is_gone(rig: Rig) -> None:
    rig.store(keys(1))
    values = rig.tier.directory.values_of(keys(1))
    status = rig.policy.get(key(0))
    assert status is not None
    slot = status.block_id
    write, read = rig.tier.store.write, rig.tier.store.read
    assert write([key(0)], [slot], [memoryview(content(key(0), 1))], 0) == [OK]
    buffer = memoryview(bytearray(BLOCK))
    assert read([key(0)], [slot], [buffer], values) == [GONE]
    assert read([key(0)], [slot], [buffer]) == [OK]
    assert bytes(buffer) == content(key(0), 1)


def test_removals_that_failed_are_owed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.store(keys(32))
    monkeypatch.setattr(rig.tier.index, "_enter_epoch", _fail_once(rig.tier.index))
    assert set(rig.store(keys(100, 104))) == {IO_ERROR}
    assert rig.tier.index.count() == 32
    assert set(rig.store(keys(200, 204))) == {OK}
    assert rig.tier.index.count() == 32
    rig.check_sums()
    assert len(rig.policy) == 32
    present = [*keys(32), *keys(200, 204)]
    assert sum(rig.check(block_hash) for block_hash in present) == 32


def _fail_once(failing: block_index.BlockIndex) -> Callable[..., bool]:
    real, calls = failing._enter_epoch, iter([True])

    def enter_epoch(txn: lmdb.Transaction[bytes], epoch: int) -> bool:
        if next(calls, False):
            raise lmdb.DiskError("commit", errno.EIO)
        return real(txn, epoch)

    return enter_epoch


def test_counters_tell_the_story(rig: Rig, fs: MemoryFileSystem) -> None:
    rig.store(keys(3))
    rig.check(key(0))
    fs.damage(rig.tier.segments.path_of(0), rig.tier.segments.layout.header_bytes, b"x" * 3 * BLOCK)
    results = [rig.load(block_hash) for block_hash in keys(3)]
    assert [result[0] for result in results if result] == [CORRUPT] * 3
    counters = rig.tier.store.counters
    assert (counters.blocks_written, counters.blocks_read, counters.corrupt) == (3, 1, 3)
    assert counters.bytes_written == 3 * BLOCK and counters.write_ns > 0
    assert [rig.load(block_hash) for block_hash in keys(3)] == [None] * 3


class _WatchedFileSystem(MemoryFileSystem):
    """Tells of every transfer that begins."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)

    def pass_gate(self) -> None:
        self.begun.release()
        super().pass_gate()


@pytest.mark.parametrize("is_write", [True, False])
def test_transfers_under_way_are_limited(tmp_path: Path, is_write: bool) -> None:
    fs = _WatchedFileSystem()
    rig = Rig(config_for([tmp_path], slots=32), fs=fs)
    rig.tier.store.limit_transfers(2)
    rig.store(keys(8))
    specs = [rig.pin(block_hash) for block_hash in keys(8)]
    work = keys(8, 12) if is_write else keys(4)
    statuses = rig.begin_store(work) if is_write else []

    def move(i: int) -> list[BlockOutcome]:
        if is_write:
            payload = [memoryview(content(work[i]))]
            return rig.tier.store.write([work[i]], [statuses[i].block_id], payload, specs[0].epoch)
        buffer, slots = bytearray(BLOCK), specs[i].slots.tolist()
        return rig.tier.store.read(specs[i].hashes, slots, [memoryview(buffer)], specs[i].values)

    while fs.begun.acquire(blocking=False):
        pass
    fs.gate = threading.Event()
    with ThreadPoolExecutor(4) as executor:
        moved = [executor.submit(move, i) for i in range(4)]
        assert fs.begun.acquire(timeout=10) and fs.begun.acquire(timeout=10), "two at a time"
        assert not fs.begun.acquire(timeout=0.1), "a third one did not wait"
        fs.gate.set()
        assert [future.result(10) for future in moved] == [[OK]] * 4
    rig.close(clean=False)


def test_the_next_one_may_begin_while_the_last_one_pauses() -> None:
    begun: list[float] = []

    def pause(seconds: float) -> None:
        begun.append(seconds)
        if len(begun) == 1:
            with limit:  # would wait for ever if the place were not free yet
                begun.append(0.0)

    limit = TransferLimit(1, pause)
    with limit:
        assert not begun
    assert begun == [HANDOVER_S, 0.0, HANDOVER_S]
