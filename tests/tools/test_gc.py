"""`kvcascade gc`: what was asked for leaves and nothing else; an engine keeps its files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.cache_rig import (
    PER_SEGMENT,
    UsageRig,
    call,
    call_outside,
    config_of,
    fill,
    fill_two,
    right_blocks,
    segment,
)
from support.nvme_rig import config_for, key

from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tools.commands.cache_access import locations
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.gc.collect import KEPT_INDEX, Wish, collect

BLOCKS = 24
NOW_S = 1_000_000.0


@pytest.fixture
def aged(tmp_path: Path) -> Path:
    """A closed cache of blocks as `aged_rig` has them."""
    rig = aged_rig(tmp_path, NOW_S)
    rig.close()
    return rig.tier.namespace.folders[0]


def aged_rig(root: Path, now_s: float) -> UsageRig:
    """24 blocks: 0 to 7 were used just now, 8 to 15 an hour ago, 16 to 23 a day ago."""
    now = [now_s - 86_400]
    rig = UsageRig(config_of(root), lambda: now[0])
    rig.store([key(i) for i in range(BLOCKS)])
    now[0] = now_s - 3600
    rig.policy.touch([key(i) for i in range(16)])
    now[0] = now_s
    rig.policy.touch([key(i) for i in range(8)])
    return rig


def files_of(folder: Path) -> dict[Path, int]:
    """Segment files, and the index that a rebuild left: bytes on disk."""
    found = [*folder.glob("segments/*"), *folder.glob(f"{KEPT_INDEX}/*")]
    return {path: path.stat().st_blocks * 512 for path in found}


def test_by_age(aged: Path) -> None:
    found = locations(aged)
    (would,) = collect(found, Wish(older_than_s=7200), is_dry_run=True, now_s=NOW_S)
    assert would.blocks_removed == 8 and right_blocks(aged.parent) == set(range(BLOCKS))
    (did,) = collect(found, Wish(older_than_s=7200), is_dry_run=False, now_s=NOW_S)
    assert did == would
    assert not segment(aged, 2).exists(), "nothing is left in it"
    assert right_blocks(aged.parent) == set(range(16))


MODES = {
    "age": ["--older-than", "2h"],
    "hash": ["--hash", key(17).hex()],
    "prefix": ["--prefix", key(17).hex()],
    "age and hash": ["--older-than", "2h", "--hash", key(17).hex()],
    "size": ["--max-size", "200kB"],
    "age and size": ["--older-than", "2h", "--max-size", "200kB"],
    "all": ["--remove-namespace"],
}


@pytest.mark.parametrize("state", ["closed", "live", "unreadable"])
@pytest.mark.parametrize("mode", MODES)
def test_a_dry_run_says_what_the_real_run_does(tmp_path: Path, mode: str, state: str) -> None:
    rig = aged_rig(tmp_path, time.time())
    folder, is_live = rig.tier.namespace.folders[0], state == "live"
    if not is_live:
        rig.close()
        (folder / KEPT_INDEX).mkdir()
        (folder / KEPT_INDEX / "data.mdb").write_bytes(bytes(1 << 16))
    if state == "unreadable":
        (folder / "index" / "data.mdb").unlink()
    run = call_outside if is_live else call
    arguments = ["gc", tmp_path, "-n", folder.name, *MODES[mode], "--json"]
    would, before = run(*arguments, "--dry-run"), files_of(folder)
    did, after = run(*arguments), files_of(folder)
    assert would.code == did.code
    said = would.one | {"hottest_idle_s": None}
    assert said == did.one | {"hottest_idle_s": None}
    gone = [path for path in before if path not in after]
    assert said["segments_removed"] == sum(path.parent.name == "segments" for path in gone)
    left = run("inspect", tmp_path, "--json").one["blocks"] if folder.exists() else 0
    if state == "unreadable":
        assert said["blocks_before"] is None
        assert said["was_removed"] == (mode == "all") == (not folder.exists())
    else:
        assert said["blocks_removed"] == BLOCKS - left and said["blocks_before"] == BLOCKS
    if mode != "all":
        assert said["bytes_freed"] == sum(before[path] for path in gone)
    if is_live:
        rig.close()


def test_what_is_removed_as_a_whole_is_told_beforehand(tmp_path: Path) -> None:
    now_s = time.time() - 3600
    rig = aged_rig(tmp_path, now_s)
    rig.close()
    folder = rig.tier.namespace.folders[0]
    arguments = ["gc", tmp_path, "-n", folder.name, "--remove-namespace"]
    would = call(*arguments, "--dry-run", "--json").one
    assert would["blocks_removed"] == would["blocks_before"] == BLOCKS
    assert would["bytes_freed"] == sum(
        path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()
    )
    assert would["hottest_idle_s"] == pytest.approx(time.time() - now_s, abs=60)
    shown = " ".join(call(*arguments, "--dry-run").out.split())
    assert f"{BLOCKS} {BLOCKS}" in shown and "1.0 h" in shown


def test_the_hottest_block_that_leaves_is_told(aged: Path) -> None:
    for wish, idle_s in (
        (Wish(older_than_s=1800), 3600),
        (Wish(hash_start=key(17)), 86_400),
        (Wish(max_bytes=0), 0),
        (Wish(hash_start=b"no such block"), None),
    ):
        (report,) = collect(locations(aged), wish, is_dry_run=True, now_s=NOW_S)
        assert report.hottest_idle_s == idle_s


def test_files_that_were_empty_before_stay(aged: Path) -> None:
    """Room that was made ahead is nobody's to give back unless a size is asked for."""
    segments = {number: segment(aged, number) for number in range(4)}
    assert all(path.exists() for path in segments.values()), "the fourth holds nothing"
    (nothing,) = collect(locations(aged), Wish(older_than_s=10**6), is_dry_run=False, now_s=NOW_S)
    assert nothing.segments_removed == nothing.bytes_freed == 0
    (report,) = collect(locations(aged), Wish(older_than_s=7200), is_dry_run=False, now_s=NOW_S)
    assert report.segments_removed == 1
    assert [path.exists() for path in segments.values()] == [True, True, False, True]
    collect(locations(aged), Wish(max_bytes=0), is_dry_run=False, now_s=NOW_S)
    assert not any(path.exists() for path in segments.values())


