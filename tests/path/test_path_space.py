"""Capacity, reserve and budget over all namespaces of a path, and whose blocks leave for whose."""

from __future__ import annotations

import errno
import json
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from support.executors import SteppingExecutor
from support.path_rig import BLOCK_BYTES, ROOT, PathRig, RigNode, key_of, slots_in

from kvcascade.errors import ConfigError, TierIOError
from kvcascade.tiers.nvme.path.path_messages import (
    Ask,
    Committed,
    Grant,
    Release,
    SegmentsRemoved,
    TierFigures,
    Touch,
    Why,
)
from kvcascade.tiers.nvme.path.writer.namespace.namespace_home import NamespaceHome
from kvcascade.tiers.nvme.path.writer.namespace.namespace_openings import (
    BeingOpenedError,
    NamespaceToOpen,
)
from kvcascade.tiers.nvme.path.writer.path_capacity import PATH_REST_S, RETRY_AFTER_S
from kvcascade.tiers.nvme.path.writer.path_namespaces import PathNamespaces
from kvcascade.tiers.nvme.path.writer.path_plan import plan_segments
from kvcascade.tiers.nvme.path.writer.path_writer import FIGURES_EVERY_S
from kvcascade.tiers.nvme.segments.format import segment_name, segment_number
from kvcascade.tiers.nvme.segments.segment_files import SegmentFiles


def shared(**options: object) -> PathRig:
    """A path that has room for two namespaces with about 30 segments, their indexes counted."""
    return PathRig(120, **options)  # type: ignore[arg-type]


def bytes_of(rig: PathRig, root: Path = ROOT) -> int:
    """Bytes of all segments in a path."""
    return rig.fs.used_bytes(root)


def segments(rig: PathRig) -> dict[str, int]:
    """Number of segments by label."""
    found = rig.writer.namespaces.items()
    return {name.split("-")[0]: len(each.space.segments) for name, each in found}


def fill(node: RigNode, keys: range, rounds: int = 30) -> None:
    """Store keys in steps of eight, while time goes by."""
    for start in range(keys.start, keys.stop, 8):
        for _ in range(rounds):
            if node.store(list(range(start, min(start + 8, keys.stop))), steps=200):
                break
        node.rig.step(2, seconds=1.0)


def test_a_capacity_has_no_more_segments_than_names() -> None:
    for paths in (1, 3):
        last = plan_segments(1 << 43, BLOCK_BYTES, paths, 1).segments - 1
        assert last > 999_990 and segment_number(segment_name(last)) == last


@pytest.mark.parametrize("kib", [4, 16, 64, 1024])
@pytest.mark.parametrize("paths", [1, 8])
def test_the_capacity_that_a_refusal_names_is_enough(kib: int, paths: int) -> None:
    with pytest.raises(ConfigError, match="at least") as refused:
        plan_segments(1 << 20, kib << 10, paths)
    least = int(str(refused.value).split()[-2])
    for capacity in range(least, least + (1 << 20), 50_000):
        assert plan_segments(capacity, kib << 10, paths).segments >= paths
    with pytest.raises(ConfigError):
        plan_segments(least - 1, kib << 10, paths)


def test_a_namespace_that_needs_room_takes_the_coldest_segments_of_another() -> None:
    rig = shared()
    old = RigNode(rig, "old")
    fill(old, range(0, 640))
    before = segments(rig)["old"]
    most = bytes_of(rig)
    new = RigNode(rig, "new")
    rig.step(300, seconds=0.01)
    assert new.has_answer()
    fill(new, range(1000, 1016))
    counts = segments(rig)
    assert counts["new"] >= 2
    assert counts["old"] < before
    assert bytes_of(rig) <= rig.options.capacity_bytes
    assert most <= rig.options.capacity_bytes
    assert old.held(list(range(632, 640))) == list(range(632, 640)), "the warmest ones stay"
    assert new.held(list(range(1000, 1016)))[-8:] == list(range(1008, 1016))
    assert [m.numbers for m in rig.take(old.client, SegmentsRemoved)]


