"""A mover that is killed, stopped or orphaned: a lost block is a miss, and nothing stays behind."""

from __future__ import annotations

import os
import random
import select
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.children import Start
from support.keys import key, keys
from support.mover_rig import LIMIT_S, MoverRig
from support.nvme_rig import BLOCK, Rig, config_for

from kvcascade.errors import TierIOError
from kvcascade.handlers.node.mover import MoverOptions
from kvcascade.handlers.node.mover_main import MoverServer
from kvcascade.handlers.node.mover_process import MoverBackground
from kvcascade.handlers.node.mover_wire import RemoveJob
from kvcascade.tiers.base import BlockHash, BlockOutcome

PATIENT = MoverOptions(starts_per_minute=100)
ROUNDS = 12


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[MoverRig]:
    rig = MoverRig(tmp_path, has_process=True, slots=256, options=PATIENT)
    yield rig
    rig.close()


def pid_of(rig: MoverRig) -> int:
    pid = rig.process.pid
    assert pid is not None
    return pid


def up_again(rig: MoverRig, old: int) -> None:
    mover = rig.process
    assert mover.wait(lambda: mover.is_up and mover.pid != old, LIMIT_S)


def ended_within_limit(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(LIMIT_S * 1000))


def test_every_thread_gives_way(rig: MoverRig) -> None:
    rig.store(1, keys(8))
    rig.load(2, keys(8))
    threads = [int(path.name) for path in Path(f"/proc/{pid_of(rig)}/task").iterdir()]
    assert len(threads) > 2 and {os.sched_getscheduler(tid) for tid in threads} == {os.SCHED_BATCH}


def test_it_says_how_many_records_it_wrote_anew(rig: MoverRig) -> None:
    rig.land(keys(8), rig.store(1, keys(8)))
    segments = rig.rig.tier.segments
    slots = sorted(rig.rig.tier.directory.slots_of(keys(8)))
    os.truncate(segments.path_of(0), BLOCK)
    assert not any(map(segments.record, slots))
    background = MoverBackground(rig.rig.tier.store, rig.process)
    ended: list[int | None] = []
    background.repair_records(set(slots), ended.append)
    assert rig.process.wait(lambda: bool(ended), LIMIT_S) and ended == [8]
    segments.look_again()
    assert all(map(segments.record, slots))
    rig.process.kill()
    background.repair_records(set(slots), ended.append)
    assert ended == [8, None]


def test_killed_in_the_middle_of_jobs(rig: MoverRig) -> None:
    rig.store(1, keys(8))
    old = pid_of(rig)
    os.kill(old, signal.SIGSTOP)
    assert rig.begin_store(2, keys(50, 58)) and rig.begin_load(3, keys(8))
    assert rig.down.get_finished() == rig.up.get_finished() == []
    os.kill(old, signal.SIGKILL)
    stored, loaded = rig.end(rig.down, 2), rig.end(rig.up, 3)
    assert set(stored.outcomes) == set(loaded.outcomes) == {BlockOutcome.IO_ERROR}
    rig.land(keys(50, 58), stored)
    rig.end_load(keys(8), loaded)
    up_again(rig, old)
    assert rig.load(5, keys(8)) == [True] * 8, "what was there before is there still"
    assert [rig.rig.policy.get(h) for h in keys(50, 58)] == [None] * 8
    rig.rig.check_sums()


def test_removals_of_a_lost_job_are_owed_again(tmp_path: Path) -> None:
    rig = MoverRig(tmp_path, has_process=True, slots=32, options=PATIENT)
    capacity = rig.rig.backend.capacity
    rig.store(1, keys(capacity))
    old = pid_of(rig)
    os.kill(old, signal.SIGSTOP)
    assert rig.begin_store(2, keys(100, 108))
    os.kill(old, signal.SIGKILL)
    rig.land(keys(100, 108), rig.end(rig.down, 2))
    assert rig.rig.tier.index.count() == capacity, "what was evicted is still in the index"
    held = len(rig.rig.policy)
    rig.close()
    again = MoverRig(tmp_path, has_process=False, slots=32)
    assert again.rig.tier.report.blocks == held == capacity - 8
    again.close()


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Whatever it was doing: every job ends, and what is said to be there is right."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    rig = MoverRig(tmp_path, has_process=True, slots=256, options=PATIENT)
    stored: list[BlockHash] = []
    for turn in range(ROUNDS):
        first = 100 * turn
        assert rig.store(first + 9, [key(first + 90)]).success, "the next one carries on"
        batches = [keys(first, first + 16), keys(first + 16, first + 32)]
        known = [h for h in stored[-16:] if rig.rig.policy.get(h) is not None]
        for job, batch in enumerate(batches):
            assert rig.begin_store(first + job, batch, 16 * job)
        assert rig.begin_load(first + 2, known)
        old = pid_of(rig)
        rig.process.wait(lambda: False, rng.random() * 0.01)
        os.kill(old, signal.SIGKILL)
        rig.down.wait({first, first + 1}, LIMIT_S)
        ended = {result.job_id: result for result in rig.down.get_finished()}
        for job, batch in enumerate(batches):
            rig.land(batch, ended.pop(first + job))
        assert not ended
        rig.end_load(known, rig.end(rig.up, first + 2))
        up_again(rig, old)
        stored = [h for h in batches[0] + batches[1] if rig.rig.policy.get(h) is not None]
        assert all(rig.load(first + 3, stored[:32]))
        rig.rig.check_sums()
    rig.close()


