"""Promises of a writer that hold only once they are recorded: durability, epochs, budgets, room."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.executors import SteppingExecutor
from support.path_rig import BLOCK_BYTES, ROOT, PathRig, RigNode, slots_in

from kvcascade.errors import ConfigError, CorruptionError, TierIOError
from kvcascade.tiers.endurance import BUCKET_S, DAY_S
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.namespace import DESCRIPTION
from kvcascade.tiers.nvme.path.block_table import BlockTable
from kvcascade.tiers.nvme.path.lmdb_block_table import open_block_table
from kvcascade.tiers.nvme.path.path_messages import (
    Ask,
    Committed,
    RefusedWhy,
    Reset,
    SegmentsRemoved,
    Why,
)
from kvcascade.tiers.nvme.path.writer.namespace.namespace_home import NOTE_USE_EVERY_S
from kvcascade.tiers.nvme.path.writer.namespace.namespace_openings import BeingOpenedError
from kvcascade.tiers.nvme.path.writer.path_namespaces import PathNamespaces
from kvcascade.tiers.nvme.path.writer.path_options import save_record
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of

OK = Committed.OK


class LosesAll(random.Random):
    """Nothing that was not synced outlives a loss of power."""

    def choice(self, seq: Any) -> Any:
        return seq[0]


def filled(rig: PathRig) -> tuple[str, list[int]]:
    """Fill a tier of 64 blocks. Return the name of the namespace and the blocks."""
    node, blocks = RigNode(rig), list(range(64))
    for start in range(0, 64, 8):
        node.store(blocks[start : start + 8])
    assert node.welcome is not None and node.held(blocks) == blocks
    return node.welcome.folder, blocks


@pytest.mark.parametrize("fails", [False, True])
def test_power_holds_from_the_welcome_on_or_the_node_is_refused(fails: bool) -> None:
    rig = PathRig()
    assert RigNode(rig).store([1]) == [OK]
    power = msgspec.structs.replace(rig.options, durability="power")
    if fails:
        rig.fs.fail("sync_all", errno.EIO)
        assert RigNode(rig, options=power).refused
    node = RigNode(rig, options=power)
    assert node.welcome is not None and node.welcome.options.durability == "power"
    assert node.store([2]) == [OK]
    rig.lose_power(random.Random(1))
    rig.start(power)
    assert RigNode(rig, options=power).held([2]) == [2]


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("has_mount_point", [False, True])
def test_a_tier_of_which_a_disk_is_not_mounted_is_refused_and_keeps_its_blocks(
    has_mount_point: bool, is_lost: bool
) -> None:
    one, two, disk = Path("/one"), Path("/two"), Path("/disk")
    rig = PathRig(8, roots=(one, two))
    folder, blocks = filled(rig)
    rig.close()
    rig.fs.rename(two, disk)
    if has_mount_point:
        rig.fs.make_dir(two)
    for _ in range(2):
        with pytest.raises(ConfigError, match="/two has nothing of this tier; mount its disk"):
            rig.start()
    assert rig.fs.list_dir(two) == []
    if is_lost:
        rig.fs.make_dir(two)
        rig.fs.make_dir(two / folder)  # the remedy
    else:
        rig.fs.remove_tree(two)
        rig.fs.rename(disk, two)
    rig.start()
    assert len(RigNode(rig).held(blocks)) == (32 if is_lost else 64)


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_tier_whose_first_disk_is_not_mounted_is_refused_and_keeps_its_blocks(
    is_lost: bool, is_running: bool
) -> None:
    one, two, disk = Path("/one"), Path("/two"), Path("/disk")
    rig = PathRig(8, roots=(one, two))
    folder, blocks = filled(rig)
    if not is_running:
        rig.close()
    rig.fs.rename(one, disk)
    rig.fs.make_dir(one)  # the mount point
    found = "/one has nothing of this tier, but /two/.* mount its disk"
    if is_running:
        (refused,) = RigNode(rig, "new").refused
        assert re.search(found, refused.text)
        rig.kill()
        rig.fs.drop_locks()
    for _ in range(2):
        with pytest.raises(ConfigError, match=found):
            rig.start()
    assert rig.fs.list_dir(one) == []
    if is_lost:
        rig.fs.remove_tree(two / folder)  # the remedy
    else:
        rig.fs.remove_tree(one)
        rig.fs.rename(disk, one)
    rig.start()
    assert len(RigNode(rig).held(blocks)) == (0 if is_lost else 64)


@pytest.mark.parametrize("given", ["/new /one /two", "/two /one", "/two", "/two /new"])
def test_folders_of_a_tier_in_another_list_are_refused_and_keep_their_blocks(given: str) -> None:
    rig = PathRig(8, roots=(Path("/one"), Path("/two")))
    _, blocks = filled(rig)
    rig.close()
    rig.fs.make_dir(Path("/new"))
    roots, rig.roots = rig.roots, tuple(map(Path, given.split()))
    with pytest.raises(ConfigError, match="was made as part [01] of 2, .*give the same list"):
        rig.start()
    assert rig.fs.list_dir(Path("/new")) == []
    rig.roots = roots
    rig.start()
    assert RigNode(rig).held(blocks) == blocks


@pytest.mark.parametrize("part", [5, "x", None, [0]])
def test_a_later_folder_with_a_damaged_part_costs_its_own_model_alone(
    part: object, caplog: pytest.LogCaptureFixture
) -> None:
    rig = PathRig(400, roots=(ROOT, ROOT.with_name("more")))
    node, other = RigNode(rig), RigNode(rig, "other")
    assert node.welcome is not None and node.store([1, 2]) == [OK, OK]
    assert other.store([3]) == [OK]
    rig.close()
    folder = rig.roots[1] / node.welcome.folder
    former = rig.fs.read(folder / DESCRIPTION, 1 << 20)
    damaged = json.dumps({**json.loads(former), "part": part}).encode()
    rig.fs.replace(folder / DESCRIPTION, damaged)
    rig.start()
    assert caplog.text.count(f"{folder}/{DESCRIPTION}") == 1
    assert RigNode(rig, "other").held([3]) == [3]
    (refused,) = RigNode(rig).refused
    assert refused.why is RefusedWhy.NAMESPACE and str(folder) in refused.text
    rig.close()
    rig.fs.replace(folder / DESCRIPTION, former)
    rig.start()
    assert RigNode(rig).held([1, 2]) == [1, 2]


def test_what_was_stored_with_less_durability_is_synced_before_power_is_promised() -> None:
    """A node that offers such a block is told that it is held, also by a later writer."""
    rig = PathRig(120, durability="process")
    node, idle = RigNode(rig), RigNode(rig, "idle")
    assert node.store([1]) == idle.store([1]) == [OK]
    homes = [namespace.home for namespace in rig.writer.namespaces.values()]
    places = [(home.segments.path_of(0), home.layout.block_bytes) for home in homes]
    written = memoryview(b"payload")
    for file, place in places:
        rig.fs.open(file).pwritev([written], place)
    rig.close()
    power = msgspec.structs.replace(rig.options, durability="power")
    for name in ("model", "idle"):
        rig.start(power)
        assert RigNode(rig, name, options=power).held([1]) == [1]
        rig.kill()
        rig.fs.drop_locks()
    rig.lose_power(LosesAll())
    for file, place in places:
        found = bytearray(len(written))
        rig.fs.open(file).preadv([memoryview(found)], place)
        assert found == written


@pytest.mark.parametrize("need", ["a segment", "a new namespace", "an idle namespace", "a look"])
def test_a_disk_that_is_unmounted_under_a_writer_is_missed_at_the_next_start(need: str) -> None:
    """Nothing is made in the bare mount point, which the next start would take for the disk."""
    one, two, disk = Path("/one"), Path("/two"), Path("/disk")
    rig = PathRig(16_000, roots=(one, two))
    idle = RigNode(rig, "idle")
    assert idle.welcome is not None and idle.store([1]) == [OK]
    rig.close()
    rig.start()
    node, blocks = RigNode(rig), list(range(24))
    for start in range(0, 24, 8):
        node.store(blocks[start : start + 8])
    rig.fs.rename(two, disk)
    rig.fs.make_dir(two)
    if need == "a segment":
        for start in range(100, 140, 8):
            node.store(list(range(start, start + 8)))
        assert node.held(blocks), "the other disk goes on"
    elif need == "a look":
        with pytest.raises(BeingOpenedError):
            rig.writer.path.look_at(idle.welcome.folder)
        rig.step()
    else:
        refused = RigNode(rig, "new" if need == "a new namespace" else "idle").refused
        assert "/two has nothing of this tier" in refused[0].text
    assert rig.fs.list_dir(two) == []
    rig.kill()
    rig.fs.drop_locks()
    with pytest.raises(ConfigError, match="/two has nothing of this tier; mount its disk"):
        rig.start()
    rig.fs.remove_tree(two)
    rig.fs.rename(disk, two)
    rig.start()
    assert RigNode(rig, "idle").held([1]) == [1]


def test_a_writer_whose_index_cannot_be_opened_again_ends() -> None:
    """Another one leads then; nothing is stored into an index that was closed."""
    rig = PathRig()
    node = RigNode(rig)
    assert node.store([1]) == [OK]
    (namespace,) = rig.writer.namespaces.values()

    def fails(home: object) -> None:
        raise TierIOError(errno.EIO, "the device failed; look at it")

    with pytest.raises(TierIOError):
        namespace.make_durable(fails)  # type: ignore[arg-type]
    with pytest.raises(CorruptionError):
        rig.step()


@pytest.mark.parametrize("fails", [False, True])
def test_an_epoch_in_which_an_engine_begins_alone_is_on_the_disk_before_it_counts(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = PathRig()
    node = RigNode(rig)
    assert node.store([1]) == [OK]
    rig.send(node.client, Reset(5))
    rig.step()
    rig.close()
    rig.start()
    if fails:

        def full(*given: object) -> None:
            rig.fs.fail("pwritev", errno.ENOSPC)
            save_record(*given)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(f"{PathNamespaces.__module__}.save_record", full)
            assert RigNode(rig).refused
    assert RigNode(rig).store([2, 3]) == [OK] * 2
    rig.close()
    rig.start()
    assert RigNode(rig).held([2, 3]) == [2, 3]


def test_what_was_written_to_a_removed_namespace_counts_for_a_day() -> None:
    rig = PathRig(400, write_budget_bytes=40 * BLOCK_BYTES)
    node = RigNode(rig, "model of a night")
    assert node.store(list(range(8))) == [OK] * 8
    rig.writer.disconnect(node.client)
    (namespace,) = rig.writer.namespaces.values()
    rig.writer.path.remove(namespace)
    left = rig.writer.path.budget_left_bytes
    assert left() == 32 * BLOCK_BYTES
    rig.step(seconds=DAY_S + BUCKET_S)
    assert left() == 40 * BLOCK_BYTES


def test_the_rest_of_a_budget_is_granted_once_its_segments_are_made() -> None:
    executor = SteppingExecutor()
    rig = PathRig(400, executor=executor, write_budget_bytes=12 * BLOCK_BYTES)
    node = RigNode(rig)
    node.ask(range(20))
    rig.step(3, seconds=0.01)
    assert node.grants() == []
    executor.run_all()
    rig.step(3, seconds=0.01)
    (answer,) = node.grants()
    assert answer.why is Why.BUDGET and sum(slot >= 0 for slot in slots_in(answer)) == 12


def test_a_tier_without_room_is_full_although_the_budget_allows_less() -> None:
    """An engine drops blocks of its memory beside a full tier, and keeps them beside a budget."""
    rig = PathRig(2, write_budget_bytes=20 * BLOCK_BYTES)
    node = RigNode(rig)
    for keys in (range(16), range(100, 108)):
        node.ask(keys)
        rig.step(4, seconds=0.01)
    first, second = node.grants()
    assert first.why is Why.GRANTED and all(slot >= 0 for slot in slots_in(first))
    assert second.why is Why.FULL and slots_in(second) == [-2] * 8


def test_a_budget_outlives_a_writer_that_is_killed_after_days() -> None:
    """The next writer reads the totals of those namespaces only that were used in the last day."""
    rig = PathRig(120, write_budget_bytes=20 * BLOCK_BYTES)
    node = RigNode(rig, "one")
    rig.step(3 * 24 + 1, seconds=3600.0)
    assert node.store(list(range(20))) == [OK] * 20
    rig.kill()
    rig.start()
    assert RigNode(rig, "two").store(list(range(100, 120))) == []


def test_nodes_drop_a_segment_after_its_file_is_gone() -> None:
    """One that dropped it earlier could open the file again, and write into it for ever."""
    rig = PathRig(1)
    node = RigNode(rig)
    assert node.store([1]) == [OK] and node.welcome is not None
    home = rig.writer.namespaces[node.welcome.folder].home
    executor = rig.writer.path.space.files._executor = SteppingExecutor()
    body = msgspec.json.encode({"name": home.name, "segments": [0]})
    rig.send(node.client, Ask(7, "take", body))
    rig.step(3)
    assert not rig.take(node.client, SegmentsRemoved)
    assert executor.step() and not rig.fs.exists(home.segments.path_of(0))
    rig.step()
    assert len(rig.take(node.client, SegmentsRemoved)) == 1


class RealRig(PathRig):
    """A rig on a real folder, with LMDB."""

    def __init__(
        self, folder: Path, segments: int, slots_per_segment: int = 8, **options: Any
    ) -> None:
        real = RealFileSystem()
        super().__init__(segments, slots_per_segment, roots=(folder,), real=real, **options)

    def _open_table(
        self, folder: Path, map_bytes: int, identity: bytes, **facts: Any
    ) -> BlockTable:
        return open_block_table(folder, map_bytes, identity, **facts)


@pytest.mark.parametrize("is_index_lost", [False, True])
def test_with_power_every_name_is_synced_before_the_first_block_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_index_lost: bool
) -> None:
    """A block is lost if the index, or a folder on the way to it, has no name after the loss."""
    if is_index_lost:
        rig = RealRig(tmp_path, 4, durability="power")
        former = RigNode(rig)
        assert former.store([0]) == [OK] and former.welcome is not None
        rig.close()
        shutil.rmtree(tmp_path / former.welcome.folder / "blocks")
    events: list[tuple[str, Path]] = []
    fsync, rename, mkdir = os.fsync, os.rename, os.mkdir

    def syncing(descriptor: int) -> None:
        fsync(descriptor)
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def renaming(source: Path, target: Path) -> None:
        rename(source, target)
        events.append(("name", Path(target).parent))

    def making(path: Path, mode: int) -> None:
        mkdir(path, mode)
        events.append(("name", Path(path).parent))

    with monkeypatch.context() as patched:
        for name, call in ("fsync", syncing), ("mkdir", making):
            patched.setattr(os, name, call)
        for name in "rename", "replace":
            patched.setattr(os, name, renaming)
        rig = RealRig(tmp_path, 4, durability="power")
        node = RigNode(rig)
        assert node.store([1]) == [OK] and node.welcome is not None
    folder = tmp_path / node.welcome.folder
    for each in (
        (folder, folder / "blocks") if is_index_lost else (tmp_path, folder, folder / "blocks")
    ):
        last = [event for event in events if event[1] == each][-1]
        assert last == ("sync", each)
    rig.close()


@pytest.mark.parametrize("is_raised", [False, True])
def test_questions_about_idle_namespaces_cost_no_segment(tmp_path: Path, is_raised: bool) -> None:
    rig = RealRig(tmp_path, 400)
    idle = [RigNode(rig, label) for label in ("one", "two")]
    rig.close()
    capacity = rig.options.capacity_bytes * (1 + is_raised)
    rig.start(msgspec.structs.replace(rig.options, capacity_bytes=capacity))
    full, space = RigNode(rig, "full"), rig.writer.path.space
    size = 9 * BLOCK_BYTES  # of a segment with its header
    keys = iter(range(1 << 20))
    while space.capacity.left_bytes(0, space.own_bytes(0)) >= 2 * size:
        full.store([next(keys) for _ in range(8)], steps=100)
    folders = [node.welcome.folder for node in (full, *idle) if node.welcome is not None]
    held = space.files.numbers(folders[0])
    for folder in folders[1:]:
        with pytest.raises(BeingOpenedError):
            rig.writer.path.look_at(folder)
        rig.step(20, seconds=0.1)
        assert rig.writer.path.look_at(folder).home.name == folder
    rig.step(20, seconds=1.0)
    assert space.files.numbers(folders[0]) == held
    assert rig.files.used_bytes(tmp_path) <= space.own_bytes(0) <= capacity
    rig.close()


@pytest.mark.parametrize("keys", [8, 32_768])
def test_a_smaller_capacity_counts_an_index_that_stays_large(keys: int, tmp_path: Path) -> None:
    rig = RealRig(tmp_path, 80, slots_per_segment=512)
    node = RigNode(rig)
    for start in range(0, keys, 4096):
        assert len(node.store(range(start, min(keys, start + 4096)), steps=300))
    assert node.welcome is not None
    home = rig.writer.namespaces[node.welcome.folder].home
    index = rig.files.used_bytes(home.folders[0] / "blocks")
    rig.close()
    for number in home.segments.found():
        home.segments.remove(number)
    less = msgspec.structs.replace(rig.options, capacity_bytes=capacity_of(1, 512, BLOCK_BYTES))
    rig.start(less)
    RigNode(rig, options=less)
    assert rig.files.used_bytes(home.folders[0] / "blocks") < index, "unused pages are cut off"
    assert rig.files.used_bytes(tmp_path) <= rig.writer.path.space.own_bytes(0)


def test_the_budget_of_a_day_is_read_from_an_index_that_does_not_grow(tmp_path: Path) -> None:
    rig = RealRig(tmp_path, 20)
    assert RigNode(rig).store([1]) == [OK]
    rig.close()
    (index,) = tmp_path.rglob("data.mdb")
    before = index.stat().st_size
    capacity = 200 * rig.options.capacity_bytes
    larger = msgspec.structs.replace(rig.options, capacity_bytes=capacity)
    rig.start(msgspec.structs.replace(larger, write_budget_bytes=1 << 30))
    assert index.stat().st_size == before, "its namespace may stay idle on a full disk"
    assert rig.writer.path.space.idle.written_in_day() == BLOCK_BYTES
    rig.close()


@pytest.mark.parametrize("is_real", [False, True])
def test_a_smaller_capacity_after_segments_were_deleted_leaves_no_block_of_them(
    is_real: bool, tmp_path: Path
) -> None:
    rig = RealRig(tmp_path, 6) if is_real else PathRig(6)
    node = RigNode(rig)
    for start in range(0, 48, 8):
        assert node.store(list(range(start, start + 8)), steps=300) == [OK] * 8
        rig.step(3, seconds=1.0)
    assert node.welcome is not None
    home = rig.writer.namespaces[node.welcome.folder].home
    rig.close()
    for number in range(2, 6):
        home.segments.remove(number)
    capacity = capacity_of(2, 8, BLOCK_BYTES)
    less = msgspec.structs.replace(rig.options, capacity_bytes=capacity)
    rig.start(less)
    node = RigNode(rig, options=less)
    assert node.held(list(range(48))) == list(range(16))
    for start in range(0, 48, 4):  # the same prompts come again
        node.store(list(range(start, start + 4)), steps=300)


@pytest.mark.parametrize("end", ["reset", "index", "death"])
def test_the_budget_counts_what_was_written_in_vain(end: str) -> None:
    """A reset came, the index refused the blocks, or the node died before its commit."""
    rig = PathRig(write_budget_bytes=20 * BLOCK_BYTES)
    node, written = RigNode(rig), 0
    for round_ in range(8):
        blocks = [*range(round_ * 8, round_ * 8 + 8)]
        node.ask(blocks)
        rig.step(4, seconds=0.3)
        (answer,) = node.grants()
        granted = [(k, s) for k, s in zip(blocks, slots_in(answer), strict=True) if s >= 0]
        written += len(granted)
        if end == "death":
            rig.writer.disconnect(node.client)
            node = RigNode(rig)
            continue
        if end == "reset":
            rig.send(node.client, Reset(1000 + round_))
        else:
            next(iter(rig.disks.values())).failures = [Committed.IO_ERROR]
        node.commit([k for k, _ in granted], [s for _, s in granted], answer.epoch)
        rig.step(2, seconds=3.0)
        assert not any(OK in each for each in node.outcomes())
    assert written == 20 and rig.writer.path.budget_left_bytes() == 0
    rig.step(2, seconds=NOTE_USE_EVERY_S)
    rig.kill()
    rig.start()
    assert RigNode(rig).store([900]) == [], "it is written down"
    rig.wall.advance(2 * DAY_S)
    assert RigNode(rig).store([901], steps=300) == [OK]