@pytest.mark.parametrize("was_ahead_s", [0.0, 1e6], ids=["right clock", "clock was ahead"])
def test_a_warm_namespace_loses_nothing_to_one_that_is_warm_itself(was_ahead_s: float) -> None:
    """A use that a wrong clock put into the future makes no other namespace cold."""
    rig = shared()
    warm, other = RigNode(rig, "warm"), RigNode(rig, "other")
    fill(warm, range(0, 640))
    rig.wall.advance(was_ahead_s)
    fill(other, range(1000, 1008))
    rig.wall.advance(-was_ahead_s)
    keys = warm.held(list(range(640)))
    counts = segments(rig)
    for start in range(2000, 2100, 4):
        rig.send(warm.client, Touch([key_of(key) for key in keys]))
        other.store(list(range(start, start + 4)), steps=50)
        rig.step(seconds=1.0)
    assert segments(rig)["warm"] >= counts["warm"] - 1
    assert len(warm.held(keys)) >= len(keys) - 8


def test_a_min_share_is_never_taken() -> None:
    rig = shared()
    size = 20 * 8 * BLOCK_BYTES
    old = RigNode(rig, "old", min_share_bytes=size)
    fill(old, range(0, 640))
    new = RigNode(rig, "new")
    fill(new, range(1000, 1240))
    file_bytes = rig.writer.namespaces[old.welcome.folder].home.layout.file_bytes  # type: ignore
    assert segments(rig)["old"] * file_bytes >= size
    rig.close()
    rig.start()  # the share is recorded with the path: it holds while nobody has it open
    new = RigNode(rig, "new")
    fill(new, range(3000, 3240))
    assert rig.fs.used_bytes(ROOT / old.welcome.folder / "segments") >= size  # type: ignore


def test_a_path_that_shrinks_takes_a_min_share_last() -> None:
    rig = shared()
    fill(RigNode(rig, "old", min_share_bytes=2 * 8 * BLOCK_BYTES), range(0, 16))
    fill(RigNode(rig, "warm"), range(1000, 1016))
    rig.step(10)
    space = rig.writer.path.space
    order: list[str] = []
    while space.take_coldest(None, {0}):
        assert space.taking is not None
        order.append(space.taking.name.split("-")[0])
        rig.step(4)
    assert order == ["old", "warm", "warm", "warm", "old", "old"], "one of old is beyond its share"


def look_at(rig: PathRig, node: RigNode) -> None:
    """Ask about the namespace that a node had open, like a tool, and leave."""
    client = next(rig.numbers)
    rig.inboxes[client] = deque()
    body = json.dumps({"name": node.welcome.folder}).encode()  # type: ignore[union-attr]
    rig.writer.connect(client)
    rig.send(client, Ask(1, "namespace", body))
    rig.step(2)
    assert node.welcome.folder in rig.writer.namespaces  # type: ignore[union-attr]
    rig.writer.disconnect(client)


def test_a_namespace_without_blocks_is_there_after_a_tool_has_looked_at_it() -> None:
    rig = PathRig()
    node = RigNode(rig)
    rig.close()
    rig.start()
    look_at(rig, node)
    rig.step(10, seconds=1.0)
    assert rig.fs.exists(ROOT / node.welcome.folder)  # type: ignore[union-attr]


@pytest.mark.parametrize("is_looked_at", [False, True])
def test_a_namespace_that_nobody_has_open_gives_its_segments_and_is_removed(
    is_looked_at: bool,
) -> None:
    """A tool that only looks at a namespace does not keep it for ever."""
    rig = shared()
    old = RigNode(rig, "old")
    fill(old, range(0, 240))
    rig.close()
    rig.start()
    if is_looked_at:
        look_at(rig, old)
    new = RigNode(rig, "new")
    fill(new, range(1000, 2000))
    rig.step(10, seconds=1.0)
    assert segments(rig).keys() == {"new"}
    assert not rig.fs.exists(ROOT / old.welcome.folder)  # type: ignore[union-attr]
    assert bytes_of(rig) <= rig.options.capacity_bytes


