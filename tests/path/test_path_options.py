"""Options of a path are the writer's: what an engine is told, and what holds after a restart."""

from __future__ import annotations

import codecs
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.path_rig import BLOCK_BYTES, ROOT, PathRig, RigNode, key_of

from kvcascade.errors import ConfigError, CorruptionError
from kvcascade.tiers.nvme.path.path_messages import Committed, PathOptions, Touch
from kvcascade.tiers.nvme.path.writer.path_options import (
    PATH_FILE,
    PATH_FOLDER,
    differences,
    load_record,
    save_record,
)
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of, plan_namespace
from kvcascade.tiers.nvme.segments.chains import CHAINS


def test_an_engine_that_says_otherwise_is_served_and_told_what_holds() -> None:
    rig = PathRig()
    node = RigNode(rig, options=msgspec.structs.replace(rig.options, policy="arc"))
    assert node.welcome is not None
    assert node.welcome.options == rig.options
    (note,) = node.welcome.notes
    assert "policy lru instead of arc" in note
    assert "capacity" not in note
    same = RigNode(rig).welcome
    assert same is not None and same.notes == []


@pytest.mark.parametrize(
    ("name", "factor", "is_told"),
    [
        ("capacity_bytes", 0.995, False),
        ("capacity_bytes", 0.98, True),
        ("min_free_bytes", 1.005, False),
        ("min_free_bytes", 1.02, True),
        ("segment_bytes", 1.005, True),
        ("write_budget_bytes", 1.005, True),
    ],
)
def test_shares_that_drift_with_the_disk_are_no_other_options(
    name: str, factor: float, is_told: bool
) -> None:
    has = PathOptions(1 << 30, 1 << 20, write_budget_bytes=1 << 30, segment_bytes=1 << 20)
    asked = msgspec.structs.replace(has, **{name: int(getattr(has, name) * factor)})
    said = differences(asked, has)
    assert len(said) == is_told and all(name.removesuffix("_bytes") in text for text in said)


def test_sizes_that_only_one_of_two_options_has_are_named() -> None:
    asked = PathOptions(1 << 30, write_budget_bytes=1 << 30)
    (said,) = differences(asked, PathOptions(1 << 30, segment_bytes=1 << 20))
    assert "write_budget none instead of 1.0 GiB" in said and "segment 1.0 MiB" in said


def test_options_are_recorded_and_those_of_the_next_writer_hold() -> None:
    rig = PathRig()
    RigNode(rig).store([1, 2])
    rig.close()
    record = load_record(rig.fs, ROOT)
    assert record is not None
    assert (record.paths, record.options) == (("/path",), rig.options)
    rig.start(msgspec.structs.replace(rig.options, policy="s3fifo"))
    node = RigNode(rig)
    assert node.held([1, 2]) == [1, 2]
    record = load_record(rig.fs, ROOT)
    assert record is not None and record.options.policy == "s3fifo"


@pytest.mark.parametrize("leave", [0, 100])
def test_a_full_disk_needs_no_record_of_other_options(leave: int) -> None:
    rig = PathRig()
    assert RigNode(rig).store([1, 2]) == [Committed.OK] * 2
    rig.close()
    size_bytes, former = rig.fs.size_bytes, load_record(rig.fs, ROOT)
    rig.fs.size_bytes = leave + size_bytes - rig.fs.free_bytes(ROOT)
    other = msgspec.structs.replace(rig.options, policy="s3fifo")
    rig.start(other)
    node = RigNode(rig)
    assert node.welcome is not None and node.welcome.options == other
    assert node.held([1, 2]) == [1, 2] and node.store([3]) == [Committed.OK]
    assert load_record(rig.fs, ROOT) == former
    rig.close()
    rig.fs.size_bytes = size_bytes
    rig.start(other)
    assert RigNode(rig).held([1, 2, 3]) == [1, 2, 3]
    record = load_record(rig.fs, ROOT)
    assert record is not None and record.options == other


def test_a_full_disk_needs_no_record_of_another_min_share() -> None:
    rig = PathRig()
    assert RigNode(rig).store([1, 2]) == [Committed.OK] * 2
    size_bytes = rig.fs.size_bytes
    rig.fs.size_bytes -= rig.fs.free_bytes(ROOT)
    node = RigNode(rig, min_share_bytes=1 << 20)
    assert node.welcome is not None and node.held([1, 2]) == [1, 2]
    (namespace,) = rig.writer.namespaces.values()
    assert namespace.min_share_bytes == 1 << 20
    rig.fs.size_bytes = size_bytes
    RigNode(rig, min_share_bytes=1 << 20)
    record = load_record(rig.fs, ROOT)
    assert record is not None, "the next engine records it"
    assert record.min_shares == {node.welcome.folder: 1 << 20}


@pytest.mark.parametrize("share", [-1, 1 << 63, (1 << 64) - 1])
def test_a_min_share_that_no_record_can_hold_is_refused(share: int) -> None:
    rig = PathRig()
    node = RigNode(rig, min_share_bytes=share)
    (refused,) = node.refused
    assert node.welcome is None and str(share) in refused.text
    assert RigNode(rig, min_share_bytes=(1 << 63) - 1).welcome is not None
    rig.close()
    rig.start()


