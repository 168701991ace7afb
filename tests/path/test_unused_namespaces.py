"""Namespaces that no node uses any more: the writer closes them, and loses nothing by it."""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.executors import SteppingExecutor
from support.path_rig import BLOCK_BYTES, PathRig, RigNode

from kvcascade.errors import InUseError
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.path_messages import Ask, Committed
from kvcascade.tiers.nvme.path.writer import unused_namespaces
from kvcascade.tiers.nvme.path.writer.namespace.namespace_openings import BeingOpenedError
from kvcascade.tiers.nvme.path.writer.unused_namespaces import UNUSED_LIMIT_S

WIDE = 300
"""Segments of a path that has room for three namespaces and more."""
KEYS = range(8)


def folder_of(node: RigNode) -> Path:
    """Directory of the namespace of a node."""
    assert node.welcome is not None
    return node.rig.roots[0] / node.welcome.folder


def fill(node: RigNode, keys: range) -> None:
    """Store blocks, and wait for segments."""
    for start in range(keys.start, keys.stop, 8):
        node.store(range(start, start + 8), steps=100)
        node.rig.step(seconds=1.0)


def leave(node: RigNode) -> None:
    """The node ends its connection."""
    node.rig.writer.disconnect(node.client)
    node.rig.step()


def left_alone(rig: PathRig, seconds: float = UNUSED_LIMIT_S) -> None:
    """The writer works for a while, and nobody asks for anything."""
    for _ in range(round(seconds) + 2):
        rig.step(seconds=1.0)


def seconds_until_closed(rig: PathRig, name: str) -> int:
    """Leave the writer alone until a namespace is closed."""
    for seconds in range(round(2 * UNUSED_LIMIT_S)):
        if name not in rig.writer.namespaces:
            return seconds
        rig.step(seconds=1.0)
    raise AssertionError(f"{name} was never closed")


def test_one_that_is_opened_again_at_once_is_kept_as_long() -> None:
    rig = PathRig(WIDE)
    node = RigNode(rig, "leaves")
    node.store(KEYS)
    leave(node)
    name = folder_of(node).name
    seconds_until_closed(rig, name)
    with pytest.raises(BeingOpenedError):
        rig.writer.path.look_at(name)
    rig.step(seconds=0.3)
    assert seconds_until_closed(rig, name) > UNUSED_LIMIT_S - 10


def test_use_beside_a_tool_counts() -> None:
    rig = PathRig(WIDE)
    stays, node = RigNode(rig, "stays"), RigNode(rig, "leaves")
    node.store(KEYS)
    leave(node)
    left_alone(rig, UNUSED_LIMIT_S - 100)
    tool = 9999
    rig.inboxes[tool] = deque()
    rig.writer.connect(tool)
    rig.send(tool, Ask(1, "list", b"{}"))
    left_alone(rig, 100)
    again = RigNode(rig, "leaves")
    left_alone(rig, 100)
    leave(again)
    rig.writer.disconnect(tool)
    assert seconds_until_closed(rig, folder_of(again).name) > UNUSED_LIMIT_S - 10
    assert folder_of(stays).name in rig.writer.namespaces


def test_it_is_closed_and_found_again_with_its_blocks_and_its_room() -> None:
    rig = PathRig(WIDE, write_budget_bytes=100 * BLOCK_BYTES)
    stays, node = RigNode(rig, "stays"), RigNode(rig, "leaves")
    assert node.store(KEYS) == [Committed.OK] * 8
    own, left = rig.writer.path.space.own_bytes(0), rig.writer.path.budget_left_bytes()
    leave(node)
    left_alone(rig, UNUSED_LIMIT_S - 10)
    assert folder_of(node).name in rig.writer.namespaces, "an engine that restarts finds it open"
    left_alone(rig, 10)
    assert [*rig.writer.namespaces] == [folder_of(stays).name]
    assert (rig.writer.path.space.own_bytes(0), rig.writer.path.budget_left_bytes()) == (own, left)
    again = RigNode(rig, "leaves")
    assert again.held(KEYS) == [*KEYS]
    assert rig.writer.path.space.own_bytes(0) == own