def test_stopped_and_continued(rig: MoverRig) -> None:
    """Stopped, it holds its jobs and nobody up; its slots are its own until it answers."""
    rig.store(1, keys(4))
    os.kill(pid_of(rig), signal.SIGSTOP)
    assert rig.begin_load(2, keys(4))
    assert rig.begin_store(3, keys(10, 14))
    for _ in range(100):
        assert rig.up.get_finished() == rig.down.get_finished() == []
    rig.up.wait({2}, 0.01)
    assert rig.up.get_finished() == []
    os.kill(pid_of(rig), signal.SIGCONT)
    assert all(rig.end_load(keys(4), rig.end(rig.up, 2)))
    rig.land(keys(10, 14), rig.end(rig.down, 3))
    assert rig.load(4, keys(10, 14)) == [True] * 4


def test_stopped_for_good_is_killed(tmp_path: Path) -> None:
    options = MoverOptions(silence_limit_s=0.0, starts_per_minute=100)
    rig = MoverRig(tmp_path, has_process=True, options=options)
    old = pid_of(rig)
    os.kill(old, signal.SIGSTOP)
    assert rig.begin_store(1, keys(4))
    rig.land(keys(4), rig.end(rig.down, 1))
    assert rig.rig.policy.get(key(0)) is None
    rig.close()


def test_a_stopped_mover_does_not_hold_up_a_shutdown(rig: MoverRig) -> None:
    assert rig.begin_store(1, keys(4))
    rig.land(keys(4), rig.end(rig.down, 1))
    os.kill(pid_of(rig), signal.SIGSTOP)
    assert rig.begin_load(2, keys(4))
    assert rig.up.shutdown(0.0)
    (result,) = rig.up.get_finished()
    assert set(result.outcomes) == {BlockOutcome.IO_ERROR}
    rig.end_load(keys(4), result)


def test_it_cannot_be_interrupted_from_the_keyboard(rig: MoverRig) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid_of(rig), number)
    assert rig.store(1, keys(4)).success


PARENT = """
import sys
from pathlib import Path
from support.clock import ManualClock
from support.mover_rig import MoverRig
from support.nvme_rig import key
rig = MoverRig(Path(sys.argv[1]), has_process=True, slots=512)
rig.store(99, [key(20)])
print("up")
print(rig.process.pid, flush=True)
sys.stdin.readline()
for job in range(20):
    rig.begin_store(job, [key(job)], 1 + job)
print("busy", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_a_mover_does_not_outlive_its_parent(
    tmp_path: Path, is_stopped: bool, child: Start
) -> None:
    parent = child(PARENT, tmp_path)
    assert parent.stdout is not None and parent.stdin is not None
    mover = int(parent.stdout.readline())
    pidfd = os.pidfd_open(mover)
    try:
        if is_stopped:
            os.kill(mover, signal.SIGSTOP)
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "busy\n"
        parent.kill()
        assert ended_within_limit(pidfd)
    finally:
        os.close(pidfd)
    again = MoverRig(tmp_path, has_process=False, slots=512)
    there = [h for h in keys(21) if again.rig.policy.get(h) is not None]
    assert key(20) in there and all(again.load(1, there))
    again.close()


def test_it_starts_light(rig: MoverRig) -> None:
    maps = Path(f"/proc/{pid_of(rig)}/maps").read_text()
    assert "lmdb" in maps and "libtorch" not in maps


def test_it_ends_once_it_cannot_change_the_index(tmp_path: Path) -> None:
    """LMDB takes nothing more from a process that could not write its head; the next one may."""
    rig, sent = Rig(config_for([tmp_path])), list[bytes]()
    with ThreadPoolExecutor(1) as pool:
        server = MoverServer(
            rig.tier.store, memoryview(bytearray(BLOCK)), (pool, pool), sent.append
        )
        server.carry_out(RemoveJob(1, (), 0))
        rig.tier.index.has_panicked = True
        with pytest.raises(TierIOError, match="opening it anew"):
            server.carry_out(RemoveJob(2, (), 0))
    assert len(sent) == 1
    rig.close()