def test_a_full_disk_makes_no_weaker_promise() -> None:
    rig = PathRig(durability="process")
    rig.close()
    rig.fs.size_bytes = 0
    power = msgspec.structs.replace(rig.options, durability="power")
    rig.start(power)
    assert RigNode(rig, options=power).refused


def test_the_stronger_durability_holds_from_the_node_on_that_asks_for_it() -> None:
    rig = PathRig(durability="process")
    RigNode(rig).store([1])
    strong = RigNode(rig, options=msgspec.structs.replace(rig.options, durability="power"))
    assert strong.welcome is not None and strong.welcome.options.durability == "power"
    assert strong.store([2])
    (disk,) = rig.disks.values()
    assert len(disk.states) == 1, "every commit is durable"
    weak = RigNode(rig)
    assert weak.welcome is not None and weak.welcome.options.durability == "power"
    assert any("durability power instead of process" in note for note in weak.welcome.notes)
    assert weak.held([1, 2]) == [1, 2]


def test_what_a_node_that_joined_before_stores_is_synced_by_the_writer() -> None:
    rig = PathRig(durability="process")
    weak = RigNode(rig)
    weak.store([1])
    strong = RigNode(rig, options=msgspec.structs.replace(rig.options, durability="power"))
    before = rig.fs.calls["sync"]
    strong.store([2])
    assert rig.fs.calls["sync"] == before, "its node syncs its own segments"
    weak.store([3])
    assert rig.fs.calls["sync"] == before + 1
    rig.fs.fail("sync", errno.EIO)
    assert weak.store([4]) == [Committed.IO_ERROR]
    assert weak.store([4]) == [Committed.OK]
    assert weak.held([1, 2, 3, 4]) == [1, 2, 3, 4]


def test_a_capacity_below_one_segment_is_refused_with_the_directory() -> None:
    rig = PathRig()
    node = RigNode(rig)
    assert node.welcome is not None and node.store([1]) == [Committed.OK]
    rig.close()
    capacity = capacity_of(1, 2, BLOCK_BYTES)
    few = msgspec.structs.replace(rig.options, capacity_bytes=capacity, segment_bytes=BLOCK_BYTES)
    former = rig.options
    rig.start(few)
    (refused,) = RigNode(rig).refused
    assert str(ROOT / node.welcome.folder) in refused.text
    rig.close()
    rig.start(former)
    assert RigNode(rig).held([1]) == [1]


def test_another_list_of_paths_is_no_writer() -> None:
    rig = PathRig()
    rig.close()
    rig.roots = (ROOT, ROOT.with_name("more"))
    rig.fs.make_dir(rig.roots[1])
    with pytest.raises(ConfigError, match="/path, not /path, /more; .*path.json"):
        rig.start()


def test_a_node_that_names_the_only_path_otherwise_joins_the_writer() -> None:
    rig = PathRig()
    assert RigNode(rig).store([1, 2]) == [Committed.OK] * 2
    node = RigNode(rig, paths=["/mounted/elsewhere"])
    assert node.welcome is not None and node.held([1, 2]) == [1, 2]
    assert RigNode(rig, paths=["/mounted/elsewhere", "/more"]).refused


def test_one_of_several_paths_under_another_name_is_refused() -> None:
    rig = PathRig(8, roots=(ROOT, ROOT.with_name("more")))
    RigNode(rig).store([1, 2])
    (refused,) = RigNode(rig, paths=["/path", "/mounted/elsewhere"]).refused
    assert "/path, /more, not /path, /mounted/elsewhere" in refused.text
    rig.close()
    rig.fs.rename(ROOT.with_name("more"), Path("/moved"))
    rig.roots = (ROOT, Path("/moved"))
    with pytest.raises(ConfigError, match="path.json in the first one"):
        rig.start()
    record = rig.fs.read(ROOT / PATH_FOLDER / PATH_FILE, 1 << 20)
    rig.fs.replace(ROOT / PATH_FOLDER / PATH_FILE, record.replace(b'"/more"', b'"/moved"'))
    rig.start()
    assert RigNode(rig).held([1, 2]) == [1, 2]


def test_unusable_options_name_what_can_be_used() -> None:
    rig = PathRig()
    rig.close()
    with pytest.raises(ConfigError, match="policy 'best' is unknown"):
        rig.start(msgspec.structs.replace(rig.options, policy="best"))
    with pytest.raises(ConfigError, match="durability 'eternal' is unknown"):
        rig.start(msgspec.structs.replace(rig.options, durability="eternal"))


def test_a_damaged_record_of_the_path_names_the_file() -> None:
    rig = PathRig()
    rig.close()
    rig.fs.damage(ROOT / PATH_FOLDER / PATH_FILE, 0, b"[")
    with pytest.raises(CorruptionError, match="path.json is damaged"):
        rig.start()


