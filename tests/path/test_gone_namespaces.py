"""Namespaces that another program removes under a writer, by `rm` or `mv`: they begin anew."""

from __future__ import annotations

import errno
import json
import shutil
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from support.executors import SteppingExecutor
from support.path_rig import BLOCK_BYTES, ROOT, PathRig, RigNode, slots_in

from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.namespace import DESCRIPTION, LOCK
from kvcascade.tiers.nvme.path.former_writes import hold_writes
from kvcascade.tiers.nvme.path.path_messages import Ask, Committed, Release, Told
from kvcascade.tiers.nvme.path.writer.path_capacity import RETRY_AFTER_S

ROOTS = (Path("/one"), Path("/two"))
OK = Committed.OK
PARTS = ["lock", "segments", "lock segments", "lock blocks"]
"""Parts that `rm -r` took before the description."""


def folder_of(node: RigNode, root: Path = ROOT) -> Path:
    """Directory of the namespace of a node."""
    assert node.welcome is not None
    return root / node.welcome.folder


def remove(rig: PathRig, node: RigNode, *parts: str) -> None:
    """Remove parts of the directory of a namespace, or all of it (""), as `rm -r` does."""
    for part in parts:
        folder = folder_of(node, rig.roots[0]) / part
        rig.fs.remove_tree(folder)
        for name in [name for name in rig.disks if name.is_relative_to(folder)]:
            del rig.disks[name]


def budget_left(rig: PathRig) -> int:
    """Number of blocks that the budget of the day has left."""
    left = rig.writer.path.budget_left_bytes()
    assert left is not None
    return left // BLOCK_BYTES


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


def half_removed(parts: str) -> tuple[PathRig, RigNode]:
    """Return a node with 8 blocks, of which parts were removed. A day's budget is 20 blocks."""
    rig = PathRig(40, executor=SteppingExecutor(), write_budget_bytes=20 * BLOCK_BYTES)
    node = RigNode(rig)
    store(node, range(8))
    remove(rig, node, *parts.split())
    rig.writer.forget_gone()
    assert not rig.writer.namespaces
    return rig, node


def ask(rig: PathRig, what: str, **body: object) -> Any:
    """Ask the writer as a tool does."""
    client = next(rig.numbers)
    rig.inboxes[client] = deque()
    rig.writer.connect(client)
    rig.send(client, Ask(1, what, json.dumps(body).encode()))
    rig.step(2)
    (told,) = rig.take(client, Told)
    rig.writer.disconnect(client)
    return json.loads(told.body)


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


def test_no_slot_is_granted_while_a_write_into_the_former_files_may_run() -> None:
    """The new files have the names of the former ones."""
    rig = PathRig(120)
    gone = RigNode(rig)
    writes = hold_writes(rig.fs, ROOT)
    assert writes is not None
    gone.ask([1])
    rig.step(4, seconds=0.01)
    assert len(gone.grants()) == 1
    remove(rig, gone, "")
    rig.writer.forget_gone()
    again, other = RigNode(rig, epoch=0), RigNode(rig, "other")
    again.ask([2])
    assert other.store([1]) == [OK], "it does not wait"
    rig.step(4, seconds=0.01)
    assert not again.grants()
    writes.release()
    rig.step(4, seconds=0.01)
    assert len(again.grants()) == 1


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


def check_that_work_ends_first(rig: PathRig, node: RigNode) -> None:
    """Remove a namespace: it is forgotten once its work on I/O threads has ended."""
    remove(rig, node, "")
    rig.writer.forget_gone()
    assert clients(rig) == [node.client]
    rig.executor.run_all()  # type: ignore[attr-defined]
    rig.step()
    rig.writer.forget_gone()
    assert clients(rig) == []


def test_a_segment_of_it_is_made_first() -> None:
    """The file would come into the new directory, and nobody would count it."""
    rig = PathRig(40, executor=SteppingExecutor())
    node = RigNode(rig)
    node.ask([1])
    rig.step()
    check_that_work_ends_first(rig, node)


def test_a_deletion_in_another_namespace_holds_up_nothing() -> None:
    rig = PathRig(120, executor=SteppingExecutor())
    node, other = RigNode(rig, "gone"), RigNode(rig, "other")
    store(other, range(8))
    assert rig.writer.path.space.take(folder_of(other).name, 0)
    rig.step()
    assert rig.writer.path.space.is_taking
    remove(rig, node, "")
    rig.writer.forget_gone()
    assert clients(rig) == [other.client]


def test_a_segment_of_it_is_deleted_first() -> None:
    """A file of the new directory may have the same name by then."""
    rig = PathRig(40, executor=SteppingExecutor())
    node = RigNode(rig)
    store(node, range(8))
    assert rig.writer.path.space.take(folder_of(node).name, 0)
    rig.step()
    check_that_work_ends_first(rig, node)


