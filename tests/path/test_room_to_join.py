"""Room for the tables of a new model: in the capacity, and on a disk without a reserve."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.executors import SteppingExecutor
from support.path_rig import BLOCK_BYTES, ROOT, PathRig, RigNode, key_of, slots_in

from kvcascade.tiers.nvme.path.path_messages import RefusedWhy
from kvcascade.tiers.nvme.path.presence_file import map_presence
from kvcascade.tiers.nvme.path.writer.namespace.namespace_openings import (
    ROOM_LIMIT_S,
    BeingOpenedError,
)
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of

TWO = 120
"""Segments of a path that has room for the tables of two models and a few segments."""
WIDE = 200
"""Segments of a path that has room for the tables of two models and many segments."""
ONE = 30
"""Segments of a path that has room for the tables of one model only."""
ROOTS = [(ROOT,), (Path("/one"), Path("/two"))]


def fill(node: RigNode, keys: range) -> None:
    """Store keys until the path has no room for more."""
    for start in range(keys.start, keys.stop, 8):
        node.store(list(range(start, start + 8)), steps=200)
        node.rig.step(seconds=0.1)


def full(segments: int, **options: object) -> tuple[PathRig, RigNode]:
    """A path that a model fills, and its node."""
    rig = PathRig(segments, **options)  # type: ignore[arg-type]
    node = RigNode(rig, "old")
    fill(node, range(0, 16 * segments))
    return rig, node


def full_in_steps(segments: int) -> tuple[PathRig, SteppingExecutor, RigNode]:
    """A path that a model fills, with an executor that waits."""
    executor = SteppingExecutor()
    rig = PathRig(segments, executor=executor)
    node = RigNode(rig, "old")
    for first in range(0, 8 * segments, 8):
        node.ask(range(first, first + 8))
        rig.step()
        executor.run_all()
        rig.step(2, seconds=0.1)
        (granted,) = node.grants()
        node.commit(range(first, first + 8), slots_in(granted), granted.epoch)
        rig.step()
    return rig, executor, node


def wait(rig: PathRig, node: RigNode, seconds: float = 4 * ROOM_LIMIT_S) -> float:
    """Wait for the answer to a node. The capacity holds meanwhile. Return the seconds."""
    space, begin_s = rig.writer.path.space, rig.clock()
    while not node.has_answer():
        assert rig.clock() - begin_s < seconds, "it waits for ever"
        rig.step(seconds=0.01)
        for path in range(len(rig.roots)):
            assert space.own_bytes(path, with_new=False) <= space.capacity.share_bytes
    return rig.clock() - begin_s


def segments_of(rig: PathRig, node: RigNode) -> int:
    """Number of segments of a node's namespace."""
    assert node.welcome is not None
    return len(rig.writer.namespaces[node.welcome.folder].space.segments)


@pytest.mark.parametrize("roots", ROOTS, ids=len)
def test_tables_of_a_new_model_are_made_when_the_capacity_has_room(roots: tuple[Path, ...]) -> None:
    rig, old = full(TWO if len(roots) == 1 else 5 * TWO, roots=roots)
    before = segments_of(rig, old)
    new = RigNode(rig, "new")
    wait(rig, new)
    assert new.welcome is not None and segments_of(rig, old) < before
    fill(new, range(5000, 5016))
    assert new.held([5015]) == [5015]
    assert rig.writer.path.space.own_bytes(0) <= rig.writer.path.space.capacity.share_bytes


def test_a_disk_without_a_reserve_gets_room_that_the_other_model_does_not_take_again() -> None:
    rig = PathRig(4 * TWO)
    old = RigNode(rig, "old")
    fill(old, range(0, 16 * TWO))
    rig.fs.size_bytes = rig.fs.used_bytes(Path("/"))
    new = RigNode(rig, "new")
    for first in range(50_000, 56_400, 64):
        if new.has_answer():
            break
        old.store(list(range(first, first + 64)))
    assert new.welcome is not None, new.refused