def test_its_room_goes_to_those_that_need_it() -> None:
    rig = PathRig(WIDE)
    node = RigNode(rig, "leaves")
    fill(node, range(40))
    leave(node)
    left_alone(rig)
    assert not rig.writer.namespaces
    fill(RigNode(rig, "comes"), range(1000, 1000 + 8 * WIDE))
    assert not rig.fs.exists(folder_of(node))


def test_the_room_of_one_without_blocks_that_a_tool_looked_at_is_used() -> None:
    rig = PathRig(WIDE)
    node = RigNode(rig, "looked at")
    rig.close()
    rig.start()
    with pytest.raises(BeingOpenedError):
        rig.writer.path.look_at(folder_of(node).name)
    left_alone(rig)
    assert not rig.writer.namespaces
    assert rig.fs.exists(folder_of(node))
    fill(RigNode(rig, "comes"), range(1000, 1000 + 8 * WIDE))
    assert not rig.fs.exists(folder_of(node))


def test_it_stays_open_while_a_node_uses_it() -> None:
    rig = PathRig(WIDE)
    node = RigNode(rig)
    left_alone(rig)
    leave(node)
    left_alone(rig, UNUSED_LIMIT_S / 2)
    node = RigNode(rig)
    node.store(KEYS)
    left_alone(rig)
    leave(node)
    left_alone(rig, UNUSED_LIMIT_S / 2)
    assert folder_of(node).name in rig.writer.namespaces, "the time began anew"


@pytest.mark.parametrize("work", ["a segment is taken", "a reset is not durable"])
def test_it_stays_open_until_its_work_has_ended(work: str) -> None:
    rig = PathRig(WIDE)
    node = RigNode(rig)
    fill(node, range(40))
    name = folder_of(node).name
    leave(node)
    (disk,) = rig.disks.values()
    disk.failures = [Committed.IO_ERROR] * 1000
    if work == "a segment is taken":
        assert rig.writer.path.space.take(name, 0)
    else:
        assert not rig.writer.namespaces[name].reset(rig.clock())
    left_alone(rig)
    assert name in rig.writer.namespaces
    disk.failures.clear()
    left_alone(rig)
    assert not rig.writer.namespaces


def test_who_comes_back_meanwhile_waits_until_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = PathRig(WIDE)
    for label in ("leaves", "other"):
        RigNode(rig, label).store(KEYS)
    rig.close()
    rig.executor = executor = SteppingExecutor()
    rig.start()
    node, other = RigNode(rig, "leaves"), RigNode(rig, "other")
    leave(node)
    leave(other)
    left_alone(rig)
    assert [*rig.writer.namespaces] == [folder_of(other).name], "one at a time"
    with pytest.raises(InUseError):
        rig.writer.path.remove_idle(folder_of(node).name)
    again = RigNode(rig, "leaves", may_wait=True)
    assert len(executor) == 2
    waited = []
    monkeypatch.setattr(unused_namespaces, "wait", lambda _: waited.append(executor.step()))
    assert executor.step(1)
    assert waited == [True], "it was closed first"
    rig.step()
    assert again.has_answer()
    assert again.held(KEYS) == [*KEYS]


@pytest.fixture
def without_collector() -> Iterator[None]:
    """No garbage is collected: in a quiet process that may take hours."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def kept(folder: Path) -> list[str]:
    """Files below a folder that this process has open or mapped, without locks."""
    opened = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    found = [os.readlink(link) for link in opened if os.path.lexists(link)]
    found += Path("/proc/self/maps").read_text().splitlines()
    return [line for line in found if str(folder) in line and not line.endswith("lock")]


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("is_removed", [False, True])
def test_models_that_come_and_go_keep_no_file(is_removed: bool, tmp_path: Path) -> None:
    real = RealFileSystem(direct=False)
    rig = PathRig(WIDE, roots=(tmp_path / "path",), real=real)
    for number in range(3):
        node = RigNode(rig, f"model {number}")
        node.store(KEYS)
        assert kept(folder_of(node))
        leave(node)
    if is_removed:
        assert all(map(rig.writer.path.remove, [*rig.writer.namespaces.values()]))
        rig.step()
    else:
        left_alone(rig, UNUSED_LIMIT_S + 3)
    assert not rig.writer.namespaces
    assert not kept(tmp_path)
