"""Writes under a writer that was killed: no slot is granted twice while they may run."""

from __future__ import annotations

import errno

import pytest
from support.path_rig import ROOT, PathRig, RigNode

from kvcascade.tiers.nvme.path.former_writes import (
    FORMER_WRITES_LIMIT_S,
    FormerWrites,
    hold_writes,
)
from kvcascade.tiers.nvme.path.path_messages import Committed
from kvcascade.tiers.nvme.path.writer.path_options import PATH_FOLDER


def names(rig: PathRig) -> list[str]:
    """Lock files of this writer and of former ones."""
    return [name for name in rig.fs.list_dir(ROOT / PATH_FOLDER) if name.startswith("writes")]


@pytest.fixture
def rig() -> PathRig:
    """A path with a block, whose slots are known to a second writer."""
    rig = PathRig()
    assert RigNode(rig).store([1]) == [Committed.OK]
    return rig


def test_a_new_writer_grants_nothing_until_writes_of_before_have_ended(rig: PathRig) -> None:
    first = hold_writes(rig.fs, ROOT)
    rig.kill()
    rig.start()
    second = hold_writes(rig.fs, ROOT)  # under the second writer, which is killed, too
    rig.kill()
    rig.start()
    assert first is not None and second is not None
    node = RigNode(rig)
    node.ask([2, 3])
    for lock in (second, first):
        rig.step(3, seconds=0.01)
        assert not node.grants()
        lock.release()
    rig.step()
    assert len(node.grants()) == 1 and not names(rig)


def test_engines_that_store_nothing_leave_no_files(rig: PathRig) -> None:
    for _ in range(3):
        lock = hold_writes(rig.fs, ROOT)
        assert lock is not None
        lock.release()
        rig.kill()
        rig.start()
        RigNode(rig)
    rig.step(seconds=1.0)
    assert names(rig) == []


def test_writes_under_this_writer_do_not_delay_its_grants(rig: PathRig) -> None:
    rig.kill()
    rig.start()
    assert hold_writes(rig.fs, ROOT) is not None
    assert RigNode(rig).store([2]) == [Committed.OK]
    assert names(rig) == ["writes"]


def test_a_node_that_never_ends_its_writes_stops_no_store_for_ever(
    rig: PathRig, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be stopped in the middle of a write."""
    assert hold_writes(rig.fs, ROOT) is not None
    rig.kill()
    rig.start()
    node = RigNode(rig)
    node.ask([2])
    rig.step()
    assert not node.grants()
    rig.step(seconds=FORMER_WRITES_LIMIT_S)
    node.grants()
    assert node.store([2]) == [Committed.OK]
    assert caplog.text.count("without its end") == 1


@pytest.mark.parametrize("operation", ["lock", "rename"])
def test_a_disk_without_room_for_the_lock_stops_nothing(rig: PathRig, operation: str) -> None:
    if operation == "lock":
        rig.fs.fail("lock", errno.ENOSPC)
        assert hold_writes(rig.fs, ROOT) is None
        return
    assert hold_writes(rig.fs, ROOT) is not None
    rig.kill()
    rig.fs.fail(operation, errno.EIO)
    rig.start()
    assert RigNode(rig).store([2]) == [Committed.OK]


def test_the_wait_for_one_model_holds_no_other_up_once_the_first_wait_is_over(
    rig: PathRig, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was granted since the writer's start, so nobody noticed that its wait ended."""
    assert hold_writes(rig.fs, ROOT) is not None
    writes = FormerWrites(rig.fs, ROOT, rig.clock)
    assert hold_writes(rig.fs, ROOT) is not None
    rig.clock.advance(3600.0)
    writes.wait_for(frozenset({"removed"}))
    assert not writes.may_run("other") and writes.may_run("removed")
    assert not caplog.text