@pytest.mark.parametrize("segments", [TWO, 20_000])
def test_idle_models_are_spared_if_all_of_them_are_not_room_enough(segments: int) -> None:
    """Each counted with all that its tables may take, and lost its blocks before the refusal."""
    rig = PathRig(segments)
    for name, first in (("old", 0), ("new", 5000)):
        node = RigNode(rig, name)
        fill(node, range(first, first + 80))
        rig.step(20, seconds=600.0)
    rig.close()
    rig.fs.size_bytes = rig.fs.used_bytes(Path("/")) + (64 << 10)
    capacity = capacity_of(20_000, 8, BLOCK_BYTES)
    rig.start(msgspec.structs.replace(rig.options, capacity_bytes=capacity))
    other = RigNode(rig, "other", rig.options)
    wait(rig, other)
    (refused,) = other.refused
    assert "free space there" in refused.text
    rig.fs.size_bytes = 1 << 30
    for name, first in (("old", 0), ("new", 5000)):
        node = RigNode(rig, name, rig.options)
        wait(rig, node)
        assert node.held(range(first, first + 80)) == list(range(first, first + 80))


def test_a_model_whose_tables_never_fit_is_refused_and_costs_nothing() -> None:
    rig, executor, old = full_in_steps(ONE)
    before = segments_of(rig, old)
    for _ in range(5):
        new = RigNode(rig, "new", may_wait=True)
        rig.step(20, seconds=0.1)
        assert len(executor) == 1, "nothing of the other model is deleted meanwhile"
        executor.run_all()
        assert wait(rig, new) < 1.0
        (refused,) = new.refused
        assert refused.why is RefusedWhy.FAILED and "raise the capacity" in refused.text
        rig.step(20, seconds=0.1)
    assert segments_of(rig, old) == before


def test_a_capacity_below_a_segment_is_refused_and_costs_no_other_model() -> None:
    """It is refused to the engine that named it, perhaps by mistake."""
    rig = PathRig(8, slots_per_segment=1024)
    folders = []
    for name, first in (("large", 0), ("other", 5000)):
        node = RigNode(rig, name)
        fill(node, range(first, first + 80))
        assert node.welcome is not None
        folders.append(node.welcome.folder)
    rig.close()
    small = capacity_of(4, 8, BLOCK_BYTES)
    assert small < 1024 * BLOCK_BYTES, "less than a segment"
    former, slots = rig.options, 8 * BLOCK_BYTES
    rig.start(msgspec.structs.replace(former, capacity_bytes=small, segment_bytes=slots))
    (refused,) = RigNode(rig, "large", rig.options).refused
    assert "holds no segment" in refused.text and folders[0] in refused.text
    rig.close()
    rig.start(former)
    other = RigNode(rig, "other", former)
    assert other.held(range(5000, 5080)) == list(range(5000, 5080))


def test_a_full_model_that_lost_its_index_counts_once() -> None:
    rig, old = full(ONE)
    before = segments_of(rig, old)
    rig.close()
    rig.disks.clear()
    rig.fs.remove_tree(ROOT / old.welcome.folder / "blocks")  # type: ignore[union-attr]
    rig.start()
    again = RigNode(rig, "old")
    assert again.welcome is not None, again.refused
    assert segments_of(rig, again) == before


def test_room_of_a_damaged_model_that_never_leaves_costs_the_others_nothing() -> None:
    rig = PathRig(WIDE)
    damaged = RigNode(rig, "damaged")
    fill(damaged, range(0, 8 * ONE))
    rig.close()
    rig.start()
    space, folder = rig.writer.path.space, damaged.welcome.folder  # type: ignore[union-attr]
    rig.fs.replace(ROOT / folder / "namespace.json", b"{}")
    assert space.take_coldest(None, {0})
    rig.step()
    old = RigNode(rig, "old")
    fill(old, range(0, 16 * WIDE))
    before = segments_of(rig, old)
    new = RigNode(rig, "new")
    assert wait(rig, new) < 1.0
    assert new.refused and segments_of(rig, old) == before


