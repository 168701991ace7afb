"""`kvcascade gc`: what was asked for leaves, nothing else does; closed and beside engines."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.cache_rig import call, least_size
from support.keys import key
from support.path_cache import (
    PER_SEGMENT,
    engine_on,
    fill_path,
    fill_two,
    folder_in,
    held_in,
    note_use,
    of_version_2,
    running_engine,
    segment,
    slots_of,
)
from support.path_engine import PathEngine

from kvcascade.errors import InUseError
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.namespace import NamespaceKey, lock_namespace
from kvcascade.tiers.nvme.path.path_messages import PathOptions
from kvcascade.tools.commands import path_blocks
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.path_session import PathSession

BLOCKS = 24
FS = RealFileSystem()


def aged(folder: Path) -> None:
    """Blocks 0 to 7 were used just now, 8 to 15 an hour ago, 16 to 23 a day ago."""
    now_s = time.time()
    for first, age_s in ((0, 0), (8, 3600), (16, 86_400)):
        note_use(folder, range(first, first + 8), at_s=now_s - age_s)


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A closed cache."""
    folder = fill_path(tmp_path / "kv", BLOCKS)
    aged(folder)
    return folder


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[PathEngine]:
    """An engine with a process of its own on a cache of such blocks."""
    with running_engine(tmp_path / "kv", BLOCKS) as engine:
        aged(folder_in(tmp_path / "kv"))
        yield engine


def files_of(folder: Path) -> dict[Path, int]:
    """Bytes on disk of the segment files."""
    return {path: path.stat().st_blocks * 512 for path in folder.glob("segments/*")}


def on_disk(root: Path) -> int:
    """Bytes of the only namespace."""
    return int(call("inspect", root, "--json").one["disk_bytes"])


def test_by_age(closed: Path) -> None:
    would = call("gc", closed, "--older-than", "2h", "--dry-run", "--json")
    assert would.document["is_dry_run"] and would.one["blocks_removed"] == 8
    did = call("gc", closed, "--older-than", "2h", "--json")
    assert did.code == ExitCode.OK and did.one == would.one | {"hottest_idle_s": _idle(did.one)}
    assert did.one["segments_removed"] == 1
    assert held_in(closed.parent, range(BLOCKS)) == list(range(16))


def _idle(report: dict[str, object]) -> object:
    return report["hottest_idle_s"]


MODES = {
    "age": ["--older-than", "2h"],
    "hash": ["--hash", key(17).hex()],
    "prefix": ["--prefix", key(17).hex()],
    "age and hash": ["--older-than", "2h", "--hash", key(17).hex()],
    "size": ["--max-size", "SIZE"],
    "age and size": ["--older-than", "2h", "--max-size", "SIZE"],
    "all": ["--remove-namespace"],
}


@pytest.mark.parametrize("state", ["closed", "live", "unreadable"])
@pytest.mark.parametrize("mode", MODES)
def test_a_dry_run_says_what_the_real_run_does(tmp_path: Path, mode: str, state: str) -> None:
    root = tmp_path / "kv"
    engine = engine_on(root, is_thread=False)
    engine.store(range(BLOCKS))
    folder = folder_in(root)
    aged(folder)
    size = on_disk(root) - segment(folder).stat().st_blocks * 512
    if state != "live":
        engine.close()
    if state == "unreadable":
        (folder / "blocks" / "data.mdb").write_bytes(b"no database" * 1000)
    words = [str(size) if word == "SIZE" else word for word in MODES[mode]]
    arguments = ["gc", root, "-n", folder.name, *words, "--json"]
    would, before = call(*arguments, "--dry-run"), files_of(folder)
    did, after = call(*arguments), files_of(folder)
    assert would.code == did.code
    said = would.one | {"hottest_idle_s": None}
    assert said == did.one | {"hottest_idle_s": None}
    gone = [path for path in before if path not in after]
    assert said["segments_removed"] == len(gone)
    if state == "unreadable":
        assert said["blocks_before"] is None
        assert said["was_removed"] == (mode == "all") == (not folder.exists())
    else:
        left = call("inspect", root, "--json").one["blocks"] if folder.exists() else 0
        assert said["blocks_removed"] == BLOCKS - left and said["blocks_before"] == BLOCKS
    if mode != "all":
        assert said["bytes_freed"] == sum(before[path] for path in gone)
    if mode == "all" and state == "live":
        assert did.code == ExitCode.IN_USE and "in use by the engine" in said["skipped"]
    if state == "live":
        assert set(engine.get(range(BLOCKS))) <= {BlockOutcome.OK, BlockOutcome.GONE}
        engine.store(range(100, 100 + BLOCKS))
        engine.close()