def test_blocks_of_unknown_age_stay(aged: Path) -> None:
    for path in (aged / "state" / "0").glob("use_*.arr"):
        path.unlink()
    (report,) = collect(locations(aged), Wish(older_than_s=1), is_dry_run=False, now_s=NOW_S)
    assert report.blocks_removed == 0


def test_by_age_and_hash(aged: Path) -> None:
    wish = Wish(older_than_s=7200, hash_start=key(17)[:4])
    (report,) = collect(locations(aged), wish, is_dry_run=False, now_s=NOW_S)
    assert report.blocks_removed == 1
    assert right_blocks(aged.parent) == set(range(BLOCKS)) - {17}


def test_to_a_size_the_coldest_segments_leave(aged: Path) -> None:
    size = segment(aged).stat().st_blocks * 512
    total = sum(p.stat().st_blocks * 512 for p in aged.rglob("*") if p.is_file())
    wish = Wish(max_bytes=total - size - 1)  # the empty fourth segment is not enough
    (report,) = collect(locations(aged), wish, is_dry_run=False, now_s=NOW_S)
    assert report.segments_removed == 2 and report.blocks_removed == PER_SEGMENT
    assert not segment(aged, 3).exists() and not segment(aged, 2).exists()
    assert right_blocks(aged.parent) == set(range(16))


def test_the_command(tmp_path: Path) -> None:
    folder = fill(tmp_path, BLOCKS)
    answer = call("gc", tmp_path, "--hash", key(3).hex(), "--dry-run", "--json")
    assert answer.code == ExitCode.OK and answer.document["is_dry_run"] is True
    assert answer.one["blocks_removed"] == 1 and answer.one["blocks_before"] == BLOCKS
    assert "Would be removed" in call("gc", tmp_path, "--max-size", "1MiB", "--dry-run").out
    assert call("gc", tmp_path, "--hash", key(3).hex()).code == ExitCode.OK
    assert call("verify", folder).code == ExitCode.OK
    assert right_blocks(tmp_path) == set(range(BLOCKS)) - {3}


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["--older-than", "soon"],
        ["--max-size", "50%"],
        ["--hash", "xyz"],
        ["--prefix", "zz"],
        ["--prefix", "5f3c9"],
        ["--prefix", "deadbeef"],
        ["--remove-namespace"],
        ["--remove-namespace", "-n", "one", "--max-size", "1GiB"],
        ["--remove-namespace", "-n", "cache"],
        ["--remove-namespace", "-n", ""],
    ],
)
def test_wrong_calls(tmp_path: Path, wrong: list[str]) -> None:
    fill(tmp_path)
    assert call("gc", tmp_path, *wrong).code == ExitCode.USAGE


def test_a_whole_namespace(tmp_path: Path) -> None:
    one, two = fill_two(tmp_path, {"n": 1}, {"n": 2})
    call("gc", tmp_path, "-n", one.name, "--remove-namespace", "--dry-run")
    assert one.exists()
    answer = call("gc", tmp_path, "-n", one.name, "--remove-namespace", "--json")
    assert answer.code == ExitCode.OK and answer.one["was_removed"]
    assert not one.exists() and two.exists()


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_part_of_a_name_is_not_enough_to_remove_it(tmp_path: Path, is_readable: bool) -> None:
    one, two = fill_two(tmp_path, {"n": 1}, {"n": 2})
    if not is_readable:
        (one / "namespace.json").unlink()
    digits = NamespaceKey("one", {"n": 1}).fingerprint[:12]
    for part in ("one", digits[:11], one.name[:-1], f"-{digits}"):
        answer = call("gc", tmp_path, "-n", part, "--remove-namespace", "--json")
        assert answer.code == ExitCode.USAGE and one.name in answer.document["message"]
    assert one.exists()
    assert call("gc", tmp_path, "-n", digits, "--remove-namespace").code == ExitCode.OK
    assert not one.exists() and two.exists()


