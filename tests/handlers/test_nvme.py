"""The NVMe handlers: queue, parts, cancel. The executor and the clock are the test's."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.clock import ManualClock
from support.executors import SteppingExecutor
from support.keys import key, keys
from support.memory_file_system import MemoryFileSystem
from support.nvme_rig import BLOCK, Rig, config_for, content

from kvcascade.handlers.node.bounce import ArenaBounce
from kvcascade.handlers.node.nvme_handlers import NvmeLoadHandler, NvmeStoreHandler
from kvcascade.handlers.node.nvme_jobs import QueueOptions
from kvcascade.tiers.base import BlockHash, BlockOutcome, BlockStatus, SlotSpec

ARENA_SLOTS = 64
SMALL_PARTS = pytest.mark.parametrize("part_bytes", [4 * BLOCK])
OK, CANCELLED, CORRUPT = BlockOutcome.OK, BlockOutcome.CANCELLED, BlockOutcome.CORRUPT
IO_ERROR = BlockOutcome.IO_ERROR


class Mover:
    """A tier, an arena and both handlers."""

    def __init__(self, path: Path, part_bytes: int = 1 << 20, *, is_bounced: bool = False) -> None:
        self.fs = MemoryFileSystem()
        self.executor = SteppingExecutor()
        self.clock = ManualClock()
        self.rig = Rig(config_for([path], slots=32), fs=self.fs)
        self.arena = bytearray(ARENA_SLOTS * BLOCK)
        self.is_bounced = is_bounced
        bounce = ArenaBounce(memoryview(self.arena), BLOCK) if is_bounced else None
        store = self.rig.tier.store
        options = QueueOptions(4, self.clock, wait_limit_s=0.0, part_bytes=part_bytes)
        self.down = NvmeStoreHandler(store, self.view, self.executor, options, bounce=bounce)
        self.up = NvmeLoadHandler(store, self.view, self.executor, options, bounce=bounce)

    def view(self, slot: int) -> memoryview:
        return memoryview(self.arena)[slot * BLOCK : (slot + 1) * BLOCK]

    def store(self, job_id: int, hashes: list[BlockHash]) -> list[BlockStatus] | None:
        """Start to store from arena slots 0 on; None if refused."""
        for slot, block_hash in enumerate(hashes):
            self.view(slot)[:] = content(block_hash)
        statuses = self.rig.begin_store(hashes)
        spec = self.rig.backend.get_load_store_spec(hashes, statuses)
        arena = SlotSpec(np.arange(len(hashes), dtype=np.int32))
        if not self.down.transfer_async(job_id, (arena, spec)):
            for block_hash in hashes:
                self.rig.drop(block_hash)
            return None
        return statuses

    def land(self, hashes: list[BlockHash], outcomes: tuple[BlockOutcome, ...]) -> None:
        """What the manager does with a result."""
        for i, block_hash in enumerate(hashes):
            status = self.rig.policy.get(block_hash)
            assert status is not None
            if not outcomes or outcomes[i] is OK:
                status.ref_cnt = 0
            else:
                self.rig.drop(block_hash)

    def load(self, job_id: int, hashes: list[BlockHash], slots: list[int]) -> bool:
        """Start to load into arena slots."""
        statuses = [self.rig.policy.get(block_hash) for block_hash in hashes]
        assert None not in statuses
        found = [status for status in statuses if status is not None]
        spec = self.rig.backend.get_load_store_spec(hashes, found)
        arena = SlotSpec(np.array(slots, dtype=np.int32))
        return self.up.transfer_async(job_id, (spec, arena))


@pytest.fixture
def part_bytes() -> int:
    return 1 << 20


@pytest.fixture(params=[False, True], ids=["straight", "bounced"])
def mover(request: pytest.FixtureRequest, tmp_path: Path, part_bytes: int) -> Iterator[Mover]:
    mover = Mover(tmp_path, part_bytes, is_bounced=request.param)
    yield mover
    mover.executor.run_all()
    mover.fs.heal()
    mover.rig.close()


def test_there_and_back(mover: Mover) -> None:
    assert mover.store(1, keys(10)) is not None
    assert mover.down.get_finished() == []
    mover.executor.run_all()
    (result,) = mover.down.get_finished()
    assert (result.job_id, result.success, result.size_bytes) == (1, True, 10 * BLOCK)
    assert mover.down.get_finished() == []
    mover.land(keys(10), result.outcomes)
    assert mover.load(2, keys(10), list(range(30, 40)))
    mover.executor.run_all()
    (result,) = mover.up.get_finished()
    assert result.success and result.outcomes == ()
    for i, block_hash in enumerate(keys(10)):
        assert mover.view(30 + i) == content(block_hash)


def test_blocks_may_lie_anywhere_in_the_arena(mover: Mover) -> None:
    slots = [40, 41, 42, 20, 50, 49, 48, 21, 22, 43]
    mover.store(1, keys(10))
    mover.executor.run_all()
    mover.land(keys(10), mover.down.get_finished()[0].outcomes)
    assert mover.load(2, keys(10), slots)
    mover.executor.run_all()
    assert mover.up.get_finished()[0].success
    assert [bytes(mover.view(slot)) for slot in slots] == [content(h) for h in keys(10)]
    unused = set(range(10, ARENA_SLOTS)) - set(slots)
    assert not any(any(mover.view(slot)) for slot in unused)


def test_the_queue_is_bounded(mover: Mover) -> None:
    for job_id in range(4):
        assert mover.store(job_id, keys(10 * job_id, 10 * job_id + 2)) is not None
    assert mover.store(9, keys(90, 92)) is None
    mover.executor.step()
    assert mover.store(9, keys(90, 92)) is not None


@SMALL_PARTS
@pytest.mark.parametrize("which", [0, -1, 1])
def test_parts_end_in_any_order(mover: Mover, which: int) -> None:
    mover.rig.store(keys(100, 132))
    mover.store(1, keys(14))
    assert len(mover.executor) == 4
    while mover.executor.step(which):
        pass
    (result,) = mover.down.get_finished()
    assert result.success
    mover.land(keys(14), ())
    assert all(mover.rig.check(block_hash) for block_hash in keys(14))
    assert mover.rig.tier.index.count() == 32
    mover.rig.check_sums()


@SMALL_PARTS
def test_one_failed_part_fails_its_blocks_only(mover: Mover) -> None:
    mover.store(1, keys(8))
    mover.fs.fail("pwritev", errno.EIO)
    mover.executor.run_all()
    (result,) = mover.down.get_finished()
    assert not result.success and result.size_bytes == 4 * BLOCK
    assert result.outcomes == (IO_ERROR,) * 4 + (OK,) * 4
    mover.land(keys(8), result.outcomes)
    assert [mover.rig.check(h) for h in keys(8)] == [False] * 4 + [True] * 4


def test_what_is_damaged_spoils_nothing_else(mover: Mover) -> None:
    statuses = mover.store(1, keys(4))
    assert statuses is not None
    mover.executor.run_all()
    mover.land(keys(4), mover.down.get_finished()[0].outcomes)
    segments = mover.rig.tier.segments
    segments.write_run(statuses[2].block_id, [memoryview(bytes(BLOCK))])
    mover.view(32)[:] = b"x" * BLOCK
    assert mover.load(2, keys(4), list(range(30, 34)))
    mover.executor.run_all()
    (result,) = mover.up.get_finished()
    assert result.outcomes == (OK, OK, CORRUPT, OK)
    assert [mover.view(30 + i) == content(key(i)) for i in range(4)] == [True, True, False, True]
    if mover.is_bounced:
        assert mover.view(32) == b"x" * BLOCK, "what is not right never reaches the arena"


def test_an_empty_job_ends(mover: Mover) -> None:
    assert mover.store(1, []) is not None
    (result,) = mover.down.get_finished()
    assert result.success and result.size_bytes == 0


def test_a_failing_device_is_tried_whenever_it_is_asked(mover: Mover) -> None:
    """To leave it alone is the manager's decision."""
    mover.fs.fail("pwritev", errno.EIO, times=10)
    for job_id in range(1, 12):
        hashes = [key(100 * job_id)]
        assert mover.store(job_id, hashes) is not None
        mover.executor.run_all()
        (result,) = mover.down.get_finished()
        mover.land(hashes, result.outcomes)
        assert result.success == (job_id == 11)
    mover.rig.check_sums()