def test_what_is_removed_as_a_whole_is_told_beforehand(closed: Path) -> None:
    note_use(closed, range(BLOCKS), at_s=time.time() - 3600)
    arguments = ["gc", closed.parent, "-n", closed.name, "--remove-namespace"]
    would = call(*arguments, "--dry-run", "--json").one
    assert would["blocks_removed"] == would["blocks_before"] == BLOCKS
    assert would["bytes_freed"] == sum(
        path.stat().st_blocks * 512 for path in closed.rglob("*") if path.is_file()
    )
    assert would["hottest_idle_s"] == pytest.approx(3600, abs=60)
    shown = " ".join(call(*arguments, "--dry-run").out.split())
    assert f"{BLOCKS} {BLOCKS}" in shown and "1.0 h" in shown


def test_the_hottest_block_that_leaves_is_told(closed: Path) -> None:
    for words, idle_s in (
        (["--older-than", "30min"], 3600),
        (["--hash", key(17).hex()], 86_400),
        (["--max-size", least_size(closed)], 0),
        (["--max-size", "1"], None),
        (["--hash", "ff"], None),
    ):
        found = call("gc", closed, *words, "--dry-run", "--json").one["hottest_idle_s"]
        assert found == (None if idle_s is None else pytest.approx(idle_s, abs=60))


def test_files_that_were_empty_before_stay(closed: Path) -> None:
    """Room that was made ahead is nobody's to give back unless a size is asked for."""
    ahead = [path for path in files_of(closed) if int(path.stem) not in _used(closed)]
    call("gc", closed, "--hash", "ff")
    assert all(path.exists() for path in ahead)
    report = call("gc", closed, "--older-than", "2h", "--json").one
    assert report["segments_removed"] == 1 and all(path.exists() for path in ahead)
    call("gc", closed, "--max-size", least_size(closed))
    assert not files_of(closed) and closed.exists()