def test_a_namespace_in_two_paths_leaves_as_a_whole(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    rig = UsageRig(config_for(paths))
    rig.store([key(i) for i in range(BLOCKS)])
    rig.close()
    folders, name = rig.tier.namespace.folders, rig.tier.namespace.folders[0].name
    for path in paths:
        answer = call("gc", path, "-n", name, "--remove-namespace", "--json")
        assert (
            answer.code == ExitCode.USAGE and "is spread over 2 paths" in answer.document["message"]
        )
        assert all(folder.exists() for folder in folders)
    both = call("gc", paths[0], "--also", paths[1], "-n", name, "--remove-namespace", "--json")
    assert both.code == ExitCode.OK and both.one["was_removed"]
    assert not any(folder.exists() for folder in folders)


def test_a_prompt_that_nobody_noted_is_said_so(tmp_path: Path) -> None:
    """Who clears out a document must not take one block of it for all."""
    fill(tmp_path, BLOCKS)
    answer = call("gc", tmp_path, "--prefix", key(3).hex(), "--json")
    assert answer.code == ExitCode.PROBLEMS and answer.one["is_incomplete"]
    assert answer.one["blocks_removed"] == 1 and "no engine has recorded" in answer.one["skipped"]
    assert call("gc", tmp_path, "--prefix", key(3).hex()).code == ExitCode.USAGE, "it is gone"


def test_a_prompt_is_looked_for_in_every_namespace(tmp_path: Path) -> None:
    one, two = fill_two(tmp_path, {"n": 1}, {"n": 2})
    call("gc", tmp_path, "-n", "one", "--hash", key(3).hex())
    answer = call("gc", tmp_path, "--prefix", key(3).hex(), "--json")
    removed = {each["name"]: each["blocks_removed"] for each in answer.document["namespaces"]}
    assert removed == {one.name: 0, two.name: 1}


def test_files_of_a_running_engine_are_left_alone(tmp_path: Path) -> None:
    rig = UsageRig(config_of(tmp_path))
    rig.store([key(i) for i in range(BLOCKS)])
    folder = rig.tier.namespace.folders[0]
    before = {path: path.stat().st_size for path in (folder / "segments").iterdir()}
    answer = call_outside("gc", tmp_path, "--max-size", "1MiB", "--json")
    assert answer.code == ExitCode.OK
    assert "in use by process" in answer.one["skipped"] and not answer.one["blocks_removed"]
    answer = call_outside("gc", tmp_path, "-n", folder.name, "--remove-namespace")
    assert answer.code == ExitCode.IN_USE and folder.exists()
    assert all(rig.check(key(i)) for i in range(BLOCKS))
    answer = call_outside("gc", tmp_path, "--hash", "00", "--max-size", "1MiB", "--json")
    assert "in use by process" in answer.one["skipped"]
    assert answer.one["blocks_removed"] == BLOCKS and not answer.one["segments_removed"]
    assert {path: path.stat().st_size for path in (folder / "segments").iterdir()} == before
    rig.maintain()
    assert not any(rig.check(key(i)) for i in range(BLOCKS))
    rig.close()


def test_by_age_beside_the_engine(tmp_path: Path) -> None:
    now = [NOW_S]
    rig = UsageRig(config_of(tmp_path), lambda: now[0])
    rig.store([key(i) for i in range(BLOCKS)])
    now[0] = time.time()
    rig.policy.touch([key(i) for i in range(8)])
    answer = call_outside("gc", tmp_path, "--older-than", "1d", "--json")
    assert answer.code == ExitCode.OK and answer.one["blocks_removed"] == BLOCKS - 8
    rig.maintain()
    assert {i for i in range(BLOCKS) if rig.check(key(i))} == set(range(8))
    rig.close()
    assert right_blocks(tmp_path) == set(range(8))


def test_what_cannot_be_read_is_skipped(tmp_path: Path) -> None:
    folder = fill(tmp_path)
    (folder / "index" / "data.mdb").unlink()
    answer = call("gc", tmp_path, "--hash", "00", "--json")
    assert "--rebuild-index" in answer.one["skipped"] and answer.one["is_incomplete"]
    assert answer.code == ExitCode.PROBLEMS
    assert call("gc", tmp_path, "--prefix", "00", "--json").code == ExitCode.PROBLEMS
