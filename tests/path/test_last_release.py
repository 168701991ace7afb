"""Engines of the last version without a writer (format 2), in a checkout of its own, and new ones.

Every engine is a process, old ones with old code only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cache_rig import call
from support.children import TESTS
from support.path_engine import PathEngine
from support.small_disk import Filler, free_bytes, on_small_disk
from support.writer_twin import FIELDS, LABEL, namespace_spec

from kvcascade.handlers.node.path_wire import NodeState
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.path_messages import PathOptions
from kvcascade.tiers.nvme.path.writer.namespace.namespace_home import key_of
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of

LAST_RELEASE = "c6e20231a2b23fad5c9168ca9a2495b291fc5633"
"""Commit of the last version whose engines know nothing of a writer."""
FOLDERS = ("kvcascade", "handlers", "manager", "tiers", "tools", "tests/support")
RELEASE = "KVCASCADE_TEST_RELEASE"
"""Variable with the folder of the last release, for a test on a disk of its own."""
DISK_BYTES, RESERVE_BYTES = 12 << 20, 1 << 20
"""More than the tier may take, and what is never used of it."""
END_LIMIT_S = 60.0
BLOCK, PER_SEGMENT = 4096, 8
OK = BlockOutcome.OK
OPTIONS = PathOptions(capacity_of(90, PER_SEGMENT, BLOCK), segment_bytes=PER_SEGMENT * BLOCK)
NAME = key_of(namespace_spec(BLOCK)).directory_name


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the last release."""
    root, target = TESTS.parent, tmp_path_factory.mktemp("release")
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    archive = target / "release.tar"
    command = ["git", "-C", str(root), "archive", "-o", str(archive), LAST_RELEASE, *FOLDERS]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this is no checkout with the history of the last release")
    subprocess.run(["tar", "-xf", str(archive), "-C", str(target)], check=True)
    return target