@pytest.mark.parametrize("is_open", [True, False])
def test_what_was_written_to_it_counts_in_the_budget_and_its_room_is_free(is_open: bool) -> None:
    rig = PathRig(40, write_budget_bytes=20 * BLOCK_BYTES)
    gone = RigNode(rig, "gone")
    assert gone.store(range(8)) == [OK] * 8
    if not is_open:
        rig.close()
        rig.start()
    remove(rig, gone, "")
    rig.writer.forget_gone()
    assert budget_left(rig) == 12
    assert rig.writer.path.space.own_bytes(0) == 0


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_the_budget_is_exact_while_a_description_outlives_other_parts(
    part: str, is_restarted: bool
) -> None:
    rig, node = half_removed(part)
    assert budget_left(rig) == 12
    if is_restarted:
        rig.kill()
        rig.start()
        assert budget_left(rig) == 12
    remove(rig, node, "")
    for _ in range(2):
        rig.writer.forget_gone()
        assert budget_left(rig) == 12
        assert rig.writer.path.space.own_bytes(0) == 0
    rig.kill()
    rig.start()
    assert budget_left(rig) == 12


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("later", ["", "blocks", "blocks namespace.json"])
@pytest.mark.parametrize("when", ["before", "while it opens", "once it is open"])
def test_the_budget_is_exact_if_the_namespace_begins_again_in_between(
    part: str, later: str, when: str
) -> None:
    """`later` names the parts that go then, which the writer may notice or not."""
    rig, node = half_removed(part)
    if when == "before":
        remove(rig, node, *later.split())
    again = RigNode(rig, may_wait=True)
    assert not again.has_answer()
    if when == "once it is open":
        rig.executor.run_all()  # type: ignore[attr-defined]
    if when != "before":
        remove(rig, node, *later.split())
        rig.writer.forget_gone()
    rig.executor.run_all()  # type: ignore[attr-defined]
    rig.step()
    assert again.has_answer() and folder_of(again) == folder_of(node)
    assert budget_left(rig) == 12
    store(again, range(100, 108))
    assert budget_left(rig) == 4
    remove(rig, again, "")
    rig.writer.forget_gone()
    assert budget_left(rig) == 4


def test_what_is_left_of_a_namespace_counts_and_is_removed_by_its_name() -> None:
    rig, node = half_removed("lock")
    name = folder_of(node).name
    left_bytes = rig.fs.used_bytes(folder_of(node))
    assert rig.writer.path.space.own_bytes(0) == left_bytes > 8 * BLOCK_BYTES
    assert not rig.fs.exists(folder_of(node) / "lock"), "nothing is made where others remove"
    assert [each["name"] for each in ask(rig, "list")["namespaces"]] == [name]
    assert ask(rig, "remove", name=name) == {"is_removed": True}
    assert not rig.fs.exists(folder_of(node))
    assert rig.writer.path.space.own_bytes(0) == 0 and budget_left(rig) == 12


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_namespace_whose_removal_fails_at_once_stays_and_counts(is_gone: bool) -> None:
    """Too many files are open, or the directory of the second path is not there."""
    rig = PathRig(80, roots=ROOTS)
    node = RigNode(rig)
    node.store(list(range(16)))
    rig.close()
    rig.start()
    name, before = folder_of(node).name, rig.writer.path.space.own_bytes(0)
    if is_gone:
        rig.fs.rename(ROOTS[1], Path("/away"))
    else:
        rig.fs.fail("lock", errno.EMFILE)
    assert "error" in ask(rig, "remove", name=name)
    assert rig.fs.exists(ROOTS[0] / name / "blocks")
    assert rig.writer.path.space.own_bytes(0) == before > 0
    rig.fs.heal()
    if is_gone:
        rig.fs.rename(Path("/away"), ROOTS[1])
    assert ask(rig, "remove", name=name) == {"is_removed": True}
    assert not any(rig.fs.exists(root / name) for root in ROOTS)


def test_what_is_left_of_a_namespace_that_a_tool_looked_at_leaves_if_its_room_is_needed() -> None:
    rig = PathRig(40)
    node = RigNode(rig)
    rig.close()
    rig.start()
    name = folder_of(node).name
    assert "error" not in ask(rig, "namespace", name=name)
    remove(rig, node, "lock")
    rig.writer.forget_gone()
    assert rig.writer.path.space.take_coldest(None, {0})
    rig.step(4, seconds=1.0)
    assert not rig.fs.exists(folder_of(node))


@pytest.mark.parametrize("parts", ["", "lock segments blocks presence"])
def test_the_tables_that_are_made_anew_take_nothing_of_the_reserve(parts: str) -> None:
    rig = PathRig(20, min_free_bytes=1 << 20)
    gone = RigNode(rig)
    rig.close()
    rig.start()
    remove(rig, gone, *(parts.split() or [""]))
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


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_namespace_that_could_not_be_opened_counts_until_it_is_removed(is_locked: bool) -> None:
    """An engine asked for one of an older version; then another model fills the path."""
    rig = PathRig(20)
    asked = RigNode(PathRig(20), "other")
    assert asked.welcome is not None
    described = asked.rig.fs.read(ROOT / asked.welcome.folder / DESCRIPTION, 1 << 20)
    older = ROOT / asked.welcome.folder
    rig.fs.make_dir(older)
    document = json.loads(described) | {"format_version": 1}
    rig.fs.replace(older / DESCRIPTION, json.dumps(document).encode())
    rig.fs.open(older / "000000.safetensors", create=True).preallocate(14 * 9 * BLOCK_BYTES)
    lock = rig.fs.lock(older / LOCK, shared=True)
    if not is_locked:
        lock.release()
    rig.close()
    rig.start()
    node = RigNode(rig, "model")
    assert RigNode(rig, "other").refused
    for first in range(0, 240, 8):
        for _ in range(30):
            if node.store(range(first, first + 8), steps=200):
                break
        rig.step(2, seconds=1.0)
    left = rig.fs.used_bytes(older) if rig.fs.exists(older) else 0
    assert rig.fs.exists(older) is is_locked
    assert rig.writer.path.space.own_bytes(0) + left <= rig.options.capacity_bytes
