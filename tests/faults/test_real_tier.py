"""Faults of the disk under the real NVMe tier, as the engine sees them through the manager.

For every fault: nothing is raised, nothing waits for ever, what is served is right, counters tell
what happened, and when the fault is over everything works again.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.children import Start
from support.executors import SteppingExecutor
from support.fault_rig import DEADLINE_S, LONG_S, TICK_S, FaultRig
from support.keys import keys
from support.memory_file_system import MemoryFileSystem
from support.nvme_rig import BLOCK, SLOT_BYTES
from support.waiting import wait_until

from kvcascade.errors import InUseError, KVCascadeError
from kvcascade.manager.base import LookupState
from kvcascade.manager.below.tier_writes import STALLED_S
from kvcascade.manager.counters import Reason
from kvcascade.manager.request import Request
from kvcascade.tiers.breaker import FAILURES_TO_OPEN, REST_S
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.segments.store import Durability
from kvcascade.tiers.nvme.writer.growth import RETRY_AFTER_S

FOR_EVER = 1 << 30
SEGMENT_BYTES = BLOCK + 8 * SLOT_BYTES
STATE_BYTES = 20_000
OPEN_FILES = 64
WAIT_ROUNDS, WAIT_S = 3000, 0.01


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
READ_FAULTS = [Fault("preadv", n) for n in (errno.EIO, errno.EACCES, errno.ENOMEM, errno.ESTALE)]
GROWTH_FAULTS = [
    Fault("preallocate", errno.ENOSPC),
    Fault("preallocate", errno.EIO),
    Fault("open", errno.EMFILE),
    Fault("open", errno.EACCES),
    Fault("sync_dir", errno.EIO),
    Fault("lock", errno.EMFILE),
    Fault("free_bytes", errno.EIO),
]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[FaultRig]:
    rig = FaultRig(tmp_path, durability=Durability.POWER)
    yield rig
    rig.memory_fs.heal()
    rig.close()


@pytest.mark.parametrize("fault", WRITE_FAULTS, ids=str)
def test_the_engine_serves_on_while_writes_fail(rig: FaultRig, fault: Fault) -> None:
    old = keys(0, 8)
    rig.on_disk(old)
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
def test_a_tier_that_cannot_grow_makes_do(tmp_path: Path, fault: Fault) -> None:
    fs = MemoryFileSystem(size_bytes=3 * SEGMENT_BYTES + STATE_BYTES)
    rig = FaultRig(tmp_path, fs=fs)
    rig.memory_fs = fs
    fs.size_bytes = 1 << 40
    before = rig.rig.backend.available
    assert 0 < before < 64
    fault.begin(rig)
    rig.clock.advance(RETRY_AFTER_S)
    for i in range(0, 96, 8):
        assert rig.store(keys(i, i + 8)) == keys(i, i + 8)
        rig.write_down()
        rig.forget_top()
        rig.clock.advance(1.0)
    assert rig.rig.backend.available == before
    assert rig.rig.tier.growth.failures > 1
    assert rig.read(keys(88, 96)) == 8, "the coldest left for the newest"
    rig.recovers(300)
    for i in range(400, 464, 8):
        rig.store(keys(i, i + 8))
        rig.write_down()
        rig.clock.advance(RETRY_AFTER_S)
    assert rig.rig.backend.available > before, "and it grows again"
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
    """The disk stops answering: tasks of the I/O threads do not run until the test says so."""

    @pytest.fixture
    def stalled(self, tmp_path: Path) -> Iterator[FaultRig]:
        executor = SteppingExecutor()
        rig = FaultRig(tmp_path, executor)
        executor.run_all()
        for start in range(0, 32, 8):
            rig.store(keys(start, start + 8))
            rig.write_down()
            executor.run_all()
            rig.manager.end_step()
            rig.forget_top()
        yield rig
        executor.run_all()
        rig.manager.end_step()
        executor.run_all()
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
        assert isinstance(stalled.executor, SteppingExecutor)
        stalled.executor.run_all()
        stalled.manager.end_step()
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
        assert isinstance(stalled.executor, SteppingExecutor)
        stalled.executor.run_all()
        stalled.clock.advance(REST_S)
        stalled.manager.end_step()
        assert stalled.store(keys(300, 308)) == keys(300, 308)

    def test_shutdown_is_bounded(self, stalled: FaultRig) -> None:
        stalled.store(keys(100, 108))
        stalled.write_down()
        stalled.clock.advance(1e6)
        assert stalled.manager.shutdown(), "every part that has not begun is cancelled"


# ---- the index -------------------------------------------------------------------------------


_READERS = """
import sys, lmdb
env = lmdb.open(sys.argv[1], max_dbs=4, max_spare_txns=0, map_size=1 << 27)
held = []
try:
    while True:
        held.append(env.begin())
except lmdb.ReadersFullError:
    print("full", flush=True)
sys.stdin.read()
"""
_WRITER = """
import sys, lmdb
env = lmdb.open(sys.argv[1], max_dbs=4, map_size=1 << 27)
with env.begin(write=True) as txn:
    print("writing", flush=True)
    sys.stdin.read()
