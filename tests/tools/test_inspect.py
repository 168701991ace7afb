"""`kvcascade inspect`: what it says is what is there, on a closed cache and on a live one."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import pytest
from support.cache_rig import UsageRig, call, call_outside, config_of, fill, fill_two, flip, segment
from support.nvme_rig import BLOCK, config_for, content, key

from kvcascade.tiers.cpu.arena import Arena, ArenaRole
from kvcascade.tiers.cpu.header import ArenaGeometry
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tools.commands.cache_access import locations
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.inspect.namespace_report import report

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


def test_a_closed_cache(tmp_path: Path) -> None:
    folder = fill(tmp_path, blocks=20)
    answer = call("inspect", tmp_path, "--json")
    found = answer.one
    assert answer.code == ExitCode.OK
    assert (found["state"], found["owners"], found["blocks"]) == ("closed", [], 20)
    assert found["slots"] == 32 and found["capacity_slots"] == 32
    assert found["payload_bytes"] == found["written_bytes"] == 20 * BLOCK
    assert found["written_bytes_last_day"] == 20 * BLOCK
    assert found["segments"] == 4 and not found["segments_damaged"]
    assert found["fields"] == {"model": "some/model", "dtype": "float16"}
    assert found["policies"][0]["name"] == "lru" and found["policies"][0]["held"] == 20
    assert found["disk_bytes"] >= 20 * BLOCK
    assert call("inspect", folder, "--json").one["name"] == found["name"]
    tables = call("inspect", tmp_path)
    assert "20 of 32 slots" in tables.out and found["fingerprint"] in tables.out


def test_occupancy_is_of_the_capacity(tmp_path: Path) -> None:
    """Files are made as they are needed: of those there are, nearly all is in use."""
    folder = fill(tmp_path, blocks=8)
    for number in (1, 2, 3):
        segment(folder, number).unlink()
    found = report(locations(tmp_path)[0])
    assert (found.slots, found.capacity_slots, found.used_share) == (8, 32, 0.25)
    shown = " ".join(call("inspect", tmp_path).out.split())
    assert "8 of 32 slots" in shown and "25%" in shown and "1 files with 8 slots" in shown
    for path in folder.glob("state/**/*"):
        if path.is_file():
            path.unlink()
    found = report(locations(tmp_path)[0])
    assert found.capacity_slots is None and found.used_share == 1.0


def test_what_cannot_be_read_is_still_as_large_as_it_is(tmp_path: Path) -> None:
    folder = fill(tmp_path, blocks=20)
    (folder / "index" / "data.mdb").write_bytes(b"no database" * 1000)
    for is_described in (True, False):
        if not is_described:
            (folder / "namespace.json").write_text("{")
        found = call("inspect", tmp_path, "--json").one
        sizes = {path: path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()}
        assert found["disk_bytes"] == sum(sizes.values()) >= 20 * BLOCK
        assert found["index_bytes"] == sum(
            size for path, size in sizes.items() if path.parent.name == "index"
        )
        assert found["segments"] == 4 and found["state"] == "unreadable"
        assert found["blocks"] is found["slots"] is found["written_bytes"] is None
        shown = " ".join(call("inspect", tmp_path).out.split())
        assert "on disk" in shown and "4 files" in shown and "0 of 0" not in shown


def test_a_young_cache_has_written_bytes_and_no_rate(tmp_path: Path) -> None:
    fill(tmp_path, blocks=20)
    (found,) = (report(each, now_s=time.time() + 60) for each in locations(tmp_path))
    assert found.written_bytes == 20 * BLOCK
    assert found.written_bytes_per_day is found.drive_writes_per_day is None
    shown = call("inspect", tmp_path).out
    assert "in its first" in shown and "drive writes" not in shown
    (later,) = (report(each, now_s=time.time() + 3700) for each in locations(tmp_path))
    assert later.written_bytes_per_day is not None and later.drive_writes_per_day is not None


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
    assert call("inspect", tmp_path, "-n", one.name[-6:], "--json").one["name"] == one.name


def test_a_label_may_have_what_no_name_can(tmp_path: Path) -> None:
    """A whole label counts more than the same letters within another."""
    for label in ("org/model", "org/model-2", "else/model"):
        made = fill(tmp_path / "made", namespace=NamespaceKey(label, {"label": label}))
        made.rename(tmp_path / made.name)
    for name in ("org/model", "else/", "org/model-2"):
        found = call("inspect", tmp_path, "-n", name, "--json").one
        assert found["label"].startswith(name) and len(found["label"]) - len(name) in (0, 5)
    assert call("inspect", tmp_path, "-n", "org/").code == ExitCode.USAGE


def test_endurance(tmp_path: Path) -> None:
    fill(tmp_path, blocks=20)
    found = report(locations(tmp_path)[0], now_s=time.time() + 10 * 86_400)
    assert found.written_bytes_per_day is not None
    assert found.written_bytes_per_day == pytest.approx(2 * BLOCK, rel=0.01)
    assert found.drive_writes_per_day == pytest.approx(
        found.written_bytes_per_day / shutil.disk_usage(tmp_path).total, rel=0.01
    )


def test_ages_and_reuse(tmp_path: Path) -> None:
    now = [1_000_000.0]
    rig = UsageRig(config_of(tmp_path), lambda: now[0])
    rig.store([key(i) for i in range(6)])
    now[0] += 7200
    rig.policy.touch([key(0), key(1)])
    rig.policy.touch([key(0)])
    rig.close()
    found = report(locations(tmp_path)[0], now_s=now[0] + 30)
    assert {name: count for name, count in found.age.items() if count} == {"< 6 h": 6}
    assert {name: count for name, count in found.idle.items() if count} == {
        "< 1 min": 2,
        "< 6 h": 4,
    }
    assert {name: n for name, n in found.reuse.items() if n} == {"never": 4, "once": 1, "2": 1}


def test_uses_survive_a_crash_and_a_new_block_begins_anew(tmp_path: Path) -> None:
    rig = UsageRig(config_of(tmp_path))
    rig.store([key(0)])
    rig.policy.touch([key(0)])
    rig.close(clean=False)
    assert call("inspect", tmp_path, "--json").one["reuse"]["once"] == 1
    rig = UsageRig(config_of(tmp_path))
    rig.drop(key(0))
    rig.store([key(1 + i) for i in range(32)])
    rig.close()
    assert call("inspect", tmp_path, "--json").one["reuse"]["never"] == 32


def test_a_live_cache_is_not_disturbed(tmp_path: Path) -> None:
    rig = UsageRig(config_of(tmp_path))
    rig.store([key(i) for i in range(8)])
    answer = call_outside("inspect", tmp_path, "--json")
    assert answer.code == ExitCode.OK, answer.err
    assert answer.one["state"] == "live" and len(answer.one["owners"]) == 1
    assert answer.one["blocks"] == 8
    rig.store([key(100 + i) for i in range(24)])
    assert call_outside("inspect", tmp_path, "--json").one["blocks"] == 32
    assert all(rig.check(key(i)) for i in range(8))
    rig.check_sums()
    rig.close()
    assert call("inspect", tmp_path, "--json").one["state"] == "closed"


def test_what_a_kept_arena_holds_and_the_disk_does_not(tmp_path: Path) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    memory.mkdir()
    fill(disk, blocks=4)
    asked = ("inspect", disk, "--arena-dir", memory)
    assert call(*asked, "--json").one["dirty_share"] is None
    geometry = ArenaGeometry(slots=8, rank_bytes=4096, world_size=1, kept=True)
    roles = (ArenaRole.worker(0), ArenaRole.scheduler())
    arenas = [Arena.open(geometry, "engine", role, arena_dir=str(memory)) for role in roles]
    table = arenas[1].slot_table()
    table.begin(config_of(disk).key.digest)
    table.mark([key(2), key(3), key(70)], [0, 1, 5])
    assert call(*asked, "--json").one["dirty_share"] == 1 / 8, "one of eight is not on the disk"
    for arena in arenas:
        arena.close()
    assert "12% of the CPU tier's slots" in call(*asked).out, "after its engine has ended, too"


def test_a_metrics_address_is_for_one_live_namespace(tmp_path: Path) -> None:
    fill(tmp_path)
    answer = call("inspect", tmp_path, "--url", "127.0.0.1:9")
    assert answer.code == ExitCode.USAGE and "0 namespaces are live" in answer.err


def test_a_crash_is_seen(tmp_path: Path) -> None:
    rig = UsageRig(config_of(tmp_path))
    rig.store([key(0)])
    rig.close(clean=False)
    assert call("inspect", tmp_path, "--json").one["state"] == "closed (not clean)"


def test_what_cannot_be_opened_is_a_problem_and_names_the_remedy(tmp_path: Path) -> None:
    folder = fill(tmp_path)
    (folder / "index" / "data.mdb").write_bytes(b"no database" * 1000)
    answer = call("inspect", tmp_path, "--json")
    assert answer.code == ExitCode.PROBLEMS
    assert answer.one["state"] == "unreadable"
    assert "verify --rebuild-index" in answer.one["problem"]
    assert answer.one["fields"]["model"] == "some/model"
    (folder / "namespace.json").write_text("{")
    assert "namespace.json is damaged" in call("inspect", tmp_path, "--json").one["problem"]


def test_damaged_segments_are_named(tmp_path: Path) -> None:
    folder = fill(tmp_path)
    flip(segment(folder, 1), 100)
    answer = call("inspect", tmp_path, "--json")
    assert answer.code == ExitCode.PROBLEMS and answer.one["segments_damaged"] == [1]


def test_several_paths(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()
    config = config_for(roots, slots=64, per_segment=8)
    rig = UsageRig(config)
    rig.store([key(i) for i in range(30)])
    rig.close()
    whole = call("inspect", roots[0], "--also", roots[1], "--json").one
    assert whole["parts"] == 2 and whole["parts_missing"] == [] and whole["slots"] == 64
    half = call("inspect", roots[0], "--json").one
    assert half["parts_missing"] == [1] and half["slots"] == 32
    other = call("inspect", roots[1], "--json").one
    assert "first path" in other["problem"]


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


def test_one_block(tmp_path: Path) -> None:
    fill(tmp_path, namespace=NamespaceKey("model", FIELDS, ABOUT))
    found = call("inspect", tmp_path, "--block", key(3).hex(), "--json").document
    assert (found["slot"], found["segment"], found["verdict"]) == (3, 0, "ok")
    assert (found["record"], found["session"], found["tokens"]) == ("ok", 1, 32)
    assert found["prefix_position"] is None and found["times_used"] == 0
    import torch

    for i, layer in enumerate(found["layers"]):
        part = content(key(3))[i * 2048 : (i + 1) * 2048]
        values = torch.frombuffer(bytearray(part), dtype=torch.float16).float()
        real = values[~values.isnan()]
        assert layer["shape"] == [2, 2, 16, 2, 8] and layer["dtype"] == "float16"
        assert layer["nan"] == int(values.isnan().sum())
        assert layer["min"] == float(real.min()) and layer["max"] == float(real.max())
    assert "float16" in call("inspect", tmp_path, "--block", key(3).hex()).out


def test_one_block_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, namespace=NamespaceKey("model", FIELDS, ABOUT))
    monkeypatch.setitem(sys.modules, "torch", None)
    found = call("inspect", tmp_path, "--block", key(3).hex(), "--json").document
    assert found["verdict"] == "ok" and not found["layers"] and "torch" in found["layout"]


def test_one_block_that_is_damaged_or_not_there(tmp_path: Path) -> None:
    folder = fill(tmp_path)
    flip(segment(folder), 4096 + 3 * BLOCK)
    answer = call("inspect", tmp_path, "--block", key(3).hex(), "--json")
    assert answer.code == ExitCode.PROBLEMS and answer.document["verdict"] == "corrupt"
    assert call("inspect", tmp_path, "--block", "ff" * 36).code == ExitCode.USAGE
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
    ],
)  # fmt: skip
def test_a_layout_that_makes_no_sense_is_left_out(tmp_path: Path, about: object) -> None:
    folder = fill(tmp_path, namespace=NamespaceKey("model", FIELDS, ABOUT))
    document = json.loads((folder / "namespace.json").read_text())
    (folder / "namespace.json").write_text(json.dumps({**document, "about": about}))
    found = call("inspect", tmp_path, "--block", key(3).hex(), "--json").document
    assert found["verdict"] == "ok" and found["layers"] == []
