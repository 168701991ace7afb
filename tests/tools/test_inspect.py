"""`kvcascade inspect`: what it says is what is there, on a closed cache, beside engines, and where
the writer does not answer."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cache_rig import call, call_bound, flip
from support.keys import key
from support.metrics_server import metrics_server
from support.path_cache import (
    BLOCK,
    HEADER,
    PER_SEGMENT,
    engine_on,
    fill_path,
    fill_two,
    folder_in,
    namespaces_in,
    note_use,
    of_version_2,
    running_engine,
    segment,
    slots_of,
)
from support.path_engine import PathEngine
from support.small_disk import on_small_disk

import kvcascade
from kvcascade.config.machine import Disk, Machine
from kvcascade.tiers.cpu.arena import Arena, ArenaRole
from kvcascade.tiers.cpu.header import ArenaGeometry
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.inspect.namespace_report import Inspector, NamespaceReport
from kvcascade.tools.commands.path_blocks import open_path
from kvcascade.tools.commands.path_folders import folders_in

FIELDS = {"model": "some/model", "group0": "16 tokens: l0,l1", "blocks_per_chunk": "2"}
ABOUT = {
    "world_size": 1,
    "rank_bytes": BLOCK,
    "layers": [
        {"layer": f"l{i}", "group": 0, "offset": i * 2048, "page_bytes": 1024, "pages": 2,
         "dtype": "float16", "shape": [2, 16, 2, 8]}
        for i in range(2)
    ],
}  # fmt: skip
FS = RealFileSystem()


def report_of(root: Path, now_s: float) -> NamespaceReport:
    """The report of the only namespace, at some time."""
    (folder,) = folders_in(FS, root)
    with open_path(root) as opened:
        return Inspector(FS, opened, now_s=now_s).report(folder)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[PathEngine]:
    """An engine with a process of its own, and 20 blocks."""
    with running_engine(tmp_path / "kv", 20) as engine:
        yield engine


def test_a_closed_cache(tmp_path: Path) -> None:
    folder = fill_path(tmp_path, blocks=20)
    answer = call("inspect", tmp_path, "--json")
    found = answer.one
    assert answer.code == ExitCode.OK
    assert (found["state"], found["engines"], found["blocks"]) == ("closed", [], 20)
    files = len(list(folder.glob("segments/*")))
    assert found["segments"] == files and found["slots"] == files * PER_SEGMENT
    assert found["capacity_slots"] > found["slots"] and not found["segments_damaged"]
    assert found["payload_bytes"] == found["written_bytes"] == 20 * BLOCK
    assert found["written_bytes_last_day"] == 20 * BLOCK
    assert found["fields"] == {"model": "some/model", "dtype": "float16"}
    assert found["policies"][0]["name"] == "lru" and found["policies"][0]["held"] == 20
    assert found["disk_bytes"] > found["index_bytes"] > 0 and found["sessions"] == 1
    assert found["disk_bytes"] >= 20 * BLOCK and found["parts_missing"] == []
    path = answer.document["path"]
    assert path["writer"] is None and path["capacity_bytes"] == 64 << 20
    assert path["paths"] == [str(tmp_path)] and path["used_bytes"] > 0 and path["policy"] == "lru"
    assert call("inspect", folder, "--json").one["name"] == found["name"]
    shown = " ".join(call("inspect", tmp_path).out.split())
    assert f"20 of {found['capacity_slots']:,} slots" in shown and found["fingerprint"] in shown
    assert f"{files} files with {files * PER_SEGMENT} slots" in shown


def test_beside_an_engine(tmp_path: Path, engine: PathEngine) -> None:
    answer = call("inspect", tmp_path / "kv", "--json")
    assert answer.code == ExitCode.OK
    assert (answer.one["state"], answer.one["blocks"]) == ("live", 20)
    assert answer.one["engines"] == ["the engine"] and answer.one["granted_slots"] == 0
    assert answer.one["problem"] is None
    assert f"process {engine.keeper.pid} " in answer.document["path"]["writer"]
    engine.store(range(100, 116))
    assert call("inspect", tmp_path / "kv", "--json").one["blocks"] == 36
    assert engine.holds(range(20)) == list(range(20))
    assert "open in the engine" in " ".join(call("inspect", tmp_path / "kv").out.split())


def test_a_namespace_that_only_the_writer_of_engines_has_open_is_closed(
    tmp_path: Path, engine: PathEngine
) -> None:
    other = fill_path(tmp_path / "kv", 3, NamespaceKey("other", {"n": 1}))
    for _ in range(2):
        found = call("inspect", tmp_path / "kv", "-n", "other", "--json").one
        assert (found["name"], found["state"], found["blocks"]) == (other.name, "closed", 3)
        assert found["written_bytes"] == 3 * BLOCK


def test_a_stopped_writer_is_named_and_what_the_files_say_is_shown(
    tmp_path: Path, engine: PathEngine
) -> None:
    engine.signal(signal.SIGSTOP)
    answer = call("inspect", tmp_path / "kv", "--json")
    assert answer.code == ExitCode.PROBLEMS
    found = answer.one
    assert answer.document["path"] is None
    assert (found["blocks"], found["state"]) == (20, "not known")
    assert "does not answer" in found["problem"] and "which is stopped" in found["problem"]
    assert str(engine.keeper.pid) in found["problem"]
    assert found["written_bytes"] is None and sum(found["age"].values()) == 20
    assert found["capacity_slots"] > 20 and found["policies"][0]["held"] == 20
    shown = call("inspect", tmp_path / "kv")
    assert "which is stopped" in " ".join(shown.out.split()) and "Traceback" not in shown.err
    asked = call("inspect", tmp_path / "kv", "--block", key(3).hex())
    assert asked.code == ExitCode.IN_USE and "which is stopped" in asked.err
    assert asked.err.count("\n") == 1
    engine.signal(signal.SIGCONT)
    assert call("inspect", tmp_path / "kv", "--json").one["state"] == "live"


def test_a_young_cache_has_written_bytes_and_no_rate(tmp_path: Path) -> None:
    fill_path(tmp_path, blocks=20)
    found = report_of(tmp_path, time.time() + 60)
    assert found.written_bytes == 20 * BLOCK
    assert found.written_bytes_per_day is found.drive_writes_per_day is None
    shown = call("inspect", tmp_path).out
    assert "in its first" in shown and "drive writes" not in shown
    later = report_of(tmp_path, time.time() + 3700)
    assert later.written_bytes_per_day is not None and later.drive_writes_per_day is not None


def test_endurance(tmp_path: Path) -> None:
    fill_path(tmp_path, blocks=20)
    found = report_of(tmp_path, time.time() + 10 * 86_400)
    assert found.written_bytes_per_day == pytest.approx(2 * BLOCK, rel=0.01)
    assert found.written_bytes_per_day is not None
    assert found.drive_writes_per_day == pytest.approx(
        found.written_bytes_per_day / shutil.disk_usage(tmp_path).total, rel=0.01
    )


@pytest.mark.parametrize(("devices", "disks"), [((1, 2, 3, 4), 4), ((1, 1, 2, 2), 2)])
def test_writes_of_all_paths_wear_all_their_disks(
    tmp_path: Path, devices: tuple[int, ...], disks: int
) -> None:
    roots = [tmp_path / str(number) for number in range(len(devices))]

    class Disks(Machine):
        def disk(self, folder: Path) -> Disk:
            return Disk(device=devices[roots.index(folder.parent)], total=1 << 30, free=0)

    fill_path(roots, blocks=20)
    (folder,) = folders_in(FS, roots[0])
    with open_path(roots[0]) as opened:
        inspector = Inspector(FS, opened, now_s=time.time() + 86_400, machine=Disks())
        found = inspector.report(folder)
        part = replace(folder, folders=folder.folders[:1])
        wear_of_a_part = inspector.report(part).drive_writes_per_day
    assert found.drive_writes_per_day == pytest.approx(20 * BLOCK / (disks << 30), rel=0.01)
    assert wear_of_a_part is None


@pytest.mark.parametrize("command", ["inspect", "verify", "gc --older-than 1d", "export OUT"])
def test_a_path_that_is_not_there_is_no_matter_of_the_device(tmp_path: Path, command: str) -> None:
    name, *options = command.replace("OUT", str(tmp_path / "out")).split()
    (tmp_path / "file").touch()
    for path in ("nowhere", "file"):
        answer = call(name, tmp_path / path, *options)
        assert answer.code == ExitCode.CANNOT_OPEN and str(tmp_path / path) in answer.err
        assert "check the path" in answer.err and "device" not in answer.err


def test_a_namespace_is_named_by_any_part_that_is_unique(tmp_path: Path) -> None:
    one, two = fill_two(tmp_path, {"vllm": "0.31"}, {"vllm": "0.32"})
    fingerprint = NamespaceKey("one", {"vllm": "0.31"}).fingerprint
    parts = [fingerprint, fingerprint[:5], fingerprint[20:28], one.name[2:8], "one", str(one)]
    for part in parts:
        assert call("inspect", tmp_path, "-n", part, "--json").one["name"] == one.name, part
    several = call("inspect", tmp_path, "-n", "-")
    assert several.code == ExitCode.USAGE and one.name in several.err and two.name in several.err
    (one / "namespace.json").unlink()
    found = call("inspect", tmp_path, "-n", one.name[-6:], "--json").one
    assert (found["name"], found["state"]) == (one.name, "unreadable")


def test_a_label_may_have_what_no_name_can(tmp_path: Path) -> None:
    """A whole label counts more than the same letters within another."""
    for label in ("org/model", "org/model-2", "else/model"):
        fill_path(tmp_path, 1, NamespaceKey(label, {"label": label}))
    for name in ("org/model", "else/", "org/model-2"):
        found = call("inspect", tmp_path, "-n", name, "--json").one
        assert found["label"].startswith(name) and len(found["label"]) - len(name) in (0, 5)
    assert call("inspect", tmp_path, "-n", "org/").code == ExitCode.USAGE


def test_ages_and_reuse(tmp_path: Path) -> None:
    folder, now_s = fill_path(tmp_path, blocks=6), time.time()
    note_use(folder, range(6), at_s=now_s - 7200, is_write=True)
    note_use(folder, [1], at_s=now_s, times=1)
    note_use(folder, [0], at_s=now_s, times=2)
    found = report_of(tmp_path, now_s + 30)
    assert {name: count for name, count in found.age.items() if count} == {"< 6 h": 6}
    assert {name: count for name, count in found.idle.items() if count} == {
        "< 1 min": 2,
        "< 6 h": 4,
    }
    assert {name: n for name, n in found.reuse.items() if n} == {"never": 4, "once": 1, "2": 1}


def test_groups_of_a_hybrid_model(tmp_path: Path) -> None:
    fields = {"group0": "16 tokens: l0", "group1": "32 tokens: l1", "blocks_per_chunk": "1"}
    fill_path(tmp_path, 5, NamespaceKey("hybrid", fields))
    fill_path(tmp_path / "one", 5, NamespaceKey("plain", {"group0": "16 tokens: l0"}))
    assert call("inspect", tmp_path, "--json").one["groups"] == [
        {"group": 0, "blocks": 5, "tokens": 80}
    ]
    (plain,) = call("inspect", tmp_path / "one", "--json").one["groups"]
    assert plain == {"group": 0, "blocks": 5, "tokens": 80}


def test_what_a_kept_arena_holds_and_the_disk_does_not(tmp_path: Path) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    memory.mkdir()
    folder = fill_path(disk, blocks=4)
    asked = ("inspect", disk, "--arena-dir", memory)
    assert call(*asked, "--json").one["dirty_share"] is None
    geometry = ArenaGeometry(slots=8, rank_bytes=4096, world_size=1, kept=True)
    roles = (ArenaRole.worker(0), ArenaRole.scheduler())
    arenas = [Arena.open(geometry, "engine", role, arena_dir=str(memory)) for role in roles]
    table = arenas[1].slot_table()
    fields = json.loads((folder / "namespace.json").read_text())["fields"]
    table.begin(NamespaceKey("", fields).digest)
    table.mark([key(2), key(3), key(70)], [0, 1, 5])
    assert call(*asked, "--json").one["dirty_share"] == 1 / 8, "one of eight is not on the disk"
    for arena in arenas:
        arena.close()
    assert "12% of the CPU tier's slots" in call(*asked).out, "after its engine has ended, too"


@pytest.fixture
def address() -> Iterator[str]:
    """Metrics of an engine."""
    gauge = "vllm:kvcascade_tier_dirty_ratio"
    with metrics_server([f'# TYPE {gauge} gauge\n{gauge}{{tier="cpu"}} 0.25\n']) as found:
        yield found


def test_a_kept_arena_is_right_where_the_metrics_of_an_idle_engine_are_not(
    tmp_path: Path, address: str
) -> None:
    """They are those of its last step; its blocks were written since."""
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    memory.mkdir()
    asked = ("inspect", disk, "--arena-dir", memory, "--url", address, "--json")
    geometry = ArenaGeometry(slots=8, rank_bytes=4096, world_size=1, kept=True)
    with running_engine(disk):
        assert call(*asked).one["dirty_share"] == 0.25
        fields = json.loads((folder_in(disk) / "namespace.json").read_text())["fields"]
        roles = (ArenaRole.worker(0), ArenaRole.scheduler())
        arenas = [Arena.open(geometry, "engine", role, arena_dir=str(memory)) for role in roles]
        arenas[1].slot_table().begin(NamespaceKey("", fields).digest)
        assert call(*asked).one["dirty_share"] == 0, "all its blocks are on the disk"
        for arena in arenas:
            arena.close()


def test_a_metrics_address_is_for_one_live_namespace(tmp_path: Path) -> None:
    fill_path(tmp_path)
    answer = call("inspect", tmp_path, "--url", "127.0.0.1:9")
    assert answer.code == ExitCode.USAGE and "0 namespaces are live" in answer.err


def test_a_crash_is_seen_once(tmp_path: Path) -> None:
    """The command is the writer meanwhile, and closes the namespace cleanly."""
    engine = engine_on(tmp_path, is_thread=False)
    engine.store([0])
    engine.kill()
    engine.close()
    found = call("inspect", tmp_path, "--json").one
    assert (found["state"], found["blocks"]) == ("closed (not clean)", 1)
    assert call("inspect", tmp_path, "--json").one["state"] == "closed"


# ---- damage ----------------------------------------------------------------------------------


def test_an_index_that_cannot_be_opened_is_a_problem_and_names_the_remedy(tmp_path: Path) -> None:
    folder = fill_path(tmp_path)
    (folder / "blocks" / "data.mdb").write_bytes(b"no database" * 1000)
    answer = call("inspect", tmp_path, "--json")
    assert answer.code == ExitCode.PROBLEMS
    assert answer.one["state"] == "unreadable" and "remove" in answer.one["problem"]
    assert answer.one["fields"]["model"] == "some/model" and answer.one["blocks"] == 20
    (folder / "namespace.json").write_text("{")
    answer = call("inspect", tmp_path, "--json")
    assert "namespace.json is damaged" in answer.one["problem"]
    assert answer.one["disk_bytes"] > 0 and answer.one["segments"] > 0
    shown = " ".join(call("inspect", tmp_path).out.split())
    assert "on disk" in shown and "files" in shown and "0 of 0" not in shown


def on_a_read_only_disk(folder: Path) -> None:
    """On a file system of its own: see `on_small_disk`.

    Another name of it is mounted read-only. `mount -o remount,abort` of ext4 does the same to every
    file that is opened later, and leaves what an engine has open.
    """
    root, shut = folder / "kv", folder / "shut"
    shut.mkdir()
    with running_engine(root, 20):
        other = fill_path(root, 3, NamespaceKey("other", {"n": 1}))
        subprocess.run(["mount", "--bind", root, shut], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", shut], check=True)
        answer = call("inspect", shut, "--json")
        assert answer.code == ExitCode.OK and answer.document["path"]["writer"]
        found = {each["name"]: each for each in answer.document["namespaces"]}
        assert found.pop(other.name)["state"] == "closed"
        (live,) = found.values()
        assert (live["state"], live["blocks"], live["problem"]) == ("live", 20, None)
        assert live["engines"] == ["the engine"] and sum(live["idle"].values()) == 20
        assert call("inspect", shut, "-n", "model", "--block", key(3).hex()).code == ExitCode.OK
        assert call("verify", shut).code == ExitCode.OK
        top = call("top", shut, "--once", "--json")
        assert top.code == ExitCode.OK and len(top.document["tiers"]) == 2
        assert call("export", shut, folder / "out", "-n", "model").code == ExitCode.OK
    answer = call("inspect", shut, "--json")
    assert answer.code == ExitCode.PROBLEMS and answer.document["path"] is None
    for each in answer.document["namespaces"]:
        assert (each["state"], each["blocks"] in (3, 20)) == ("not known", True)
        assert "Read-only file system" in each["problem"] and sum(each["age"].values())
    top = call("top", shut, "--once", "--json")
    assert top.code == ExitCode.PROBLEMS and len(top.document["tiers"]) == 2
    for words in (("verify", shut), ("export", shut, folder / "more", "-n", "model")):
        answer = call(*words)
        assert answer.code == ExitCode.CANNOT_OPEN and "Read-only file system" in answer.err
    presence = root / other.name / "presence"
    presence.write_bytes(presence.read_bytes()[:5000])
    one = call("inspect", shut, "-n", "other", "--json").one
    assert (one["state"], one["blocks"]) == ("not known", None), "the next writer mends it"


def test_a_cache_on_a_read_only_disk_is_shown_and_not_called_unreadable(tmp_path: Path) -> None:
    """`inspect` called it unreadable, and a page of the documentation then removes it."""
    on_small_disk(on_a_read_only_disk, tmp_path, 256 << 20)


def test_a_presence_file_that_is_cut_is_made_anew(tmp_path: Path) -> None:
    folder = fill_path(tmp_path)
    presence = folder / "presence"
    presence.write_bytes(presence.read_bytes()[:5000])
    answer = call("inspect", tmp_path, "--json")
    assert (answer.code, answer.one["blocks"]) == (ExitCode.OK, 20)


def test_a_presence_file_that_is_cut_beside_a_stopped_writer(
    tmp_path: Path, engine: PathEngine
) -> None:
    engine.signal(signal.SIGSTOP)
    presence = folder_in(tmp_path / "kv") / "presence"
    whole = presence.read_bytes()
    copy = presence.with_name("copy")
    copy.write_bytes(whole[:5000])
    kept = presence.rename(presence.with_name("kept"))
    copy.rename(presence)
    answer = call("inspect", tmp_path / "kv", "--json")
    assert answer.code == ExitCode.PROBLEMS and answer.one["blocks"] is None
    assert "which is stopped" in answer.one["problem"] and answer.one["state"] == "unreadable"
    kept.rename(presence)


def test_a_damaged_record_of_the_path(tmp_path: Path) -> None:
    fill_path(tmp_path)
    (tmp_path / ".kvcascade" / "path.json").write_text("{")
    answer = call("inspect", tmp_path, "--json")
    assert answer.code == ExitCode.PROBLEMS and answer.one["blocks"] == 20
    assert "path.json is damaged" in answer.one["problem"]
    for words in (("gc", tmp_path, "--hash", "00"), ("inspect", tmp_path, "--block", "00")):
        answer = call(*words)
        assert answer.code == ExitCode.CANNOT_OPEN and "path.json is damaged" in answer.err
        assert answer.err.count("\n") == 1
    (tmp_path / ".kvcascade" / "path.json").unlink()
    answer = call("inspect", tmp_path, "--json")
    assert answer.one["blocks"] == 20 and "records no options" in answer.one["problem"]


@pytest.mark.parametrize("mode", [0, 0o400])
def test_a_namespace_that_this_user_may_not_enter_is_unreadable(tmp_path: Path, mode: int) -> None:
    one, two = fill_two(tmp_path, {"n": 1}, {"n": 2})
    two.chmod(mode)
    answer = call_bound("inspect", tmp_path, "--json")
    first, second = answer.document["namespaces"]
    assert answer.code == ExitCode.PROBLEMS and first["name"] == one.name
    assert (second["name"], second["state"]) == (two.name, "unreadable")
    assert second["disk_bytes"] is second["segments"] is None, "nobody can tell"
    assert "run as the user of the engines" in second["problem"]
    for words in (["verify", tmp_path], ["top", tmp_path, "--once"], ["gc", tmp_path, "--hash=00"]):
        answer = call_bound(*words, "--json")
        listed = answer.document["tiers" if words[0] == "top" else "namespaces"]
        assert answer.code == ExitCode.PROBLEMS and len(listed) == 2, words
        assert "run as the user of the engines" in json.dumps(listed[1])
    answer = call_bound("gc", tmp_path, "--max-size", "1GiB", "--json")
    assert answer.code == ExitCode.PROBLEMS, "the size of one is not known"
    answer = call_bound("export", tmp_path, tmp_path / "out")
    assert answer.code == ExitCode.USAGE and f"one of {one.name}, {two.name}" in answer.err
    answer = call_bound("export", tmp_path, tmp_path / "out", "-n", "two")
    assert answer.code == ExitCode.CANNOT_OPEN and not (tmp_path / "out").exists()
    answer = call_bound("gc", tmp_path, "-n", two.name, "--remove-namespace")
    assert answer.code == ExitCode.CANNOT_OPEN and "no namespace" not in answer.err


def test_damaged_segments_are_named(tmp_path: Path) -> None:
    folder = fill_path(tmp_path)
    flip(segment(folder, 1), 100)
    answer = call("inspect", tmp_path, "--json")
    assert answer.code == ExitCode.PROBLEMS and answer.one["segments_damaged"] == [1]


def test_several_paths(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    fill_path(roots, 30)
    whole = call("inspect", roots[0], "--also", roots[1], "--json").one
    assert whole["parts"] == 2 and whole["parts_missing"] == [] and whole["blocks"] == 30
    assert len(whole["paths"]) == 2
    assert call("inspect", roots[0], "--json").one == {**whole, "age_s": _any(whole["age_s"]),
        "sessions": whole["sessions"] + 1, "policies": _any(whole["policies"])}  # fmt: skip
    other = call("inspect", roots[1], "--json")
    assert other.code == ExitCode.PROBLEMS and "first path" in other.one["problem"]
    assert other.one["parts_missing"] == [0] and other.one["blocks"] is None
    roots[1].rename(tmp_path / "elsewhere")
    moved = call("inspect", roots[0], "--json").one
    assert "--also" in moved["problem"] and moved["parts_missing"] == [1]
    found = call("inspect", roots[0], "--also", tmp_path / "elsewhere", "--json").one
    assert found["problem"] is None and found["parts_missing"] == []


@pytest.mark.parametrize(
    ("command", "code"), [("inspect", ExitCode.PROBLEMS), ("verify", ExitCode.CANNOT_OPEN)]
)
def test_a_damaged_description_in_a_later_path_is_named(
    tmp_path: Path, command: str, code: ExitCode
) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    folder = fill_path(roots, 30)
    later = roots[1] / folder.name / "namespace.json"
    later.write_text("{")
    answer = call(command, roots[0], "--json")
    assert answer.code == code and f"{later} is damaged" in answer.out


class _Any:
    """Equal to everything."""

    def __init__(self, like: object) -> None:
        self.like = like

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


def _any(like: object) -> _Any:
    return _Any(like)


# ---- namespaces of version 2 -----------------------------------------------------------------


def test_a_namespace_of_version_2_is_one_line(tmp_path: Path) -> None:
    fill_path(tmp_path)
    old = of_version_2(tmp_path)
    answer = call("inspect", tmp_path)
    assert answer.code == ExitCode.OK
    shown = " ".join(answer.out.split())
    assert f"{old.name}: version 2, 1" in shown and f"-n {old.name} --remove-namespace" in shown
    found = {
        each["name"]: each for each in call("inspect", tmp_path, "--json").document["namespaces"]
    }
    assert found[old.name]["state"] == "version 2" and found[old.name]["format_version"] == 2
    assert found[old.name]["disk_bytes"] >= 8192 and found[old.name]["blocks"] is None
    alone = tmp_path / "alone"
    alone.mkdir()
    of_version_2(alone)
    assert call("inspect", alone, "--json").one["state"] == "version 2"
    assert call("inspect", tmp_path, "-n", old.name, "--block", "00").code == ExitCode.CANNOT_OPEN


def test_why(tmp_path: Path) -> None:
    one, two = fill_two(tmp_path, {"dtype": "a", "tp": 1}, {"dtype": "b", "tp": 1, "x": 0})
    answer = call("inspect", tmp_path, "--why", "one", "two", "--json")
    assert answer.code == ExitCode.PROBLEMS
    assert answer.document["differing"] == [
        {"field": "dtype", "a": "a", "b": "b"},
        {"field": "x", "a": None, "b": 0},
    ]
    assert "dtype" in call("inspect", tmp_path, "--why", one, two).out
    same = call("inspect", tmp_path, "--why", one, one)
    assert same.code == ExitCode.OK and "they share blocks" in same.out
    assert call("inspect", tmp_path, "--why", "one", "three").code == ExitCode.USAGE
    assert call("inspect", tmp_path, "-n", "t", "--json").one["label"] == "two"
    assert len(namespaces_in(tmp_path)) == 2


# ---- one block -------------------------------------------------------------------------------


def content(number: int) -> bytes:
    """Bytes of a block of `PathEngine`."""
    pattern = key(number)[:32] + b"kv"
    return (pattern * (BLOCK // len(pattern) + 1))[:BLOCK]


def test_one_block(tmp_path: Path) -> None:
    folder = fill_path(tmp_path, namespace=NamespaceKey("model", FIELDS, ABOUT))
    (slot,) = slots_of(folder, [3])
    found = call("inspect", tmp_path, "--block", key(3).hex(), "--json").document
    assert (found["slot"], found["segment"]) == (slot, slot // PER_SEGMENT)
    assert (found["verdict"], found["tokens"], found["group"]) == ("ok", 32, 0)
    assert found["offset"] == HEADER + slot % PER_SEGMENT * BLOCK
    assert Path(found["path"]).read_bytes()[found["offset"] :][:BLOCK] == content(3)
    assert found["prefix_position"] is None and found["times_used"] == 0
    assert found["written_at"] == pytest.approx(time.time(), abs=60) == found["last_use"]
    import torch

    for i, layer in enumerate(found["layers"]):
        part = content(3)[i * 2048 : (i + 1) * 2048]
        values = torch.frombuffer(bytearray(part), dtype=torch.float16).float()
        real = values[~values.isnan()]
        assert layer["shape"] == [2, 2, 16, 2, 8] and layer["dtype"] == "float16"
        assert layer["nan"] == int(values.isnan().sum())
        assert layer["min"] == float(real.min()) and layer["max"] == float(real.max())
    assert "float16" in call("inspect", tmp_path, "--block", key(3).hex()).out


def test_one_block_beside_an_engine(tmp_path: Path, engine: PathEngine) -> None:
    found = call("inspect", tmp_path / "kv", "--block", key(3).hex(), "--json")
    assert found.code == ExitCode.OK and found.document["verdict"] == "ok"


def test_one_block_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_path(tmp_path, namespace=NamespaceKey("model", FIELDS, ABOUT))
    monkeypatch.setitem(sys.modules, "torch", None)
    found = call("inspect", tmp_path, "--block", key(3).hex(), "--json").document
    assert found["verdict"] == "ok" and not found["layers"] and "torch" in found["layout"]


def test_one_block_that_is_damaged_or_not_there(tmp_path: Path) -> None:
    folder = fill_path(tmp_path)
    (slot,) = slots_of(folder, [3])
    number, index = divmod(slot, PER_SEGMENT)
    flip(segment(folder, number), HEADER + index * BLOCK)
    answer = call("inspect", tmp_path, "--block", key(3).hex(), "--json")
    assert answer.code == ExitCode.PROBLEMS and answer.document["verdict"] == "corrupt"
    assert call("inspect", tmp_path, "--block", "ff" * 36).code == ExitCode.USAGE
    assert call("inspect", tmp_path, "--block", "ff" * 300).code == ExitCode.USAGE
    assert "several blocks" in call("inspect", tmp_path, "--block", "000000").err
    assert "hexadecimal" in call("inspect", tmp_path, "--block", "xyz").err


@pytest.mark.parametrize(
    "about",
    [
        {"world_size": 1, "rank_bytes": 10**9, "layers": [{"layer": "a", "group": 0}]},
        {"world_size": 10**9, "rank_bytes": 1, "layers": "none"},
        {"world_size": 2, "rank_bytes": 0, "layers": [{"layer": "a", "group": 0, "offset": -1,
         "pages": 1, "shape": [2**40], "dtype": "float16"}]},
        {"world_size": 1, "rank_bytes": 0, "layers": [{"layer": "a", "group": 0, "offset": 0,
         "pages": 1, "shape": [4], "dtype": "load"}]},
        "nothing",
    ],
)  # fmt: skip
def test_a_layout_that_makes_no_sense_is_left_out(tmp_path: Path, about: object) -> None:
    folder = fill_path(tmp_path, namespace=NamespaceKey("model", FIELDS, ABOUT))
    document = json.loads((folder / "namespace.json").read_text())
    (folder / "namespace.json").write_text(json.dumps({**document, "about": about}))
    found = call("inspect", tmp_path, "--block", key(3).hex(), "--json").document
    assert found["verdict"] == "ok" and found["layers"] == []
    assert call("inspect", tmp_path, "--json").one["blocks"] == 20


def test_a_whole_hash_wins_over_hashes_that_begin_with_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"block_bytes": BLOCK, "capacity": "64MiB", "min_free": 0}
    with kvcascade.open(tmp_path, namespace="mine", **options) as cache:
        cache.put([b"ab", b"abc", b"abd"], [bytes(BLOCK)] * 3)
    answer = call("inspect", tmp_path, "--block", b"ab".hex(), "--json")
    assert answer.code == ExitCode.OK and answer.document["hash"] == b"ab".hex()
    answer = call("inspect", tmp_path, "--block", b"a".hex())
    assert answer.code == ExitCode.USAGE and "several blocks" in answer.err