@pytest.mark.parametrize("is_final", [False, True])
def test_a_namespace_that_cannot_be_opened_for_its_room_is_tried_again(is_final: bool) -> None:
    rig = shared()
    old = RigNode(rig, "old")
    fill(old, range(0, 16))
    rig.close()
    rig.start()
    space, folder = rig.writer.path.space, old.welcome.folder  # type: ignore[union-attr]
    description = rig.fs.read(ROOT / folder / "namespace.json", 1 << 20)
    if is_final:
        rig.fs.replace(ROOT / folder / "namespace.json", b"{}")
    else:
        rig.fs.fail("lock", errno.EMFILE)
    assert space.take_coldest(None, {0})
    rig.step()
    rig.fs.replace(ROOT / folder / "namespace.json", description)
    rig.step(seconds=RETRY_AFTER_S - 1)
    assert not space.take_coldest(None, {0}), "it rests"
    rig.step(seconds=2.0)
    assert space.take_coldest(None, {0}) is not is_final, "damage does not mend itself"
    rig.step()
    assert (folder in rig.writer.namespaces) is not is_final


def test_an_idle_namespace_that_never_opens_holds_up_no_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries, home_of = list[str](), PathNamespaces._home_of

    def broken(path: PathNamespaces, opening: NamespaceToOpen) -> NamespaceHome:
        if not opening.is_for_room:
            return home_of(path, opening)
        tries.append(opening.name)
        raise TierIOError(errno.EIO, "the device failed")

    monkeypatch.setattr(PathNamespaces, "_home_of", broken)
    rig = shared()
    old = RigNode(rig, "old")
    fill(old, range(0, 120))
    rig.close()
    rig.start()
    new = RigNode(rig, "new")
    fill(new, range(1000, 1960))
    for start in range(2000, 4000, 8):
        assert new.store(range(start, start + 8), steps=12) == [Committed.OK] * 8
        rig.step(seconds=0.5)
    assert len(tries) > 2


def test_a_smaller_capacity_holds_from_the_next_writer_on() -> None:
    rig = PathRig(6)
    node = RigNode(rig, "m")
    fill(node, range(0, 48))
    assert segments(rig)["m"] == 6
    home = rig.writer.namespaces[node.welcome.folder].home  # type: ignore[union-attr]
    taken = rig.writer.path.space.own_bytes(0)
    less = msgspec.structs.replace(rig.options, capacity_bytes=taken - 2 * home.layout.file_bytes)
    rig.close()
    rig.start(less)
    node = RigNode(rig, "m", less)
    rig.step(20, seconds=1.0)
    assert 1 <= segments(rig)["m"] <= 4
    figures = rig.take(node.client, TierFigures)[-1]
    assert figures.capacity_blocks == 4 * home.layout.slots < home.slots
    assert bytes_of(rig) <= less.capacity_bytes
    assert node.store([500]) == [Committed.OK]


def test_a_segment_that_cannot_be_deleted_is_tried_again_after_a_pause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = PathRig(6)
    fill(RigNode(rig, "m"), range(0, 48))
    space = rig.writer.path.space
    goal = space.own_bytes(0) - 100_000
    options = space.capacity.options
    space.capacity.options = msgspec.structs.replace(options, capacity_bytes=goal)
    rig.fs.fail("unlink", errno.EROFS, times=2)
    rig.step(50, seconds=RETRY_AFTER_S / 40)
    assert segments(rig)["m"] == 6 and caplog.text.count("could not be deleted") == 1
    rig.step(50, seconds=RETRY_AFTER_S / 40)
    assert space.own_bytes(0) <= goal
    assert caplog.text.count("could not be deleted") == 1


def test_a_segment_whose_blocks_cannot_be_removed_is_tried_again_after_a_pause() -> None:
    rig = PathRig(6)
    fill(RigNode(rig, "m"), range(0, 48))
    space, (disk,) = rig.writer.path.space, rig.disks.values()
    goal = space.own_bytes(0) - 100_000
    options = space.capacity.options
    space.capacity.options = msgspec.structs.replace(options, capacity_bytes=goal)
    disk.failures = [Committed.IO_ERROR] * 3
    rig.step(50, seconds=PATH_REST_S / 100)
    assert space.own_bytes(0) > goal and len(disk.failures) == 2
    assert rig.writer.wait_s == FIGURES_EVERY_S, "it does nothing until then"
    rig.step(200, seconds=PATH_REST_S / 40)
    assert space.own_bytes(0) <= goal and not disk.failures