@pytest.mark.parametrize("is_idle", [False, True])
@pytest.mark.parametrize("roots", ROOTS, ids=len)
def test_a_model_without_engines_leaves_with_its_tables(
    roots: tuple[Path, ...], is_idle: bool
) -> None:
    """Its segments leave in every folder, because its tables leave with the last one."""
    rig, old = full(ONE, roots=roots)
    rig.writer.disconnect(old.client)
    if is_idle:
        rig.close()
        rig.start()
    new = RigNode(rig, "new")
    wait(rig, new)
    assert new.welcome is not None and old.welcome is not None
    assert [*rig.writer.namespaces] == [new.welcome.folder]
    assert not rig.fs.exists(roots[0] / old.welcome.folder)


def test_a_model_that_waits_for_segments_in_use_is_refused_and_joins_later() -> None:
    rig, old = full(TWO)
    count = segments_of(rig, old)
    old.ask(range(10_000, 10_000 + 8 * count))
    rig.step(40, seconds=0.1)
    (granted,) = old.grants()
    namespace = rig.writer.namespaces[old.welcome.folder]  # type: ignore[union-attr]
    assert namespace.space.written == namespace.space.segments
    new = RigNode(rig, "new")
    assert ROOM_LIMIT_S <= wait(rig, new) < ROOM_LIMIT_S + 1.0
    assert [each.why for each in new.refused] == [RefusedWhy.FAILED]
    slots = slots_in(granted)
    old.commit(range(10_000, 10_000 + len(slots)), slots, granted.epoch)
    rig.step()
    again = RigNode(rig, "new")
    wait(rig, again)
    assert again.welcome is not None


def test_a_model_waits_as_long_as_segments_leave() -> None:
    """A slow disk deletes one in three seconds."""
    rig, executor, _ = full_in_steps(TWO)
    new = RigNode(rig, "new", may_wait=True)
    for _ in range(2 * TWO):
        rig.step(30, seconds=0.1)
        executor.step()
        if new.has_answer():
            break
    assert new.welcome is not None and rig.clock() > 10 * ROOM_LIMIT_S


def test_other_paths_grow_while_a_model_waits_for_room_in_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = PathRig(60, roots=ROOTS[-1])
    node = RigNode(rig)
    node.store(range(8))
    (namespace,) = rig.writer.namespaces.values()
    path, made = rig.writer.path, list[int]()
    monkeypatch.setattr(path.space.files, "make", lambda _of, numbers, _own: made.extend(numbers))
    path.openings.lacking = 0
    assert path.space._grow(namespace, 100)
    assert made and {number % len(ROOTS[-1]) for number in made} == {1}


@pytest.mark.parametrize("opens", ["engine", "tool", "room"])
def test_tables_stay_as_they_are_if_the_disk_has_no_room_for_smaller_ones(opens: str) -> None:
    rig = PathRig(ONE)
    node, newest = RigNode(rig, "old"), range(40, 48)
    former = node.welcome
    assert former is not None
    for start in range(0, newest.stop, 8):
        assert len(node.store(range(start, start + 8), steps=100)) == 8
        rig.step(seconds=10.0)
    held = segments_of(rig, node)
    mapped = map_presence(rig.fs, ROOT / former.folder, former.slots)
    rig.close()
    rig.fs.size_bytes = rig.fs.used_bytes(Path("/"))
    less = rig.options.capacity_bytes - (ONE - held + 2) * 9 * BLOCK_BYTES
    options = msgspec.structs.replace(rig.options, capacity_bytes=less)
    rig.start(options)
    path = rig.writer.path
    if opens == "tool":
        with pytest.raises(BeingOpenedError):
            path.look_at(former.folder)
    elif opens == "room":
        assert path.space.take_coldest(None, {0})
    again = RigNode(rig, "old", options)
    assert again.welcome is not None, again.refused
    assert again.welcome.slots == former.slots and again.held(newest) == list(newest)
    assert mapped.find(key_of(newest[0])) >= 0, "who has it mapped sees the same table"
    rig.step(100, seconds=0.1)
    assert path.space.own_bytes(0) <= options.capacity_bytes
    assert 0 < segments_of(rig, again) < held
    rig.close()
    rig.start(options)
    again = RigNode(rig, "old", options)
    assert again.welcome is not None and again.welcome.slots < former.slots
    assert again.held(newest) == list(newest)
