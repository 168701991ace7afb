"""Namespaces that another program removes under a writer, by `rm` or `mv`: they begin anew."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from support.executors import SteppingExecutor
from support.path_rig import BLOCK_BYTES, ROOT, PathRig, RigNode, slots_in

from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.path_messages import Committed, Release
from kvcascade.tiers.nvme.path.writer.path_capacity import RETRY_AFTER_S

ROOTS = (Path("/one"), Path("/two"))
OK = Committed.OK


def folder_of(node: RigNode, root: Path = ROOT) -> Path:
    """Directory of the namespace of a node."""
    assert node.welcome is not None
    return root / node.welcome.folder


def remove(rig: PathRig, node: RigNode, part: str = "") -> None:
    """Remove the directory of a namespace, or a part of it, as `rm -r` does."""
    folder = folder_of(node, rig.roots[0])
    rig.fs.remove_tree(folder / part)
    if not part:
        rig.disks = {name: disk for name, disk in rig.disks.items() if folder not in name.parents}


def store(node: RigNode, keys: range) -> None:
    """Store blocks, with all work on I/O threads that this takes."""
    rig = node.rig
    node.ask(keys)
    rig.step()
    rig.executor.run_all()  # type: ignore[attr-defined]
    rig.step()
    (answer,) = node.grants()
    node.commit(keys, slots_in(answer), answer.epoch)
    rig.executor.run_all()  # type: ignore[attr-defined]
    rig.step()
    assert node.outcomes() == [[OK] * len(keys)]


def clients(rig: PathRig) -> list[int]:
    """Numbers of the connections that the writer serves."""
    return [client.number for client in rig.writer.clients]


@pytest.mark.parametrize("part", ["", "segments"])
def test_its_engines_come_back_and_others_go_on(part: str) -> None:
    rig = PathRig(120)
    gone, other = RigNode(rig, "gone"), RigNode(rig, "other")
    own_bytes = rig.writer.path.space.own_bytes(0)
    assert gone.store(range(8)) == other.store(range(8)) == [OK] * 8
    gone.ask([100])
    rig.step(4, seconds=0.01)
    (answer,) = gone.grants()
    gone.commit([100], slots_in(answer), answer.epoch)
    remove(rig, gone, part)
    rig.writer.forget_gone()
    assert clients(rig) == [other.client], "the owner closes the connection"
    assert rig.writer.path.space.own_bytes(0) < own_bytes
    again = RigNode(rig, "gone", epoch=0)
    assert again.held([*range(8), 100]) == [] and not gone.outcomes()
    assert again.store(range(8)) == other.store(range(8, 16)) == [OK] * 8
    assert again.held(range(8)) == other.held(range(8)) == list(range(8))


def test_a_directory_that_was_replaced_is_not_touched_any_more() -> None:
    rig = PathRig(40)
    node = RigNode(rig)
    assert node.store([1]) == [OK]
    rig.fs.rename(folder_of(node), Path("/elsewhere"))
    rig.fs.make_dir(folder_of(node) / "segments")
    used_bytes = rig.fs.used_bytes(Path("/elsewhere"))
    rig.writer.forget_gone()
    assert not rig.writer.namespaces
    assert rig.fs.used_bytes(Path("/elsewhere")) == used_bytes
    assert rig.fs.exists(folder_of(node))


def test_a_failed_write_to_it_rests_no_path(tmp_path: Path) -> None:
    rig = PathRig(40, roots=[tmp_path], real=RealFileSystem())
    node = RigNode(rig)
    node.ask([1])
    rig.step(4, seconds=0.01)
    (answer,) = node.grants()
    shutil.rmtree(folder_of(node, tmp_path))
    rig.send(node.client, Release(answer.slots, has_failed=True))
    assert rig.writer.path.space.capacity.awake == [0]


def test_a_later_directory_that_is_not_there_may_be_unmounted() -> None:
    rig = PathRig(40, roots=ROOTS)
    node = RigNode(rig)
    rig.fs.remove_tree(folder_of(node, ROOTS[1]))
    rig.writer.forget_gone()
    assert clients(rig) == [node.client]


def test_a_segment_of_it_is_made_first() -> None:
    """The file would come into the new directory, and nobody would count it."""
    rig = PathRig(40, executor=SteppingExecutor())
    node = RigNode(rig)
    node.ask([1])
    rig.step()
    remove(rig, node)
    rig.writer.forget_gone()
    assert clients(rig) == [node.client]
    rig.executor.run_all()  # type: ignore[attr-defined]
    rig.step()
    rig.writer.forget_gone()
    assert clients(rig) == []


def test_a_segment_of_it_is_deleted_first() -> None:
    """A file of the new directory may have the same name by then."""
    rig = PathRig(40, executor=SteppingExecutor())
    node = RigNode(rig)
    store(node, range(8))
    assert rig.writer.path.space.take(folder_of(node).name, 0)
    rig.step()
    remove(rig, node)
    rig.writer.forget_gone()
    assert clients(rig) == [node.client]
    rig.executor.run_all()  # type: ignore[attr-defined]
    rig.step()
    rig.writer.forget_gone()
    assert clients(rig) == []


@pytest.mark.parametrize("is_open", [True, False])
def test_what_was_written_to_it_counts_in_the_budget_and_its_room_is_free(is_open: bool) -> None:
    rig = PathRig(40, write_budget_bytes=20 * BLOCK_BYTES)
    gone = RigNode(rig, "gone")
    assert gone.store(range(8)) == [OK] * 8
    if not is_open:
        rig.close()
        rig.start()
    remove(rig, gone)
    rig.writer.forget_gone()
    path = rig.writer.path
    assert path.budget.left_bytes(path.open.values()) == 12 * BLOCK_BYTES
    assert path.space.own_bytes(0) == 0


def test_the_tables_that_are_made_anew_take_nothing_of_the_reserve() -> None:
    rig = PathRig(20, min_free_bytes=1 << 20)
    gone = RigNode(rig)
    rig.close()
    rig.start()
    remove(rig, gone)
    rig.fs.size_bytes = rig.fs.used_bytes(Path("/")) + (1 << 20) + 4 * BLOCK_BYTES
    again = RigNode(rig)
    rig.step(20, seconds=1.0)
    assert again.has_answer() and "lower min_free" in again.refused[0].text
    assert rig.fs.free_bytes(ROOT) >= 1 << 20


@pytest.mark.parametrize("number", [errno.EACCES, errno.EFBIG, errno.EMFILE, errno.ENOENT])
def test_a_namespace_that_cannot_make_segments_costs_others_nothing(number: int) -> None:
    """Room would not help it. Others make theirs meanwhile."""
    rig = PathRig(120)
    old, new = RigNode(rig, "old"), RigNode(rig, "new")
    for start in range(0, 80, 8):
        old.store(range(start, start + 8), steps=50)
    before = rig.fs.used_bytes(ROOT)
    rig.fs.fail("preallocate", number, times=1_000_000)
    for second in range(100):
        assert new.store([second], steps=20) == []
        rig.step(seconds=1.0)
    assert rig.fs.used_bytes(ROOT) == before
    rig.fs.heal()
    assert old.store(range(100, 124), steps=200) == [Committed.OK] * 24
    assert old.held(range(80)) == list(range(80))
    rig.step(seconds=RETRY_AFTER_S)
    assert new.store([1], steps=200) == [Committed.OK]
