"""Faults of the disk under the real NVMe tier, as the engine sees them through the manager.

For every fault: nothing is raised, nothing waits for ever, what is served is right, counters tell
what happened, and when the fault is over everything works again.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.fault_rig import DEADLINE_S, FLUSH_S, FaultRig
from support.keys import keys
from support.path_engine import PathEngine

from kvcascade.manager.base import LookupState
from kvcascade.manager.below.single_tier import NODE_STOP_S, STALLED_S
from kvcascade.manager.counters import Reason
from kvcascade.manager.request import Request
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.breaker import FAILURES_TO_OPEN, REST_S
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.path_messages import PathOptions
from kvcascade.tiers.nvme.path.writer.path_capacity import RETRY_AFTER_S

FOR_EVER = 1 << 30
OPEN_FILES = 64


@dataclass(frozen=True)
class Fault:
    """What the disk does to which operation."""

    operation: str
    number: int

    def __str__(self) -> str:
        return f"{errno.errorcode[self.number]}-{self.operation}"

    def begin(self, rig: FaultRig) -> None:
        """From now on every such call fails."""
        rig.memory_fs.fail(self.operation, self.number, times=FOR_EVER)


WRITE_FAULTS = [
    Fault("pwritev", errno.EIO),
    Fault("pwritev", errno.ENOSPC),
    Fault("pwritev", errno.EDQUOT),
    Fault("pwritev", errno.EACCES),
    Fault("pwritev", errno.EROFS),
    Fault("sync", errno.EIO),
    Fault("sync", errno.ENOSPC),
]
OPEN_FAULTS = [Fault("open", n) for n in (errno.EMFILE, errno.EACCES)]
READ_FAULTS = [Fault("preadv", n) for n in (errno.EIO, errno.EACCES, errno.ENOMEM, errno.ESTALE)]
GROWTH_FAULTS = [
    Fault("preallocate", errno.ENOSPC),
    Fault("preallocate", errno.EIO),
    Fault("sync_dir", errno.EIO),
    Fault("lock", errno.EMFILE),
    Fault("free_bytes", errno.EIO),
]


@pytest.fixture
def rig() -> Iterator[FaultRig]:
    rig = FaultRig(durability="power")
    yield rig
    rig.memory_fs.heal()
    rig.close()


@pytest.mark.parametrize("fault", WRITE_FAULTS, ids=str)
def test_the_engine_serves_on_while_writes_fail(rig: FaultRig, fault: Fault) -> None:
    rig.on_disk(keys(0, 64))
    old = keys(56, 64)
    fault.begin(rig)
    for i in range(100, 164, 8):
        assert rig.store(keys(i, i + 8)) == keys(i, i + 8), "stores go on"
        rig.write_down()
        rig.clock.advance(1.0)
    assert rig.read(keys(156, 164)) == 8, "memory serves"
    assert rig.read(old) == 8, "what was on the disk is served"
    assert rig.counters.demote_failed_blocks + rig.counters.demote_no_space_blocks > 0
    assert rig.counters.demote_openings > 0
    written = rig.memory_fs.calls["pwritev"]
    for _ in range(50):  # no time goes by: the tier rests
        rig.store(keys(200, 204))
        rig.manager.end_step()
    assert rig.memory_fs.calls["pwritev"] == written, "a resting tier is not asked"
    rig.recovers(300)


@pytest.mark.parametrize("fault", READ_FAULTS, ids=str)
def test_the_engine_serves_on_while_reads_fail(rig: FaultRig, fault: Fault) -> None:
    old = keys(0, 32)
    rig.on_disk(old)
    fault.begin(rig)
    for i in range(20):
        assert rig.read(old[i : i + 1]) == 0, "a miss, at once"
    assert rig.memory_fs.calls["preadv"] < 20
    assert rig.counters.promote_failed_blocks == FAILURES_TO_OPEN
    assert rig.counters.promote_openings == 1
    assert rig.counters.promote_refused_blocks == 20 - FAILURES_TO_OPEN
    assert rig.store(keys(100, 108)) == keys(100, 108), "writes are not reads"
    assert rig.write_down()
    rig.memory_fs.heal()
    rig.clock.advance(REST_S)
    rig.forget_top()
    for i in range(0, 32, 8):
        assert rig.read(old[i : i + 8]) == 8, "nothing was lost"
    rig.recovers(300)


@pytest.mark.parametrize("fault", GROWTH_FAULTS, ids=str)
def test_a_tier_that_cannot_grow_makes_do(fault: Fault) -> None:
    rig = FaultRig()
    rig.on_disk(keys(0, 16))
    before = rig.slots
    assert 0 < before < 64
    fault.begin(rig)
    for i in range(100, 196, 8):
        assert rig.store(keys(i, i + 8)) == keys(i, i + 8)
        rig.write_down()
        rig.forget_top()
        rig.clock.advance(RETRY_AFTER_S)
    assert rig.slots == before
    assert rig.read(keys(188, 196)) == 8, "the coldest left for the newest"
    rig.recovers(300)
    for i in range(400, 464, 8):
        rig.store(keys(i, i + 8))
        rig.write_down()
        rig.clock.advance(RETRY_AFTER_S)
    assert rig.slots > before, "and it grows again"
    rig.close()


@pytest.mark.parametrize("fault", OPEN_FAULTS, ids=str)
def test_segments_that_cannot_be_opened(fault: Fault) -> None:
    """Neither writer nor node can open one: what is open is used."""
    rig = FaultRig()
    rig.on_disk(keys(0, 16))
    fault.begin(rig)
    for i in range(100, 196, 8):
        assert rig.store(keys(i, i + 8)) == keys(i, i + 8)
        rig.write_down()
        rig.clock.advance(RETRY_AFTER_S)
    assert rig.read(keys(188, 196)) == 8, "memory serves"
    assert rig.read(keys(8, 16)) == 8, "and what was on the disk"
    assert rig.counters.demote_openings > 0
    rig.recovers(300)
    rig.close()


def test_short_transfers_are_continued(rig: FaultRig) -> None:
    rig.memory_fs.short_transfers = True
    rig.on_disk(keys(0, 16))
    assert rig.read(keys(0, 8)) == 8
    assert rig.counters.promote_failed_blocks == rig.counters.demote_failed_blocks == 0


def test_a_transfer_that_never_ends_is_given_up(rig: FaultRig) -> None:
    rig.on_disk(keys(0, 1))

    def nothing(wanted: int) -> int:
        return min(wanted, 1)

    rig.memory_fs.limit = nothing  # type: ignore[method-assign]
    assert rig.read(keys(0, 1)) == 0
    assert rig.counters.promote_failed_blocks == 1


def test_one_line_in_the_log_says_what_the_disk_said(
    rig: FaultRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.on_disk(keys(0, 8))
    Fault("preadv", errno.EIO).begin(rig)
    for _ in range(8):
        rig.read(keys(0, 8))
    (line,) = caplog.records
    assert "reading blocks" in line.getMessage()


class TestStall:
    """The disk stops answering: no transfer ends until the test says so."""

    @pytest.fixture
    def stalled(self) -> Iterator[FaultRig]:
        rig = FaultRig()
        rig.on_disk(keys(0, 32))
        rig.node.is_device_stalled = True
        yield rig
        answer_again(rig)
        rig.close()

    def test_a_read_becomes_a_miss_at_its_deadline(self, stalled: FaultRig) -> None:
        first = Request()
        assert set(stalled.ask(keys(0, 8), first)) == {LookupState.PENDING}
        stalled.clock.advance(DEADLINE_S)
        assert set(stalled.ask(keys(0, 8), first)) == {LookupState.MISS}
        assert stalled.manager.counters.recomputed_blocks[Reason.DEADLINE] > 0
        assert set(stalled.ask(keys(8, 16), Request())) == {LookupState.MISS}, "nobody else waits"
        assert stalled.counters.promote_openings == 1
        assert stalled.counters.promote_refused_blocks == 8
        answer_again(stalled)
        stalled.manager.finish_request(first)
        late = stalled.ask(keys(16, 24), Request())
        assert set(late) == {LookupState.PENDING}, "it answers again"

    def test_stores_go_on(self, stalled: FaultRig) -> None:
        assert stalled.store(keys(100, 116))
        stalled.write_down()
        assert stalled.store(keys(200, 208)) == [], "put off: the disk may answer soon"
        stalled.clock.advance(STALLED_S)
        stalled.manager.end_step()
        assert stalled.counters.demote_openings == 1
        for _ in range(10):
            stalled.store(keys(200, 208))
            stalled.clock.advance(1.0)
        answer_again(stalled)
        stalled.clock.advance(REST_S)
        stalled.manager.end_step()
        assert stalled.store(keys(300, 308)) == keys(300, 308)

    def test_shutdown_is_bounded(self, stalled: FaultRig) -> None:
        stalled.store(keys(100, 108))
        stalled.write_down()
        before_s = stalled.clock.now_s
        assert not stalled.manager.shutdown(), "what is in flight may still touch its slots"
        assert stalled.clock.now_s - before_s < 2 * (FLUSH_S + NODE_STOP_S)


def answer_again(rig: FaultRig) -> None:
    """The disk goes on, and the manager takes in what ended."""
    rig.node.is_device_stalled = False
    rig.manager.end_step()


# ---- the mount -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO, errno.ENOTCONN, errno.ESTALE])
def test_a_vanished_mount(number: int) -> None:
    """Every call on the path fails; the tables, which are mapped memory, are still there."""
    rig = FaultRig()
    rig.on_disk(keys(0, 8))
    operations = "open make_dir list_dir unlink rename sync_dir free_bytes lock preadv pwritev sync"
    for operation in (*operations.split(), "preallocate", "truncate", "map", "remove_tree"):
        Fault(operation, number).begin(rig)
    for i in range(100, 164, 8):
        assert rig.read(keys(0, 8)) == 0
        assert rig.store(keys(i, i + 8)) == keys(i, i + 8)
        rig.write_down()
        rig.clock.advance(RETRY_AFTER_S)
    assert rig.counters.demote_openings > 0
    if number != errno.ENOENT:  # a block whose file is missing is no failure of the device
        assert rig.counters.promote_openings > 0
    assert rig.read(keys(156, 164)) == 8, "memory serves"
    rig.recovers(300)
    assert rig.read(keys(0, 8)) == 8, "what was there before is there again"
    rig.close()


def test_files_that_are_removed_under_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`rm -r` of the path: open files live on, and nothing is written any more."""
    root = tmp_path / "tier"
    root.mkdir()
    options = PathOptions(64 << 20, segment_bytes=1 << 20)
    engine = PathEngine([root], options, is_thread=True).open()
    engine.store(range(8))
    shutil.rmtree(root)
    engine.until(lambda: not engine.tier.takes_puts)
    engine.get(range(8))  # no wrong byte, whatever the outcomes
    assert engine.put(range(8, 16)) == []
    engine.close()
    assert "was replaced or unmounted" in caplog.text
    assert not root.exists()


