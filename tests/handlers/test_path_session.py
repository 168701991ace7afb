"""Sessions of tools: clients of a writer, or the writer while nobody else is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest
from support.path_engine import PathEngine

from kvcascade.errors import ConfigError, FormatError, InUseError, TierIOError
from kvcascade.handlers.node.path.path_service import WriterService
from kvcascade.handlers.node.path_wire import NodeState
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.path_lock import PathDoor, try_lead
from kvcascade.tiers.nvme.path.path_messages import PROTOCOL, PathOptions
from kvcascade.tiers.nvme.path.writer.path_options import PathRecord, load_record, save_record
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of
from kvcascade.tiers.nvme.path.writer_note import note_of_this_process, save_note
from kvcascade.tools.commands import path_session
from kvcascade.tools.commands.path_blocks import OpenPath
from kvcascade.tools.commands.path_files import load_note
from kvcascade.tools.commands.path_session import (
    MAX_WRITERS_ASKED,
    AnswerError,
    PathSession,
    open_session,
)

FS = RealFileSystem()
TESTS = Path(__file__).resolve().parents[1]
OPTIONS = PathOptions(capacity_of(8, 8, 4096), segment_bytes=8 * 4096, policy="s3fifo")


def test_a_tool_leads_a_closed_path_with_the_recorded_options(tmp_path: Path) -> None:
    engine = PathEngine([tmp_path], OPTIONS, is_thread=True).open()
    engine.store(range(4))
    engine.close()
    before = load_record(FS, tmp_path)
    folder = next(each for each in tmp_path.iterdir() if (each / "namespace.json").exists())
    for path in (tmp_path, folder):
        with open_session(FS, path) as session:
            assert session.is_writer
            stat = session.ask("stat")
            assert stat["options"]["policy"] == "s3fifo"
            assert [each["name"] for each in session.ask("list")["namespaces"]] == [folder.name]
            with pytest.raises(AnswerError, match="use one of"):
                session.ask("nothing")
    assert load_record(FS, tmp_path) == before
    lock = try_lead(FS, tmp_path)
    assert lock is not None, "the session gave the lock back"
    lock.release()


def test_a_tool_that_cannot_connect_to_its_own_writer_gives_the_path_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PathEngine([tmp_path], OPTIONS, is_thread=True).open().close()

    def connect(_: WriterService) -> socket.socket:
        raise InUseError("busy")

    with monkeypatch.context() as patched, pytest.raises(InUseError):
        patched.setattr(WriterService, "connect", connect)
        open_session(FS, tmp_path)
    lock = try_lead(FS, tmp_path)
    assert lock is not None, "its writer has ended"
    lock.release()


def test_a_path_that_engines_know_by_another_name(tmp_path: Path) -> None:
    PathEngine([tmp_path], OPTIONS, is_thread=True).open().close()
    other = tmp_path.parent / f"{tmp_path.name}-moved"
    tmp_path.rename(other)
    with open_session(FS, other) as session:
        assert session.ask("list")["namespaces"]
    record = load_record(FS, other)
    assert record is not None and record.paths == (str(tmp_path),)
    two = msgspec.structs.replace(record, paths=("/nowhere/1", "/nowhere/2"))
    assert isinstance(two, PathRecord)
    save_record(FS, other, two)
    with pytest.raises(ConfigError, match="/nowhere/1, /nowhere/2"):
        open_session(FS, other)
    lock = try_lead(FS, other)
    assert lock is not None
    lock.release()


def test_a_tool_asks_the_writer_beside_engines_and_names_a_stopped_one(tmp_path: Path) -> None:
    engine = PathEngine([tmp_path], OPTIONS, name="the engine").open()
    try:
        engine.store(range(4))
        with open_session(FS, tmp_path) as session:
            assert not session.is_writer
            (one,) = session.ask("list")["namespaces"]
            assert (one["clients"], one["is_open"]) == (1, True)
            assert session.ask("namespace", name=one["name"])["blocks"] == 4
            engine.signal(signal.SIGSTOP)
            with pytest.raises(InUseError, match="the engine.*stopped"):
                session.ask("stat", limit_s=0.2)
            engine.signal(signal.SIGCONT)
        note = load_note(FS, tmp_path)
        assert note is not None and note.pid == engine.keeper.pid
    finally:
        engine.signal(signal.SIGCONT)
        engine.close()


FORKING = f"""
import os, signal, sys
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from support.path_engine import PathEngine
from kvcascade.tiers.nvme.path.path_messages import PathOptions
engine = PathEngine([Path(sys.argv[1])], PathOptions(*eval(sys.argv[2])), is_thread=True).open()
print("ready", flush=True)
sys.stdin.readline()
print(os.fork() or signal.pause(), flush=True)
signal.pause()
"""


def test_a_fork_of_a_killed_writer_keeps_no_connection_open(tmp_path: Path) -> None:
    options = repr((OPTIONS.capacity_bytes, OPTIONS.segment_bytes))
    command = [sys.executable, "-c", FORKING, str(tmp_path), options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        engine = PathEngine([tmp_path], OPTIONS, is_thread=True).open()
        print("fork", file=writer.stdin, flush=True)
        child = int(writer.stdout.readline())
        try:
            assert engine.state is NodeState.FOLLOWING
            writer.kill()
            engine.until(lambda: engine.state is NodeState.LEADING)
        finally:
            os.kill(child, signal.SIGKILL)
            writer.kill()
            engine.close()


def leads(engine: PathEngine) -> bool:
    """Whether its node writes the path."""
    return engine.state is NodeState.LEADING


@pytest.mark.parametrize("has_heir", [False, True])
def test_a_tool_goes_on_with_the_next_writer(has_heir: bool, tmp_path: Path) -> None:
    first = PathEngine([tmp_path], OPTIONS, is_thread=True).open()
    first.store(range(4))
    engines = [first]
    if has_heir:
        engines.append(PathEngine([tmp_path], OPTIONS, is_thread=True).open())
    try:
        with open_session(FS, tmp_path) as session:
            (one,) = session.ask("list")["namespaces"]
            engines.pop(0).close()
            for heir in engines:
                heir.until(partial(leads, heir))
            assert session.ask("namespace", name=one["name"])["blocks"] == 4
            assert session.is_writer is not has_heir
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("is_plain_take", [False, True])
def test_a_tool_whose_writer_ends_without_an_answer_asks_the_next_one(
    is_plain_take: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = PathEngine([tmp_path], OPTIONS, is_thread=True).open()
    engine.store(range(4))
    engine.close()
    with open_session(FS, tmp_path) as first, open_session(FS, tmp_path) as second:
        path = OpenPath(FS, second, [tmp_path])
        (name,) = path.names
        has_ended = path_session._has_ended

        def ends_just_then(link: socket.socket) -> bool:
            monkeypatch.setattr(path_session, "_has_ended", has_ended)
            first.close()
            return False

        monkeypatch.setattr(path_session, "_has_ended", ends_just_then)
        if is_plain_take:
            with pytest.raises(InUseError, match="closed the connection; try again"):
                list(path.take_in_parts(name, [0]))
        else:
            assert list(path.take_in_parts(name, [0], is_if_empty=True)) == [([], 0)]
        assert path.facts(name)["blocks"] == 4 and second.is_writer


def test_a_question_goes_to_few_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PathEngine([tmp_path], OPTIONS, is_thread=True).open().close()
    asked: list[str] = []
    with open_session(FS, tmp_path) as session:
        monkeypatch.setattr(PathSession, "_ask_once", lambda _, what, *__: asked.append(what))
        with pytest.raises(InUseError, match="closed the connection"):
            session.ask("stat")
    assert len(asked) == MAX_WRITERS_ASKED


def test_a_tool_that_finds_no_next_writer_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = PathEngine([tmp_path], OPTIONS, is_thread=True).open()
    with open_session(FS, tmp_path) as session:
        engine.close()
        with monkeypatch.context() as patched:
            patched.setattr(path_session, "open_session", _no_answer)
            for _ in range(2):
                with pytest.raises(InUseError):
                    session.ask("stat")
        assert session.ask("stat")["bytes"] and session.is_writer


def _no_answer(*_: object) -> None:
    raise InUseError("the writer does not answer")


def test_no_tier_no_answer_and_another_version(tmp_path: Path) -> None:
    with pytest.raises(TierIOError, match="check the path"):
        open_session(FS, tmp_path / "missing")
    with pytest.raises(TierIOError, match="not the first path"):
        open_session(FS, tmp_path)
    lock = try_lead(FS, tmp_path)
    assert lock is not None
    save_record(FS, tmp_path, PathRecord((str(tmp_path),), OPTIONS))
    pauses: list[float] = []
    with pytest.raises(InUseError, match="not known"):
        open_session(FS, tmp_path, pause=pauses.append)
    assert pauses
    note = msgspec.structs.replace(note_of_this_process("newer"), protocol=PROTOCOL + 1)
    save_note(FS, tmp_path, note)
    door = PathDoor(tmp_path)
    with door.listen(), pytest.raises(FormatError, match="newer"):
        open_session(FS, tmp_path)
    door.close()
    lock.release()