"""


def index_folder(rig: FaultRig) -> Path:
    """The LMDB environment of a tier."""
    return rig.rig.tier.namespace.index_folder


def test_a_full_table_of_readers_ends_with_who_filled_it(tmp_path: Path, child: Start) -> None:
    rig = FaultRig(tmp_path)
    rig.on_disk(keys(0, 16))
    peer = child(_READERS, index_folder(rig))
    assert rig.read(keys(0, 8)) == 8, "our own place in the table is kept"
    rig.store(keys(100, 108))
    rig.write_down()
    peer.kill()
    peer.wait()
    rig.clock.advance(LONG_S)
    assert rig.store(keys(200, 208)) == keys(200, 208)
    assert rig.write_down()
    rig.forget_top()
    assert rig.read(keys(200, 208)) == 8
    rig.close()


def test_a_start_with_a_full_table_of_readers_says_so(tmp_path: Path, child: Start) -> None:
    rig = FaultRig(tmp_path)
    rig.on_disk(keys(0, 8))
    rig.close()
    peer = child(_READERS, index_folder(rig))
    with pytest.raises(InUseError, match="too many processes"):
        FaultRig(tmp_path, fs=rig.fs)
    peer.kill()
    peer.wait()
    again = FaultRig(tmp_path, fs=rig.fs)
    assert again.read(keys(0, 8)) == 8
    again.close()


def test_a_stopped_peer_that_holds_the_index_stops_nobody(tmp_path: Path, child: Start) -> None:
    """SIGSTOP in the middle of a commit: the I/O thread waits for it, the scheduler does not."""
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(2))
        rig = FaultRig(tmp_path, threads)
        rig.store(keys(0, 8))
        wait_until(rig.write_down, WAIT_ROUNDS, WAIT_S)
        peer = child(_WRITER, index_folder(rig))
        stack.callback(peer.kill)  # whatever happens: nobody waits for the threads before that
        peer.send_signal(signal.SIGSTOP)
        written = rig.memory_fs.calls["pwritev"]
        assert rig.store(keys(100, 108)) == keys(100, 108)
        rig.manager.flush_dirty(rig.clock() + 5 * TICK_S)  # begins, and waits for nothing
        wait_until(  # its commit comes next
            lambda: rig.memory_fs.calls["pwritev"] > written, WAIT_ROUNDS, WAIT_S
        )
        rig.clock.advance(STALLED_S)
        rig.manager.end_step()
        assert rig.counters.demote_openings == 1, "nothing can have ended since"
        for i in range(200, 264, 4):
            assert rig.store(keys(i, i + 4)) == keys(i, i + 4)
            rig.clock.advance(1.0)
        assert rig.read(keys(260, 264)) == 4, "memory serves"
        assert not rig.manager.shutdown(), "bounded, and it says that it could not finish"
    rig.rig.close(clean=False)


_OWNER = """
import sys
from pathlib import Path
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
lock = RealFileSystem().lock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_stopped_owner_of_the_lock_is_named_at_once(tmp_path: Path, child: Start) -> None:
    peer = child(_OWNER, tmp_path / "lock")
    peer.send_signal(signal.SIGSTOP)
    with pytest.raises(InUseError, match=str(peer.pid)):
        RealFileSystem().lock(tmp_path / "lock")


# ---- the mount -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO, errno.ENOTCONN, errno.ESTALE])
def test_a_vanished_mount(tmp_path: Path, number: int) -> None:
    """Every call on the path fails; the index, which is mapped memory, is still there."""
    rig = FaultRig(tmp_path)
    rig.on_disk(keys(0, 8))
    operations = "open make_dir list_dir unlink rename sync_dir free_bytes lock preadv pwritev sync"
    for operation in (*operations.split(), "preallocate", "truncate", "map", "remove_tree"):
        Fault(operation, number).begin(rig)
    for i in range(100, 164, 8):
        assert rig.read(keys(0, 8)) == 0
        assert rig.store(keys(i, i + 8)) == keys(i, i + 8)
        rig.write_down()
        rig.clock.advance(RETRY_AFTER_S)
    assert rig.counters.promote_openings > 0 and rig.counters.demote_openings > 0
    assert rig.read(keys(156, 164)) == 8, "memory serves"
    rig.recovers(300)
    assert rig.read(keys(0, 8)) == 8, "what was there before is there again"
    rig.close()


def test_files_that_are_removed_under_the_engine(tmp_path: Path) -> None:
    """`rm -r` of the path: open files live on; whatever needs a name fails, and is a counter."""
    rig = FaultRig(tmp_path, fs=RealFileSystem())
    rig.on_disk(keys(0, 8))
    shutil.rmtree(rig.rig.tier.namespace.folders[0])
    for i in range(100, 164, 8):
        assert rig.store(keys(i, i + 8)) == keys(i, i + 8)
        rig.write_down()
        rig.forget_top()
        rig.clock.advance(RETRY_AFTER_S)
    assert rig.read(keys(156, 164)) == 8
    rig.manager.shutdown()
    try:
        rig.rig.close()
    except KVCascadeError:
        pass  # there is nothing to close any more


def test_too_many_open_files_in_this_process(tmp_path: Path) -> None:
    """EMFILE of the operating system itself, while segments are to be made."""
    rig = FaultRig(tmp_path, fs=RealFileSystem())
    rig.on_disk(keys(0, 8))
    taken: list[int] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            for _ in range(OPEN_FILES):
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for i in range(100, 164, 8):
            assert rig.store(keys(i, i + 8)) == keys(i, i + 8)
            rig.write_down()
            rig.forget_top()
        assert rig.read(keys(156, 164)) == 8
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    rig.close()