class OldEngine:
    """An engine of the last release, which obeys lines on its input."""

    def __init__(
        self, release: Path, path: Path, options: PathOptions, label: str, fields: object
    ) -> None:
        """Open its tier; `refusal` is the sentence if it could not."""
        arguments = {
            "paths": [str(path)],
            "capacity": options.capacity_bytes,
            "per_segment": PER_SEGMENT,
            "label": label,
            "fields": fields,
            "ready": 0,
            "min_free": options.min_free_bytes,
            "policy": "lru",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.nvme_peer", json.dumps(arguments)],
            cwd=release,
            env={**os.environ, "PYTHONPATH": f"{release}{os.pathsep}{release / 'tests'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.refusal = str(self._answer().get("error", ""))

    def ask(self, what: str, *numbers: int) -> Any:
        """A command and its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, *numbers]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it cleanly, and take note of its end; idempotent."""
        if self._process.poll() is None and not self.refusal:
            self.ask("close")
        self._process.communicate(timeout=END_LIMIT_S)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the old engine died"
        return json.loads(line)


class Neighbours:
    """Old and new engines on one path."""

    def __init__(self, release: Path, path: Path, stack: ExitStack) -> None:
        self._release, self._path, self._stack = release, path, stack
        self.options = OPTIONS

    def new(self, label: str = LABEL, *, is_thread: bool = False) -> PathEngine:
        """Start a new engine; it need not come up."""
        engine = PathEngine(
            [self._path], self.options, capacity=720, is_thread=is_thread, label=label
        )
        self._stack.callback(engine.close)
        engine.keeper.start()
        engine.until(lambda: engine.tier.takes_puts or engine.state is NodeState.OFF)
        return engine

    def old(self, label: str = "other", fields: object = None) -> OldEngine:
        """Start an old engine."""
        given = fields or {"model": label}
        engine = OldEngine(self._release, self._path, self.options, label, given)
        self._stack.callback(engine.close)
        return engine


@pytest.fixture
def both(release: Path, tmp_path: Path) -> Iterator[Neighbours]:
    with ExitStack() as stack:
        yield Neighbours(release, tmp_path, stack)


def fill(engine: PathEngine, blocks: range) -> None:
    for first in range(blocks.start, blocks.stop, 16):
        engine.store(range(first, first + 16))


def test_an_old_engine_opens_no_new_namespace_and_says_why(
    both: Neighbours, tmp_path: Path
) -> None:
    new = both.new()
    fill(new, range(32))
    assert "has format version 3, this kvcascade reads 2" in both.old(LABEL, FIELDS).refusal
    assert new.holds(range(32)) == list(range(32))
    new.tier.shutdown(0.0)
    new.keeper.close()
    assert "format version 3" in both.old(LABEL, FIELDS).refusal
    again = both.new()
    assert again.holds(range(32)) == list(range(32)) and list(again.get([0, 31])) == [OK] * 2


def test_a_new_engine_refuses_an_old_namespace_with_the_remedy(
    both: Neighbours, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = both.old(LABEL, FIELDS)
    assert not old.refusal
    old.ask("store", *range(16))
    remedy = ("gc", str(tmp_path), "-n", NAME, "--remove-namespace")
    for _ in ("beside it", "after it"):
        caplog.clear()
        new = both.new(is_thread=True)
        assert new.state is NodeState.OFF and new.holds(range(16)) == []
        assert "format version 2" in caplog.text
        assert " ".join(("kvcascade", *remedy)) in caplog.text
        new.tier.shutdown(0.0)
        new.keeper.close()
        old.close()
    old = both.old(LABEL, FIELDS)
    assert not old.refusal and old.ask("hits", *range(16)) == 16
    old.close()
    assert call(*remedy).code == 0
    fill(both.new(), range(16))


@pytest.mark.parametrize("first", ["old", "new"])
def test_both_keep_the_capacity_and_each_others_blocks(
    both: Neighbours, tmp_path: Path, first: str
) -> None:
    fs = RealFileSystem()
    old = both.old() if first == "old" else None
    new = both.new()
    old = old or both.old()
    assert not old.refusal
    for start in range(0, 640, 32):
        old.ask("store", *range(start, start + 8))
        fill(new, range(start, start + 32))
        assert fs.used_bytes(tmp_path) <= OPTIONS.capacity_bytes
    assert list(new.get(range(624, 640))) == [OK] * 16
    assert old.ask("hits", *range(608, 616)) == 8
    names = {each.parent.name for each in tmp_path.glob("*/namespace.json")}
    assert len(names) == 2, "neither has removed the other one"


def old_and_new_keep_a_reserve(path: Path) -> None:
    """Somebody else fills the disk while both could still grow."""
    with ExitStack() as stack:
        both = Neighbours(Path(os.environ[RELEASE]), path, stack)
        both.options = msgspec.structs.replace(OPTIONS, min_free_bytes=RESERVE_BYTES)
        new, old, left = both.new(), both.old(), list[int]()
        assert not old.refusal
        fill(new, range(16))
        old.ask("store", *range(8))
        Filler(path, RESERVE_BYTES + 3 * PER_SEGMENT * BLOCK)
        for start in range(0, 640, 16):
            old.ask("store", *range(start, start + 8))
            left.append(free_bytes(path))
            new.put(range(start, start + 16))
            left.append(free_bytes(path))
        assert min(left) >= RESERVE_BYTES, left
        assert old.ask("hits", *range(640)) and new.holds(range(640)), "both evict instead"


def test_both_keep_the_reserve_of_the_disk(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RELEASE, str(release))
    on_small_disk(old_and_new_keep_a_reserve, tmp_path, DISK_BYTES)


def test_an_old_engine_removes_no_new_namespace_that_nobody_has_open(both: Neighbours) -> None:
    """It removes every namespace that it can lock if it lacks room, as it does here."""
    idle = both.new("idle")
    fill(idle, range(64))
    idle.tier.shutdown(0.0)
    idle.keeper.close()
    fill(both.new(), range(16))
    assert "would be missing in the capacity" in both.old().refusal
    assert both.new("idle").holds(range(64)) == list(range(64))


def test_an_old_namespace_that_nobody_has_open_gives_its_room(
    both: Neighbours, tmp_path: Path
) -> None:
    old = both.old()
    for start in range(0, 400, 8):
        old.ask("store", *range(start, start + 8))
    old.close()
    (folder,) = (each.parent for each in tmp_path.glob("*/namespace.json"))
    os.utime(folder / "lock", (0, os.stat(folder).st_mtime - 3600))  # its last use
    new = both.new()
    for start in range(0, 1600, 16):
        new.store(range(start, start + 16))
        assert RealFileSystem().used_bytes(tmp_path) <= OPTIONS.capacity_bytes
        if not folder.exists():
            break
    assert not folder.exists(), "the coldest namespace has left"
    assert not both.old().refusal, "and may come again"


def test_without_a_writer_a_new_namespace_is_one_of_many_to_an_old_engine(
    both: Neighbours, tmp_path: Path
) -> None:
    new = both.new()
    fill(new, range(640))
    new.tier.shutdown(0.0)
    new.keeper.close()
    old = both.old()
    for start in range(0, 1200, 8):
        old.ask("store", *range(start, start + 8))
    assert RealFileSystem().used_bytes(tmp_path) <= OPTIONS.capacity_bytes
    old.close()
    again = both.new()  # whatever is left of it
    assert set(again.get(range(16))) <= {OK, BlockOutcome.GONE}
    fill(again, range(32))
    assert again.holds(range(32)) == list(range(32))