def test_files_that_were_cut_under_a_tier(tmp_path: Path) -> None:
    """No signal, and no wrong byte: what is cut off is a miss, and new blocks are stored."""
    options = PathOptions(64 << 20, segment_bytes=1 << 20)
    engine = PathEngine([tmp_path], options, is_thread=True, capacity=64).open()
    engine.store(range(64))
    (segment,) = tmp_path.rglob("000000.safetensors")
    os.truncate(segment, 4096 + 8 * 4096)
    assert set(engine.get(range(8))) == {BlockOutcome.OK}
    assert BlockOutcome.OK not in engine.get(range(8, 64))
    engine.store(range(100, 132))
    assert set(engine.get(range(100, 132))) == {BlockOutcome.OK}
    engine.close()


def test_too_many_open_files_in_this_process(tmp_path: Path) -> None:
    """EMFILE of the operating system itself, while segments are to be made."""
    rig = FaultRig([tmp_path], RealFileSystem())
    rig.on_disk(keys(0, 16))  # both segments that there are, so that they are open
    gc.collect()  # what is collected later gives descriptors back
    taken: list[int] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            for _ in range(OPEN_FILES):
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for i in range(100, 132, 8):
            assert rig.store(keys(i, i + 8)) == keys(i, i + 8)
            rig.write_down()
        assert rig.read(keys(124, 132)) == 8, "memory serves"
        assert rig.read(keys(8, 16)) == 8, "and what was on the disk"
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    rig.close()