@pytest.mark.parametrize(
    "damage", [{"paths": ["/old\ud800name"]}, {"options": {"policy": "\ud800"}}]
)
def test_a_record_with_text_that_no_message_can_carry_is_damaged(damage: dict[str, Any]) -> None:
    """A refusal names the paths, and a welcome has the options."""
    rig = PathRig()
    rig.close()
    document = json.loads(rig.fs.read(ROOT / PATH_FOLDER / PATH_FILE, 1 << 20))
    options = {**document["options"], **damage.get("options", {})}
    data = json.dumps({**document, **damage, "options": options}).encode()
    rig.fs.replace(ROOT / PATH_FOLDER / PATH_FILE, data)
    with pytest.raises(CorruptionError, match="path.json is damaged"):
        rig.start()


@pytest.mark.parametrize(
    "write",
    [
        lambda data: codecs.BOM_UTF8 + data,
        lambda data: data.decode().encode("utf-16"),
        lambda data: data.replace(b'"removed_day": "', b'"removed_day": " \\n'),
    ],
)
def test_a_record_that_an_editor_has_written_is_read(write: Callable[[bytes], bytes]) -> None:
    rig = PathRig()
    record = load_record(rig.fs, ROOT)
    assert record is not None
    record.removed_day = b"day"
    save_record(rig.fs, ROOT, record)
    path = ROOT / PATH_FOLDER / PATH_FILE
    former = rig.fs.read(path, 1 << 20)
    assert write(former) != former
    rig.fs.replace(path, write(former))
    assert load_record(rig.fs, ROOT) == record


@pytest.mark.parametrize("value", [True, 0.5, [1], {"a": 1}])
def test_an_option_of_a_later_version_is_ignored(value: Any) -> None:
    rig = PathRig()
    path = ROOT / PATH_FOLDER / PATH_FILE
    document = json.loads(rig.fs.read(path, 1 << 20))
    document["options"]["later"] = value
    rig.fs.replace(path, json.dumps(document).encode())
    record = load_record(rig.fs, ROOT)
    assert record is not None and record.options == rig.options


@pytest.mark.parametrize("ends", ["close", "kill"])
def test_recency_survives_the_writer_however_it_ends(ends: str) -> None:
    rig = PathRig(segments=2, slots_per_segment=32)
    node = RigNode(rig)
    node.store(list(range(32)))
    node.store(list(range(32, 64)))
    rig.send(node.client, Touch([key_of(key) for key in range(16)]))
    rig.step()
    getattr(rig, ends)()
    rig.start()
    node = RigNode(rig)
    node.store(list(range(100, 124)))
    assert node.held(list(range(16))) == list(range(16))
    assert node.held(list(range(16, 32))) == []


@pytest.mark.parametrize("ends", ["close", "kill"])
@pytest.mark.parametrize("policies", [("fifo", "lru"), ("lru", "fifo", "lru")])
def test_another_policy_begins_with_the_order_of_the_last_use(
    ends: str, policies: tuple[str, ...]
) -> None:
    rig = PathRig(segments=2, slots_per_segment=32, policy=policies[0])
    node = RigNode(rig)
    for start in (0, 32):
        node.store(list(range(start, start + 32)))
        rig.step(seconds=5.0)
    for policy in policies[1:]:
        if policy == "lru":
            rig.send(node.client, Touch([key_of(key) for key in range(16)]))
        rig.step(seconds=5.0)
        getattr(rig, ends)()
        rig.start(msgspec.structs.replace(rig.options, policy=policy))
        node = RigNode(rig)
    node.store(list(range(100, 124)))
    assert node.held(list(range(16))) == list(range(16))
    assert node.held(list(range(16, 32))) == []


def test_another_policy_takes_the_room_of_the_arrays_of_the_former_one() -> None:
    rig = PathRig(segments=2, slots_per_segment=32, policy="lirs")
    assert RigNode(rig).store([1, 2]) == [Committed.OK] * 2
    state = next(iter(rig.writer.namespaces.values())).home.state_folder
    rig.fs.open(state / f"{CHAINS}.arr", create=True)
    for policy in ("lirs", "arc", "lru"):
        rig.close()
        rig.start(msgspec.structs.replace(rig.options, policy=policy))
        if policy == "arc":
            rig.fs.fail("unlink", errno.EIO)
        assert RigNode(rig).held([1, 2]) == [1, 2]
        arrays = [name for name in rig.fs.list_dir(state) if name.endswith(".arr")]
        assert any(name.startswith(policy) for name in arrays) and f"{CHAINS}.arr" in arrays
    kinds = {name.split("_")[0].removesuffix(".arr") for name in arrays}
    assert kinds == {"lru", "use", CHAINS}


def test_a_segment_that_does_not_fit_is_blamed_on_its_size_if_that_was_chosen() -> None:
    def refusal(segment_bytes: int | None) -> str:
        options = PathOptions(1 << 20, segment_bytes=segment_bytes)
        with pytest.raises(ConfigError, match="at least") as refused:
            plan_namespace(options, 1 << 20, 1)
        return str(refused.value)

    assert "segment_size" in refusal(4 << 20)
    for segment_bytes in (None, 1 << 10, 1 << 20):
        assert "segment_size" not in refusal(segment_bytes), "one block is the least"