def test_a_segment_for_which_memory_lacks_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    left, create = [MemoryError()], SegmentFiles.create

    def lacking(files: SegmentFiles, numbers: Sequence[int]) -> None:
        if left:
            raise left.pop()
        create(files, numbers)

    monkeypatch.setattr(SegmentFiles, "create", lacking)
    rig = PathRig(1)
    node = RigNode(rig)
    assert node.store([1], steps=200) == []
    rig.step(seconds=RETRY_AFTER_S)
    assert node.store([1], steps=200) == [Committed.OK]


def test_a_path_shrinks_while_an_engine_writes_to_an_empty_segment() -> None:
    rig = PathRig(8)
    node = RigNode(rig)
    for start in range(0, 40, 8):
        node.store(list(range(start, start + 8)))
        rig.step(seconds=1.0)
    node.ask([100])
    rig.step(3)
    capacity = rig.writer.path.space.capacity
    goal = rig.writer.path.space.own_bytes(0) - 100_000
    capacity.options = msgspec.structs.replace(capacity.options, capacity_bytes=goal)
    rig.step(20)
    assert rig.writer.path.space.own_bytes(0) <= goal
    (granted,) = node.grants()
    node.commit([100], slots_in(granted), granted.epoch)
    rig.step()
    assert node.held([*range(40), 100]) == [*range(24, 40), 100]


def test_the_reserve_of_the_disk_is_kept() -> None:
    rig = PathRig(4, min_free_bytes=1 << 20)
    node = RigNode(rig, "m")
    node.store([1])
    used = sum(len(each.data) for each in rig.fs._nodes.values())
    rig.fs.size_bytes = used + (1 << 20) + 4 * BLOCK_BYTES
    for start in range(100, 160, 4):
        node.store(list(range(start, start + 4)), steps=300)
        rig.step(seconds=1.0)
    assert rig.fs.free_bytes(ROOT) >= 1 << 20
    assert segments(rig)["m"] == 1


@pytest.mark.parametrize("opens", ["engine", "tool", "room"])
def test_the_tables_of_a_raised_capacity_take_nothing_of_the_reserve(opens: str) -> None:
    rig = PathRig(20, min_free_bytes=1 << 20)
    former = RigNode(rig).welcome
    assert former is not None and RigNode(rig).store([1, 2]) == [Committed.OK] * 2
    rig.close()
    rig.fs.size_bytes = rig.fs.used_bytes(Path("/")) + (1 << 20) + 4 * BLOCK_BYTES
    larger = 200 * rig.options.capacity_bytes
    rig.start(msgspec.structs.replace(rig.options, capacity_bytes=larger))
    path, least = rig.writer.path, rig.fs.free_bytes(ROOT)
    if opens == "tool":
        with pytest.raises(BeingOpenedError):
            path.look_at(former.folder)
    elif opens == "room":
        assert path.space.take_coldest(None, {0})
    node = RigNode(rig)
    assert min(least, rig.fs.free_bytes(ROOT)) >= 1 << 20
    assert node.welcome is not None and node.welcome.slots == former.slots
    assert node.held([1, 2]) == [1, 2] and node.store([3]) == [Committed.OK]
    rig.close()
    rig.fs.size_bytes = 1 << 40
    rig.start()
    node = RigNode(rig)
    assert node.welcome is not None and node.welcome.slots > 100 * former.slots
    assert node.held([1, 2, 3]) == [1, 2, 3]


def at_the_reserve(less_bytes: int) -> tuple[PathRig, RigNode]:
    """A path with a cold namespace, whose disk other files filled up to the reserve or beyond; and
    a node of an empty namespace."""
    rig = PathRig(300, min_free_bytes=1 << 20)
    old, new = RigNode(rig, "old"), RigNode(rig, "new")
    fill(old, range(0, 80))
    rig.fs.size_bytes = rig.fs.used_bytes(Path("/")) + (1 << 20) - less_bytes
    rig.step(5, seconds=60.0)
    return rig, new


def test_a_full_disk_costs_a_cold_namespace_what_another_one_needs() -> None:
    rig, new = at_the_reserve(0)
    before = segments(rig)["old"]
    fill(new, range(1000, 1016))
    assert new.held(range(1000, 1016)) == list(range(1000, 1016))
    assert sum(segments(rig).values()) == before