def test_a_refused_job_keeps_its_removals(mover: Mover) -> None:
    mover.rig.store(keys(32))
    mover.down.shutdown()
    assert mover.store(1, keys(50, 54)) is None
    mover.rig.store(keys(60, 64))
    assert mover.rig.tier.index.count() == 32
    mover.rig.check_sums()


def test_shutdown_cancels_what_has_not_started(mover: Mover) -> None:
    mover.rig.store(keys(100, 132))
    mover.store(1, keys(4))
    mover.down.shutdown(deadline_s=0.0)
    (result,) = mover.down.get_finished()
    assert result.outcomes == (CANCELLED,) * 4 and result.time_s == 0.0
    mover.land(keys(4), result.outcomes)
    assert mover.store(2, keys(4)) is None
    mover.down.shutdown()
    assert set(mover.rig.store(keys(10, 14))) == {OK}
    assert mover.rig.tier.index.count() == 32, "the removals of the cancelled job were kept"


def test_an_executor_that_is_gone_cancels(mover: Mover) -> None:
    mover.executor.is_shut_down = True
    assert mover.store(1, keys(2)) is not None
    (result,) = mover.down.get_finished()
    assert set(result.outcomes) == {CANCELLED}
    mover.land(keys(2), result.outcomes)


def test_a_bug_below_is_an_outcome(mover: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover.rig.tier.store, "write", None)
    mover.store(1, keys(2))
    mover.executor.run_all()
    (result,) = mover.down.get_finished()
    assert result.outcomes == (IO_ERROR,) * 2
    mover.land(keys(2), result.outcomes)


def test_a_stalled_device_blocks_nobody_but_its_thread(tmp_path: Path) -> None:
    mover = Mover(tmp_path)
    with ThreadPoolExecutor(2) as executor:
        options = QueueOptions(wait_limit_s=30.0)
        down = NvmeStoreHandler(mover.rig.tier.store, mover.view, executor, options)
        statuses = mover.rig.begin_store(keys(2))
        spec = mover.rig.backend.get_load_store_spec(keys(2), statuses)
        mover.fs.gate = threading.Event()
        assert down.transfer_async(1, (SlotSpec(np.arange(2, dtype=np.int32)), spec))
        assert down.get_finished() == []
        assert mover.rig.policy.get(key(0)) is not None
        mover.fs.gate.set()
        down.wait({1, 5})
        assert [result.job_id for result in down.get_finished()] == [1]
        down.shutdown()
    mover.rig.close()


def test_waits_are_bounded(mover: Mover) -> None:
    mover.store(1, keys(1))
    mover.down.wait({1})
    assert mover.down.get_finished() == []