def _used(folder: Path) -> set[int]:
    return {slot // PER_SEGMENT for slot in slots_of(folder, range(BLOCKS))}


def test_blocks_of_unknown_age_stay(closed: Path) -> None:
    for path in (closed / "state").glob("use_*.arr"):
        path.unlink()
    assert call("gc", closed, "--older-than", "1s", "--json").one["blocks_removed"] == 0


def test_to_a_size_the_coldest_segments_leave(closed: Path) -> None:
    empty = len(files_of(closed)) - BLOCKS // PER_SEGMENT
    one = segment(closed).stat().st_blocks * 512
    size = on_disk(closed.parent) - empty * one - 1
    report = call("gc", closed.parent, "--max-size", str(size), "--json").one
    assert report["segments_removed"] == empty + 1 and report["blocks_removed"] == PER_SEGMENT
    assert held_in(closed.parent, range(BLOCKS)) == list(range(16))


def test_a_size_that_cannot_be_reached_is_said_so(closed: Path) -> None:
    root = closed.parent
    for words in (["--dry-run"], []):
        answer = call("gc", root, "--max-size", "1kB", *words, "--json")
        assert answer.code == ExitCode.PROBLEMS and answer.one["is_incomplete"]
        assert answer.one["blocks_removed"] == 0 and not answer.one["was_removed"]
        assert "--max-size is not reached" in answer.one["skipped"]
    assert held_in(root, range(BLOCKS)) == list(range(BLOCKS))
    size = on_disk(root)
    answer = call("gc", root, "--max-size", str(size), "--json")
    assert answer.code == ExitCode.OK and answer.one["skipped"] == "", "it is that small"


@pytest.mark.parametrize("words", [[], ["--older-than", "2h"]])
def test_a_large_namespace_of_version_2_does_not_empty_the_others(
    closed: Path, words: list[str]
) -> None:
    root = closed.parent
    old = of_version_2(root)
    (old / "index" / "data.mdb").write_bytes(bytes(4 << 20))
    answer = call("gc", root, "--max-size", "4MiB", *words, "--json")
    assert answer.code == ExitCode.PROBLEMS
    found = {each["name"]: each for each in answer.document["namespaces"]}
    assert found[closed.name]["segments_removed"] == found[closed.name]["bytes_freed"] == 0
    assert found[closed.name]["hottest_idle_s"] is None
    for name in (closed.name, old.name):
        assert "--max-size is not reached, so nothing is removed" in found[name]["skipped"]
    assert "format version 2" in found[old.name]["skipped"]
    assert held_in(root, range(BLOCKS)) == list(range(BLOCKS))


def test_a_size_is_that_of_all_namespaces(tmp_path: Path) -> None:
    one, two = fill_two(tmp_path, {"n": 1}, {"n": 2})
    note_use(one, range(20), at_s=time.time() - 3600)
    total = sum(
        each["disk_bytes"] for each in call("inspect", tmp_path, "--json").document["namespaces"]
    )
    empty = sum(len(files_of(each)) - 3 for each in (one, two))
    size = total - (empty + 1) * segment(one).stat().st_blocks * 512
    answer = call("gc", tmp_path, "--max-size", str(size), "--json")
    removed = {each["name"]: each["blocks_removed"] for each in answer.document["namespaces"]}
    assert removed[two.name] == 0 and removed[one.name] > 0


def test_the_command(tmp_path: Path) -> None:
    folder = fill_path(tmp_path, BLOCKS)
    answer = call("gc", tmp_path, "--hash", key(3).hex(), "--dry-run", "--json")
    assert answer.code == ExitCode.OK and answer.document["is_dry_run"] is True
    assert answer.one["blocks_removed"] == 1 and answer.one["blocks_before"] == BLOCKS
    assert "Would be removed" in call("gc", tmp_path, "--max-size", "1MiB", "--dry-run").out
    assert call("gc", tmp_path, "--hash", key(3).hex()).code == ExitCode.OK
    assert call("verify", folder).code == ExitCode.OK
    assert held_in(tmp_path, range(BLOCKS)) == [n for n in range(BLOCKS) if n != 3]


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["--older-than", "soon"],
        ["--max-size", "50%"],
        ["--hash", "xyz"],
        ["--prefix", "", "--older-than", "0s"],
        ["--hash", "0x", "--older-than", "0s"],
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
    fill_path(tmp_path)
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
    for absent in ("another-0123456789ab", "0123456789ab"):
        answer = call("gc", tmp_path, "-n", absent, "--remove-namespace")
        assert answer.code == ExitCode.USAGE and "there is no namespace" in answer.err
    assert call("gc", tmp_path, "-n", digits, "--remove-namespace").code == ExitCode.OK
    assert not one.exists() and two.exists()


def test_a_namespace_in_two_paths_leaves_as_a_whole(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    fill_path(paths, BLOCKS)
    name = folder_in(paths[0]).name
    folders = [path / name for path in paths]
    answer = call("gc", paths[1], "-n", name, "--remove-namespace", "--json")
    assert answer.code == ExitCode.USAGE and "is spread over 2 paths" in answer.document["message"]
    assert all(folder.exists() for folder in folders)
    both = call("gc", paths[0], "-n", name, "--remove-namespace", "--json")
    assert both.code == ExitCode.OK and both.one["was_removed"]
    assert not any(folder.exists() for folder in folders)


def test_a_prompt_that_nobody_noted_is_said_so(tmp_path: Path) -> None:
    """Who clears out a document must not take one block of it for all."""
    fill_path(tmp_path, BLOCKS)
    answer = call("gc", tmp_path, "--prefix", key(3).hex(), "--json")
    assert answer.code == ExitCode.PROBLEMS and answer.one["is_incomplete"]
    assert answer.one["blocks_removed"] == 1
    assert f"{BLOCKS - 1} other blocks may come after" in answer.one["skipped"]
    assert call("gc", tmp_path, "--prefix", key(3).hex()).code == ExitCode.USAGE, "it is gone"


def test_a_prompt_is_looked_for_in_every_namespace(tmp_path: Path) -> None:
    one, two = fill_two(tmp_path, {"n": 1}, {"n": 2})
    call("gc", tmp_path, "-n", "one", "--hash", key(3).hex())
    answer = call("gc", tmp_path, "--prefix", key(3).hex(), "--json")
    removed = {each["name"]: each["blocks_removed"] for each in answer.document["namespaces"]}
    assert removed == {one.name: 0, two.name: 1}


# ---- beside engines --------------------------------------------------------------------------


def test_blocks_leave_beside_an_engine(tmp_path: Path, engine: PathEngine) -> None:
    answer = call("gc", tmp_path / "kv", "--older-than", "2h", "--json")
    assert answer.code == ExitCode.OK and answer.one["blocks_removed"] == 8
    assert engine.holds(range(BLOCKS)) == list(range(16))
    assert list(engine.get(range(16))) == [BlockOutcome.OK] * 16
    engine.store(range(16, BLOCKS))
    assert list(engine.get(range(BLOCKS))) == [BlockOutcome.OK] * BLOCKS


def test_segments_leave_beside_an_engine_that_reads(tmp_path: Path, engine: PathEngine) -> None:
    root = tmp_path / "kv"
    assert list(engine.get(range(BLOCKS))) == [BlockOutcome.OK] * BLOCKS, "its files are open"
    answer = call("gc", root, "--max-size", "1", "--json")
    assert answer.one["blocks_removed"] == 0 and "in indexes" in answer.one["skipped"]
    answer = call("gc", root, "--max-size", least_size(folder_in(root)), "--json")
    assert answer.one["blocks_removed"] == BLOCKS and answer.one["skipped"] == ""
    assert not files_of(folder_in(root))
    assert BlockOutcome.OK not in engine.get(range(BLOCKS))
    engine.store(range(BLOCKS))
    assert list(engine.get(range(BLOCKS))) == [BlockOutcome.OK] * BLOCKS
    assert call("verify", root).code == ExitCode.OK


def test_a_closed_namespace_leaves_beside_an_engine_of_another(
    tmp_path: Path, engine: PathEngine
) -> None:
    other = fill_path(tmp_path / "kv", 20, NamespaceKey("other", {"n": 1}))
    for _ in range(2):
        answer = call("gc", tmp_path / "kv", "-n", other.name, "--remove-namespace", "--json")
        assert answer.code == ExitCode.OK and answer.one["was_removed"] and not other.exists()
        assert answer.one["blocks_removed"] == 20
        assert list(engine.get(range(BLOCKS))) == [BlockOutcome.OK] * BLOCKS
        again = fill_path(tmp_path / "kv", 20, NamespaceKey("other", {"n": 1}))
        assert again == other


@contextmanager
def on_question(
    patch: pytest.MonkeyPatch, what: str, number: int, act: Callable[[], None]
) -> Iterator[None]:
    """Questions have few blocks or segments, and `act` is called before one of them."""
    ask, asked = PathSession.ask, count(1)

    def counted(session: PathSession, asks: str, *limit: float, **body: Any) -> dict[str, Any]:
        if asks == what and next(asked) == number:
            act()
        return ask(session, asks, *limit, **body)

    with patch.context() as patched:
        patched.setattr(path_blocks, "SEGMENTS_PER_QUESTION", 1)
        patched.setattr(path_blocks, "MAX_BLOCKS_PER_ANSWER", 4)
        patched.setattr(PathSession, "ask", counted)
        yield


def test_a_namespace_that_comes_into_use_keeps_what_is_left(
    tmp_path: Path, engine: PathEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, key_of_other = tmp_path / "kv", NamespaceKey("other", {"n": 1})
    other = fill_path(root, BLOCKS, key_of_other)
    files = files_of(other)
    came: list[PathEngine] = []

    def comes() -> None:
        came.append(engine_on(root, namespace=key_of_other))

    with on_question(monkeypatch, "take", 2, comes):
        answer = call("gc", root, "-n", other.name, "--remove-namespace", "--json")
    try:
        assert answer.code == ExitCode.IN_USE and "in use by 1 engines" in answer.one["skipped"]
        report = answer.one
        assert not report["was_removed"] and report["blocks_before"] == BLOCKS
        assert (report["blocks_removed"], report["segments_removed"]) == (PER_SEGMENT, 1)
        assert report["bytes_freed"] == files[segment(other)]
        assert came[0].holds(range(BLOCKS)) == list(range(PER_SEGMENT, BLOCKS))
    finally:
        came[0].close()


@pytest.mark.parametrize(
    ("words", "what", "blocks", "segments"),
    [
        (["--max-size", "LEAST"], "take", PER_SEGMENT, 1),
        (["--older-than", "2h", "--max-size", "LEAST"], "take", 2 * PER_SEGMENT, 2),
        (["--older-than", "2h"], "drop", 4, 0),
        (["--remove-namespace"], "take", PER_SEGMENT, 1),
    ],
)
def test_a_fault_midway_leaves_the_report_of_what_was_done(
    tmp_path: Path,
    engine: PathEngine,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    what: str,
    blocks: int,
    segments: int,
) -> None:
    root, key_of_other = tmp_path / "kv", NamespaceKey("other", {"n": 1})
    other = fill_path(root, BLOCKS, key_of_other)
    aged(other)
    before = len(files_of(other))
    ahead = before - len(_used(other)) if "--max-size" in words else 0  # the empty ones go first
    words = [least_size(other) if word == "LEAST" else word for word in words]

    def fails() -> None:
        raise InUseError("the writer closed the connection; try again")

    with on_question(monkeypatch, what, ahead + segments + 1 + (what == "drop"), fails):
        answer = call("gc", root, "-n", other.name, *words, "--json")
    report = answer.one
    assert answer.code == (ExitCode.PROBLEMS if len(words) > 1 else ExitCode.IN_USE)
    assert "try again" in report["skipped"] and not report["was_removed"]
    assert (report["blocks_removed"], report["segments_removed"]) == (blocks, ahead + segments)
    assert (report["bytes_freed"] > 0) == (segments > 0)
    left = call("inspect", root, "-n", other.name, "--json").one["blocks"]
    assert left == BLOCKS - blocks and len(files_of(other)) == before - ahead - segments


def test_a_stopped_writer_is_one_sentence(tmp_path: Path, engine: PathEngine) -> None:
    root = tmp_path / "kv"
    folder = folder_in(root)
    engine.signal(signal.SIGSTOP)
    for words in (["--older-than", "1d"], ["--max-size", "1"]):
        answer = call("gc", root, *words)
        assert answer.code == ExitCode.IN_USE and "which is stopped" in answer.err
        assert answer.err.count("\n") == 1
    answer = call("gc", root, "-n", folder.name, "--remove-namespace", "--json")
    assert answer.code == ExitCode.IN_USE and "which is stopped" in answer.one["skipped"]
    assert folder.exists() and not answer.one["was_removed"]
    engine.signal(signal.SIGCONT)
    assert list(engine.get(range(BLOCKS))) == [BlockOutcome.OK] * BLOCKS


@pytest.mark.parametrize("resets", [0, 1])
def test_a_namespace_that_leaves_between_two_writers_costs_an_engine_its_blocks(
    tmp_path: Path, engine: PathEngine, resets: int
) -> None:
    """The command leads while the engine is stopped and its writer is gone."""
    root = tmp_path / "kv"
    other = engine_on(root, is_thread=False)
    for _ in range(resets):
        other.tier.reset()
        other.until(lambda: not other.tier._resets_due)
        other.store(range(BLOCKS))
    assert list(other.get(range(BLOCKS))) == [BlockOutcome.OK] * BLOCKS
    other.signal(signal.SIGSTOP)
    engine.kill()
    folder = folder_in(root)
    answer = call("gc", root, "-n", folder.name, "--remove-namespace", "--json")
    assert answer.code == ExitCode.OK and answer.one["was_removed"] and not folder.exists()
    other.signal(signal.SIGCONT)
    assert BlockOutcome.OK not in other.get(range(100, 104))
    other.get(range(BLOCKS))  # whatever the outcome, `get` compares the bytes
    other.until(lambda: folder.exists() and other.tier.takes_puts)
    other.until(lambda: other.holds(range(BLOCKS)) == [])
    assert BlockOutcome.OK not in other.get(range(BLOCKS))
    other.store(range(BLOCKS))
    assert list(other.get(range(BLOCKS))) == [BlockOutcome.OK] * BLOCKS
    other.close()
    assert call("verify", root).code == ExitCode.OK


# ---- what cannot be read ---------------------------------------------------------------------


def test_what_cannot_be_read_is_skipped(tmp_path: Path) -> None:
    folder = fill_path(tmp_path)
    (folder / "blocks" / "data.mdb").write_bytes(b"no database" * 1000)
    answer = call("gc", tmp_path, "--hash", "00", "--json")
    assert "remove" in answer.one["skipped"] and answer.one["is_incomplete"]
    assert answer.code == ExitCode.PROBLEMS
    assert call("gc", tmp_path, "--prefix", "00", "--json").code == ExitCode.PROBLEMS
    (folder / "namespace.json").write_text("{")
    assert call("gc", tmp_path, "--hash", "00", "--json").code == ExitCode.PROBLEMS
    answer = call("gc", tmp_path, "-n", folder.name, "--remove-namespace", "--json")
    assert answer.code == ExitCode.OK and not folder.exists()


def test_without_the_record_of_the_path_only_whole_namespaces_leave(closed: Path) -> None:
    (closed.parent / ".kvcascade" / "path.json").unlink()
    assert call("gc", closed, "--hash", "00").code == ExitCode.CANNOT_OPEN
    answer = call("gc", closed.parent, "-n", closed.name, "--remove-namespace", "--json")
    assert answer.code == ExitCode.OK and answer.one["was_removed"] and not closed.exists()


def test_a_namespace_of_version_2_is_only_removed(tmp_path: Path) -> None:
    fill_path(tmp_path, BLOCKS)
    old = of_version_2(tmp_path)
    answer = call("gc", tmp_path, "--hash", key(3).hex(), "--json")
    assert answer.code == ExitCode.OK
    found = {each["name"]: each for each in answer.document["namespaces"]}
    assert "format version 2" in found[old.name]["skipped"]
    assert sum(each["blocks_removed"] for each in found.values()) == 1
    lock = lock_namespace(FS, old)
    assert lock is not None
    answer = call("gc", tmp_path, "-n", old.name, "--remove-namespace", "--json")
    assert answer.code == ExitCode.IN_USE and "stop it first" in answer.one["skipped"]
    lock.release()
    answer = call("gc", tmp_path, "-n", old.name, "--remove-namespace", "--json")
    assert answer.code == ExitCode.OK and answer.one["bytes_freed"] >= 8192 and not old.exists()
    assert len(held_in(tmp_path, range(BLOCKS))) == BLOCKS - 1


def test_version_2_leaves_beside_an_engine(tmp_path: Path, engine: PathEngine) -> None:
    old = of_version_2(tmp_path / "kv")
    answer = call("gc", tmp_path / "kv", "-n", old.name, "--remove-namespace")
    assert answer.code == ExitCode.OK and not old.exists()
    assert list(engine.get(range(BLOCKS))) == [BlockOutcome.OK] * BLOCKS


@pytest.mark.parametrize("budget", [None, 1 << 30])
def test_a_damaged_namespace_is_removed_beside_an_engine(
    tmp_path: Path, budget: int | None
) -> None:
    """With a write budget the writer has read the totals of every namespace."""
    options = PathOptions(64 << 20, segment_bytes=1 << 20, write_budget_bytes=budget)
    engine = PathEngine([tmp_path], options, label="old", is_thread=True).open()
    engine.store(range(2))
    folder = engine.tier.feed.folder
    engine.close()
    assert folder is not None
    with (folder / "blocks" / "data.mdb").open("r+b") as file:
        file.write(b"\xff" * 8192)
    other = PathEngine([tmp_path], options, label="other", is_thread=True).open()
    assert call("gc", tmp_path, "-n", folder.name, "--remove-namespace").code == 0
    assert not folder.exists()
    other.close()