def test_a_disk_that_lacks_more_than_a_segment_costs_no_whole_namespace() -> None:
    rig, new = at_the_reserve(1 << 20)
    before = segments(rig)["old"]
    for second in range(25):
        new.store([second], steps=20)
        rig.step(seconds=0.8)
    assert segments(rig) == {"old": before - 1, "new": 0}
    rig.step(2, seconds=RETRY_AFTER_S)
    new.store([99], steps=20)
    assert segments(rig) == {"old": before - 2, "new": 0}


def test_the_room_of_an_older_version_that_ended_is_used() -> None:
    rig = PathRig(60)
    old = ROOT / "old-0123456789ab"
    rig.fs.make_dir(old)
    rig.fs.open(old / "000000.safetensors", create=True).preallocate(40 * 9 * BLOCK_BYTES)
    lock = rig.fs.lock(old / "lock", shared=True)
    node = RigNode(rig)
    fill(node, range(0, 96))
    assert [*segments(rig).values()] < [10]
    lock.release()
    rig.step(seconds=RETRY_AFTER_S)
    fill(node, range(1000, 1480))
    assert [*segments(rig).values()] == [60] and not rig.fs.exists(old)


def test_a_disk_that_lacks_more_than_all_segments_costs_nothing_when_a_model_comes() -> None:
    rig = PathRig(120, min_free_bytes=8 << 20)
    fill(RigNode(rig, "old"), range(0, 40))
    before = segments(rig)
    rig.fs.size_bytes = rig.fs.used_bytes(Path("/"))
    new = RigNode(rig, "new")
    rig.step(20, seconds=0.1)
    assert new.has_answer() and "lower min_free" in new.refused[0].text
    assert segments(rig) == before


def test_room_for_a_new_namespace_is_made_on_the_disk_that_lacks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roots = (Path("/one"), Path("/two"))
    rig = PathRig(600, roots=roots, min_free_bytes=1 << 20)
    old = RigNode(rig, "old")
    fill(old, range(0, 64))
    folders = [root / old.welcome.folder for root in roots]  # type: ignore[union-attr]
    before = [bytes_of(rig, folder) for folder in folders]

    def free_bytes(path: Path) -> int:
        lack = (1 << 20) - 1000 + before[1] - bytes_of(rig, folders[1])
        return lack if roots[1] in (path, *path.parents) else 1 << 40

    monkeypatch.setattr(rig.fs, "free_bytes", free_bytes)
    new = RigNode(rig, "new")
    rig.step(20, seconds=0.1)
    assert new.has_answer() and new.welcome is not None
    assert bytes_of(rig, folders[0]) == before[0]
    assert 0 < bytes_of(rig, folders[1]) < before[1]


def test_the_first_namespace_has_room_on_a_disk_that_an_older_version_filled() -> None:
    rig = PathRig(40, min_free_bytes=1 << 20)
    old = ROOT / "old-0123456789ab"
    rig.fs.make_dir(old)
    rig.fs.open(old / "000000.safetensors", create=True).preallocate(8 << 20)
    rig.fs.lock(old / "lock", shared=True).release()
    rig.fs.size_bytes = rig.fs.used_bytes(Path("/")) + (1 << 20)
    assert RigNode(rig).store([1]) == [Committed.OK]
    assert not rig.fs.exists(old) and rig.fs.free_bytes(ROOT) >= 1 << 20


def test_the_capacity_holds_for_all_together() -> None:
    """Engines of two models store at random, and come and go. What a new model needs for its
    tables is taken from the other one."""
    rng = random.Random(5)
    rig = shared()
    space, capacity = rig.writer.path.space, rig.options.capacity_bytes
    nodes: dict[str, RigNode] = {}
    most = 0
    for _ in range(400):
        label = rng.choice(("one", "two"))
        if label not in nodes:
            nodes[label] = RigNode(rig, label)
            rig.step(200, seconds=0.01)
        elif rng.random() < 0.02:
            rig.writer.disconnect(nodes.pop(label).client)
            continue
        first = rng.randrange(100_000)
        nodes[label].store(list(range(first, first + 8)), steps=200)
        rig.step(seconds=rng.random())
        most = max(most, space.own_bytes(0))
    assert capacity * 0.8 < most <= capacity


