"""Who may read and write what we leave; nothing that we read is executed; tenants stay apart."""

from __future__ import annotations

import ast
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.keys import key
from support.path_cache import PER_SEGMENT, fill_path, held_in, try_engine_on
from support.path_rig import PathRig, RigNode
from support.remote_rig import PAYLOAD_BYTES
from support.remote_servers import PATIENT
from support.users import unprivileged
from support.waiting import wait_until

from kvcascade.assembly.node_parts import EngineFacts, SlotMemory
from kvcascade.assembly.remote_parts import open_remote_tier
from kvcascade.config.options import At
from kvcascade.config.remote import parse_remote
from kvcascade.errors import InUseError, TierIOError
from kvcascade.tiers.cpu.arena import Arena, ArenaRole
from kvcascade.tiers.cpu.header import HEADER_BYTES, ArenaGeometry
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.namespace import NamespaceKey
from kvcascade.tiers.nvme.path.writer.path_options import PATH_FOLDER
from kvcascade.tools.commands.path_folders import folders_in

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ("kvcascade", "tiers", "handlers", "manager", "tools")
EXECUTING = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
"""Modules whose readers run what they read."""
OTHER_USER = 12345
BLOCKS = 32
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed tier; its namespace directory."""
    before = os.umask(0)  # the modes are ours, not the umask's
    try:
        return fill_path(tmp_path, BLOCKS)
    finally:
        os.umask(before)


def test_files_and_directories_are_private(folder: Path) -> None:
    paths = [folder, *folder.rglob("*"), *(folder.parent / PATH_FOLDER).rglob("*")]
    found = {path: stat.S_IMODE(path.lstat().st_mode) for path in paths}
    assert len(found) > 8
    for path, mode in found.items():
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path} has mode {mode:o}"


def test_a_closed_cache_is_not_said_to_be_absent() -> None:
    with TemporaryDirectory() as text:
        path = Path(text)
        path.chmod(0o755)
        first, second = path / f"model-{'0' * 12}", path / f"model-{'1' * 12}"
        for folder in (first, second):
            folder.mkdir(mode=0)
        for place in (path, first):
            with unprivileged(), pytest.raises(TierIOError, match=f"denied while .* {first}"):
                folders_in(RealFileSystem(), place)
        first.chmod(0o755)
        (first / "lock").touch()
        with unprivileged():
            found = folders_in(RealFileSystem(), path)
        assert [each.name for each in found] == [first.name, second.name]
        assert f"denied while looking into {second}" in found[1].problem


def test_shared_memory_is_private(tmp_path: Path) -> None:
    geometry = ArenaGeometry(slots=2, rank_bytes=4096, world_size=2)
    before = os.umask(0)
    try:
        with Arena.open(geometry, "engine", ArenaRole.worker(0), arena_dir=str(tmp_path)) as arena:
            assert stat.S_IMODE(os.stat(arena.path).st_mode) == 0o600
    finally:
        os.umask(before)


PLACES = ["", "segments", "state", "blocks/data.mdb", "presence", "namespace.json", "lock"]
PLACES += ["../.kvcascade", "../.kvcascade/path.json", "../.kvcascade/writer.lock"]


def refusal(root: Path) -> str:
    """Why a path refuses an engine."""
    found = try_engine_on(root)
    if not isinstance(found, str):
        found.close()
        raise AssertionError("it was opened")
    return found


@as_root
@pytest.mark.parametrize("place", PLACES)
def test_what_belongs_to_somebody_else_is_refused(folder: Path, place: str) -> None:
    os.chown(folder / place, OTHER_USER, OTHER_USER)
    assert "another user" in refusal(folder.parent)


@pytest.mark.parametrize("place", PLACES)
def test_what_others_may_write_is_refused(folder: Path, place: str) -> None:
    target = folder / place
    target.chmod(stat.S_IMODE(target.stat().st_mode) | 0o022)
    assert re.search("others? (users )?may write|written by others", refusal(folder.parent))


def test_an_engine_is_told_how_to_keep_others_from_writing(tmp_path: Path) -> None:
    rig = PathRig(roots=(tmp_path,), real=RealFileSystem())
    welcome = RigNode(rig).welcome
    assert welcome is not None
    rig.close()
    (tmp_path / welcome.folder).chmod(0o770)
    rig.start()
    (refused,) = RigNode(rig).refused
    assert "chmod -R go-w" in refused.text and "Errno" not in refused.text
    rig.close()


@as_root
def test_a_segment_of_somebody_else_is_left_out(folder: Path) -> None:
    os.chown(folder / "segments" / "000000.safetensors", OTHER_USER, OTHER_USER)
    assert len(held_in(folder.parent, range(BLOCKS))) == BLOCKS - PER_SEGMENT


@as_root
def test_an_arena_of_somebody_else_is_refused(tmp_path: Path) -> None:
    geometry = ArenaGeometry(slots=2, rank_bytes=4096, world_size=2)
    with Arena.open(geometry, "engine", ArenaRole.worker(0), arena_dir=str(tmp_path)) as arena:
        os.chown(arena.path, OTHER_USER, OTHER_USER)
        with pytest.raises(InUseError):
            Arena.open(geometry, "engine", ArenaRole.worker(1), arena_dir=str(tmp_path))


def test_objects_in_a_folder_are_private(tmp_path: Path) -> None:
    """Whatever the umask of the engine, from which its node inherits."""
    pytest.importorskip("obstore")
    folder, arena_fd = tmp_path / "share" / "kv", os.memfd_create("arena")
    os.ftruncate(arena_fd, HEADER_BYTES + PAYLOAD_BYTES)
    memory = SlotMemory(PAYLOAD_BYTES, 1, memoryview(b""), duplicate=lambda: os.dup(arena_fd))
    facts = EngineFacts(NamespaceKey("model", {"weights": "w"}), memory, False, False, 10.0)
    given = {"url": folder.as_uri(), "writes": "through", **PATIENT}
    before = os.umask(0)
    try:
        tier = open_remote_tier("remote", parse_remote(At("tiers[1]"), given), facts)
    finally:
        os.umask(before)

    def has_stored() -> bool:
        tier.port.maintain()
        tier.port.poll()
        tier.port.put(1, [key(1)], [0])
        with suppress(FileNotFoundError):  # `obstore` writes into files that it renames
            return any(path.stat().st_size > PAYLOAD_BYTES for path in folder.rglob("*"))
        return False

    try:
        wait_until(has_stored)
    finally:
        tier.close()
        os.close(arena_fd)
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path} has mode {mode:o}"


def sources() -> Iterator[Path]:
    """Every module of the package."""
    for folder in PACKAGE:
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_nothing_that_is_read_is_executed() -> None:
    """No pickle and the like, no `eval`, no `allow_pickle`, no `torch.load`."""
    count = 0
    for path in sources():
        count += 1
        for node in ast.walk(ast.parse(path.read_text())):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            assert not names & EXECUTING, f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "torch.load"), f"{path}:{node.lineno}"
                assert "allow_pickle" not in {k.arg for k in node.keywords}, f"{path}:{node.lineno}"
    assert count > 40