def test_no_more_is_granted_than_the_budget_of_the_day() -> None:
    rig = shared(write_budget_bytes=20 * BLOCK_BYTES)
    one, two = RigNode(rig, "one"), RigNode(rig, "two")
    assert len(one.store(list(range(8)))) == 8
    assert len(two.store(list(range(8)))) == 8
    one.ask(list(range(100, 108)))
    rig.step(4, seconds=1.0)
    (answer,) = one.grants()
    assert answer.why is Why.BUDGET
    assert sum(slot >= 0 for slot in slots_in(answer)) == 4
    two.ask([200])
    rig.step(4, seconds=1.0)
    (nothing,) = two.grants()
    assert nothing.why is Why.BUDGET and slots_in(nothing) == [-2]
    assert rig.take(two.client, TierFigures)[-1].budget_left_bytes == 0
    rig.kill()
    rig.start()
    one = RigNode(rig, "one")
    assert len(one.store(list(range(100, 140)))) == 4, (
        "a grant that was not committed does not count"
    )
    rig.wall.advance(86_400 * 2)
    assert len(one.store(list(range(300, 308)), steps=300)) == 8


@pytest.mark.parametrize("is_open", [True, False])
def test_the_budget_counts_what_was_written_to_a_removed_namespace(is_open: bool) -> None:
    rig = shared(write_budget_bytes=20 * BLOCK_BYTES)
    one = RigNode(rig, "one")
    one.store(list(range(5)))
    rig.wall.advance(80_000)
    one.store(list(range(10, 13)))
    rig.writer.disconnect(one.client)
    if not is_open:
        rig.close()
        rig.start()
    assert budget_left(rig) == 12
    remove(rig, one)
    assert budget_left(rig) == 12
    rig.kill()
    rig.start()
    assert budget_left(rig) == 12
    rig.wall.advance(10_000)
    assert budget_left(rig) == 17, "the first five are a day old"


def test_a_budget_that_begins_later_counts_what_was_written_before() -> None:
    rig = shared()
    idle, gone = RigNode(rig, "idle"), RigNode(rig, "gone")
    idle.store(list(range(3)))
    gone.store(list(range(4)))
    rig.writer.disconnect(gone.client)
    remove(rig, gone)
    rig.close()
    rig.start(msgspec.structs.replace(rig.options, write_budget_bytes=20 * BLOCK_BYTES))
    RigNode(rig, "open").store(list(range(5)))
    assert budget_left(rig) == 8


def test_the_budget_counts_writes_later_than_the_noted_use() -> None:
    rig = shared(write_budget_bytes=20 * BLOCK_BYTES)
    one = RigNode(rig, "one")
    rig.wall.advance(50)
    one.store([1, 2])
    rig.kill()  # the use was noted 50 s before
    rig.wall.advance(86_370)
    rig.start()
    assert budget_left(rig) == 18
    rig.wall.advance(5000)
    assert budget_left(rig) == 20


def test_a_budget_removes_no_namespace_whose_index_cannot_be_opened() -> None:
    rig = PathRig(245, write_budget_bytes=1 << 40)
    old = RigNode(rig, "old")
    fill(old, range(0, 240))
    rig.close()
    for disk in rig.disks.values():
        disk.identity = b"damaged"
    rig.start()
    fill(RigNode(rig, "new"), range(1000, 1720))
    rig.step(10, seconds=1.0)
    assert segments(rig)["new"] > 80
    assert rig.fs.exists(ROOT / old.welcome.folder)  # type: ignore[union-attr]


def budget_left(rig: PathRig) -> int:
    """Number of blocks that the budget of the day has left."""
    left = rig.writer.path.budget_left_bytes()
    assert left is not None
    return left // BLOCK_BYTES


def remove(rig: PathRig, node: RigNode) -> None:
    """Remove the namespace of a node that has left."""
    assert node.welcome is not None
    name = node.welcome.folder
    namespace = rig.writer.namespaces.get(name)
    path = rig.writer.path
    assert path.remove_idle(name) if namespace is None else path.remove(namespace)


def test_a_failed_path_rests_and_the_other_one_takes_the_writes() -> None:
    roots = (Path("/one"), Path("/two"))
    rig = PathRig(8, roots=roots)
    node = RigNode(rig)
    node.store(list(range(16)))
    node.ask([100, 101])
    rig.step(4, seconds=0.01)
    (answer,) = node.grants()
    slots = slots_in(answer)
    bad = slots[0] // 8 % 2
    rig.send(node.client, Release(answer.slots, has_failed=True))
    rig.step()
    for start in range(200, 232, 4):
        node.ask(list(range(start, start + 4)))
        rig.step(4, seconds=0.01)
        for each in node.grants():
            granted = [slot for slot in slots_in(each) if slot >= 0]
            assert all(slot // 8 % 2 != bad for slot in granted)
            node.commit(range(start, start + len(granted)), granted, each.epoch)


def test_nothing_is_evicted_while_all_paths_rest() -> None:
    rig = PathRig()
    node = RigNode(rig)
    stored = [key for start in range(0, 64, 4) for key in range(start, start + 4)]
    for start in range(0, 64, 4):
        node.store(list(range(start, start + 4)))
    held = node.held(stored)
    node.ask([100])
    rig.step(4, seconds=0.01)
    (answer,) = node.grants()
    held = node.held(held)
    rig.send(node.client, Release(answer.slots, has_failed=True))
    for start in range(200, 400, 4):  # other engines, and calls that are tried again
        node.ask(list(range(start, start + 4)))
        rig.step(2, seconds=0.01)
    answers = node.grants()
    assert len(answers) == 50 and {each.why for each in answers} == {Why.RESTING}
    assert node.held(held) == held


def test_a_grant_waits_for_a_segment_that_is_being_made() -> None:
    executor = SteppingExecutor()
    rig = PathRig(executor=executor)
    node = RigNode(rig)
    node.ask([1, 2])
    rig.step(3, seconds=0.01)
    assert node.grants() == []
    executor.run_all()
    rig.step(2, seconds=0.01)
    (answer,) = node.grants()
    assert all(slot >= 0 for slot in slots_in(answer))


def test_segments_for_grants_that_wait_are_made_together() -> None:
    executor = SteppingExecutor()
    rig = PathRig(executor=executor)
    node = RigNode(rig)
    for first in range(0, 32, 8):
        node.ask(range(first, first + 8))
    rig.step()
    assert executor.step() and not executor.step(), "one job makes all of them"
    rig.step(2, seconds=0.01)
    answers = node.grants()
    assert len(answers) == 4
    assert all(slot >= 0 for answer in answers for slot in slots_in(answer))


def test_where_the_reserve_leaves_less_than_a_batch_one_segment_is_made() -> None:
    executor = SteppingExecutor()
    rig = PathRig(executor=executor, min_free_bytes=1 << 20)
    node = RigNode(rig)
    (namespace,) = rig.writer.namespaces.values()
    left_bytes = 2 * namespace.home.layout.file_bytes
    rig.fs.size_bytes = rig.fs.used_bytes(Path("/")) + (1 << 20) + left_bytes
    for first in range(0, 32, 8):
        node.ask(range(first, first + 8))
    for made in (1, 2, 2):
        rig.step()
        executor.run_all()
        rig.step()
        assert [*segments(rig).values()] == [made]
    assert rig.fs.free_bytes(ROOT) >= 1 << 20
    assert rig.writer.path.space.files.numbers(namespace.home.name) == namespace.space.segments


def test_a_grant_is_answered_when_no_segment_comes() -> None:
    rig = PathRig(executor=SteppingExecutor())
    node = RigNode(rig)
    rig.send(node.client, Grant(1, [key_of(1)]))
    rig.step(3, seconds=0.6)
    (answer,) = node.grants()
    assert (slots_in(answer), answer.why) == ([-2], Why.LATER)


def test_two_engines_of_one_model_hit_as_often_as_one_with_the_whole_tier() -> None:
    """The load is skewed: one engine asks nine times as often, for its own part of the keys."""
    ratios = []
    for engines in (1, 2):
        rng = random.Random(7)
        rig = PathRig(segments=8)
        nodes = [RigNode(rig) for _ in range(engines)]
        hits = 0
        for _ in range(3000):
            is_busy = rng.random() < 0.9
            key = int(rng.paretovariate(0.6)) % 400 + (0 if is_busy else 1000)
            node = nodes[-1 if is_busy else 0]
            if node.held([key]):
                hits += 1
                rig.send(node.client, Touch([key_of(key)]))
            else:
                node.store([key])
        ratios.append(hits / 3000)
    assert 0.3 < ratios[0] < 0.95
    assert abs(ratios[0] - ratios[1]) < 0.01
