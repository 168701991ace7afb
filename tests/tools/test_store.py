"""`kvcascade store`: the writer of a path as a service."""

from __future__ import annotations

import configparser
import logging
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from support.cache_rig import ROOT, call, call_outside
from support.children import environment
from support.clock import ManualClock
from support.keys import key
from support.path_cache import fill_path
from support.path_engine import PathEngine
from support.waiting import wait_until

import kvcascade
from kvcascade.errors import ConfigError, InUseError
from kvcascade.handlers.node.path.path_service import WriterService
from kvcascade.handlers.node.path_wire import NodeState
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path.path_lock import PathDoor, try_lead
from kvcascade.tiers.nvme.path.path_messages import PROTOCOL, PathOptions
from kvcascade.tiers.nvme.path.writer import path_writer
from kvcascade.tiers.nvme.path.writer.path_options import PATH_FOLDER, load_record
from kvcascade.tiers.nvme.path.writer_note import note_of_this_process, save_note
from kvcascade.tools.commands.command_line import ExitCode
from kvcascade.tools.commands.path_files import load_note, named
from kvcascade.tools.commands.path_session import open_session
from kvcascade.tools.commands.store import serve_path
from kvcascade.tools.commands.store.serve_path import (
    STOP_LIMIT_S,
    TAKE_OVER_LIMIT_S,
    Rival,
    StoreEnd,
    parts_of,
    serve,
)

BLOCK = 4096
FS = RealFileSystem()
GIVEN: dict[str, object] = {"capacity": "64MiB", "min_free": 0}
OPTIONS = PathOptions(64 << 20, segment_bytes=8 * BLOCK)


def test_a_path_that_no_engine_has_used_is_called_one(tmp_path: Path) -> None:
    def look() -> None:
        answer = call("inspect", tmp_path)
        assert answer.code == ExitCode.CANNOT_OPEN and "no namespace in" in answer.err
        assert " yet: it is the path of a tier" in answer.err
        assert named(note_of_this_process("store")).partition(" (")[0] in answer.err

    serve_while(tmp_path, look)


def serve_while(root: Path, work: Callable[[], object]) -> StoreEnd:
    """Run a service until some work is done beside it."""

    def pause(seconds: float) -> None:
        work()
        raise KeyboardInterrupt

    return serve(parts_of([root], GIVEN, {}), rival=Rival.REFUSED, pause=pause)


def test_engines_follow_the_service_and_find_their_blocks_in_the_next_one(tmp_path: Path) -> None:
    def put() -> None:
        engine = PathEngine([tmp_path], OPTIONS, is_thread=True).open()
        try:
            assert engine.state is NodeState.FOLLOWING
            engine.store(range(8))
        finally:
            engine.close()

    def get() -> None:
        engine = PathEngine([tmp_path], OPTIONS, is_thread=True).open()
        try:
            assert engine.holds(range(9)) == list(range(8))
            engine.get(range(8))
        finally:
            engine.close()

    assert serve_while(tmp_path, put) is StoreEnd.STOPPED
    assert serve_while(tmp_path, get) is StoreEnd.STOPPED
    lock = try_lead(FS, tmp_path)
    assert lock is not None, "the path is closed"
    lock.release()


def test_a_namespace_directory_is_no_path(tmp_path: Path) -> None:
    inner = fill_path(tmp_path / "kv", 1)
    answer = call("store", inner)
    assert answer.code == ExitCode.USAGE and f"give {tmp_path / 'kv'}" in answer.err
    assert not (inner / PATH_FOLDER).exists()


def test_options_come_from_the_call_then_the_environment_then_the_record(tmp_path: Path) -> None:
    variables = {
        "KVCASCADE_NVME_POLICY": "s3fifo",
        "KVCASCADE_NVME_CAPACITY": "1GiB",
        "KVCASCADE_NVME_MOVERS": "threads",
        "KVCASCADE_WRITE_MODE": "through",
    }
    parts = parts_of([tmp_path], GIVEN, variables)
    assert (parts.options.policy, parts.options.capacity_bytes) == ("s3fifo", 64 << 20)
    serve(parts, rival=Rival.REFUSED, pause=_interrupt)
    again = parts_of([tmp_path], {"durability": "power"}, {})
    assert again.options.policy == "s3fifo" and again.options.capacity_bytes == 64 << 20
    assert again.options.durability == "power"
    record = load_record(FS, tmp_path)
    assert record is not None and record.options == parts.options
    with pytest.raises(ConfigError, match="store.policy"):
        parts_of([tmp_path], {}, {"KVCASCADE_NVME_POLICY": "lru2"})
    with pytest.raises(ConfigError, match="environment variable KVCASCADE_NVME_CAPACITY"):
        parts_of([tmp_path], {}, {"KVCASCADE_NVME_CAPACITY": "lots"})


def _interrupt(seconds: float) -> None:
    raise KeyboardInterrupt


def test_a_second_writer_is_named_or_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvcascade")
    engine = PathEngine([tmp_path], OPTIONS, name="the engine", is_thread=True).open()
    parts = parts_of([tmp_path], GIVEN, {})
    with pytest.raises(InUseError, match="the engine.*--take-over.*--wait"):
        serve(parts, rival=Rival.REFUSED)
    pauses = 0

    def pause(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 3:
            engine.close()
        note = load_note(FS, tmp_path)
        if note is not None and "kvcascade store" in note.name:
            raise KeyboardInterrupt

    assert serve(parts, rival=Rival.AWAITED, pause=pause) is StoreEnd.STOPPED
    assert sum("the engine" in each for each in caplog.messages) == 1, "said once"
    assert serve(parts, rival=Rival.AWAITED, pause=_interrupt) is StoreEnd.STOPPED


def test_a_service_that_is_asked_to_end_while_it_hands_over_ends(tmp_path: Path) -> None:
    pauses = 0

    def is_handed_over() -> bool:
        lock = try_lead(FS, tmp_path)
        if lock is not None:
            lock.release()
        return lock is not None

    def pause(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        assert pauses == 1, "it does not wait for its turn again"
        with open_session(FS, tmp_path) as session:
            session.ask("hand_over")
        wait_until(is_handed_over)
        raise KeyboardInterrupt

    parts = parts_of([tmp_path], GIVEN, {})
    assert serve(parts, rival=Rival.AWAITED, pause=pause) is StoreEnd.STOPPED


def _follows(engine: PathEngine) -> bool:
    return engine.state is NodeState.FOLLOWING


def test_it_takes_over_from_engines_that_go_on(tmp_path: Path) -> None:
    engines = [
        PathEngine([tmp_path], OPTIONS, name=f"engine {number}", is_thread=True).open()
        for number in range(3)
    ]
    engines[0].store(range(8))

    def work() -> None:
        for each in engines:
            each.until(partial(_follows, each))
        record = load_record(FS, tmp_path)
        assert record is not None and record.options.policy == "sieve"
        engines[1].store(range(8, 16))
        assert engines[2].holds(range(16)) == list(range(16))
        raise KeyboardInterrupt

    def pause(seconds: float) -> None:
        note = load_note(FS, tmp_path)
        if note is not None and "kvcascade store" in note.name:
            work()

    try:
        parts = parts_of([tmp_path], {**GIVEN, "policy": "sieve"}, {})
        assert serve(parts, rival=Rival.ASKED, pause=pause) is StoreEnd.STOPPED
        engines[2].until(lambda: engines[2].tier.takes_puts)
        assert engines[2].holds(range(16)) == list(range(16))
    finally:
        for engine in engines:
            engine.close()


def test_a_lock_that_nobody_hands_over_is_an_error(tmp_path: Path) -> None:
    parts = parts_of([tmp_path], GIVEN, {})
    lock, clock = try_lead(FS, tmp_path), ManualClock(0.0)
    assert lock is not None
    try:
        with pytest.raises(InUseError, match="not handed over"):
            serve(parts, rival=Rival.ASKED, pause=clock.advance, clock=clock)
    finally:
        lock.release()
    assert TAKE_OVER_LIMIT_S <= clock() < TAKE_OVER_LIMIT_S + 1


def note_protocol(root: Path, protocol: int) -> None:
    """Note a writer of another version."""
    note = note_of_this_process("another version")
    save_note(FS, root, msgspec.structs.replace(note, protocol=protocol))


def test_it_takes_over_from_an_older_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, lock = parts_of([tmp_path], GIVEN, {}), try_lead(FS, tmp_path)
    assert lock is not None
    monkeypatch.setattr(path_writer, "PROTOCOL", PROTOCOL - 1)
    older = WriterService(FS, [tmp_path], OPTIONS, lock)
    note_protocol(tmp_path, PROTOCOL - 1)

    def pause(seconds: float) -> None:
        note = load_note(FS, tmp_path)
        if note is not None and "kvcascade store" in note.name:
            raise KeyboardInterrupt

    assert serve(parts, rival=Rival.ASKED, pause=pause) is StoreEnd.STOPPED
    assert older.was_retired


def test_it_does_not_take_over_from_a_newer_version(tmp_path: Path) -> None:
    parts, lock = parts_of([tmp_path], GIVEN, {}), try_lead(FS, tmp_path)
    assert lock is not None
    note_protocol(tmp_path, PROTOCOL + 1)
    door = PathDoor(tmp_path)
    with door.listen(), pytest.raises(InUseError, match="newer version; update this kvcascade"):
        serve(parts, rival=Rival.ASKED)
    door.close()
    lock.release()


def test_another_list_of_paths_takes_nothing_over(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    two.mkdir()
    one.mkdir()
    engine = PathEngine([one], OPTIONS, is_thread=True).open()
    try:
        with pytest.raises(ConfigError, match="paths"):
            serve(parts_of([one, two], GIVEN, {}), rival=Rival.ASKED)
        assert engine.state is NodeState.LEADING and engine.tier.takes_puts
    finally:
        engine.close()


def test_a_service_that_waits_can_be_stopped(tmp_path: Path) -> None:
    engine = PathEngine([tmp_path], OPTIONS, is_thread=True).open()
    try:
        parts = parts_of([tmp_path], GIVEN, {})
        assert serve(parts, rival=Rival.AWAITED, pause=_interrupt) is StoreEnd.STOPPED
        assert engine.tier.takes_puts
    finally:
        engine.close()


def test_a_path_that_is_taken_away_ends_the_service(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    parts = parts_of([root], GIVEN, {})
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        if not pauses:
            root.rename(tmp_path / "away")
            root.mkdir()
        pauses.append(seconds)

    assert serve(parts, rival=Rival.REFUSED, pause=pause) is StoreEnd.FAILED
    assert not (root / PATH_FOLDER).exists()


def test_a_missing_folder_is_not_made(tmp_path: Path) -> None:
    answer = call("store", tmp_path / "kv", "--min-free", "0")
    assert answer.code == ExitCode.USAGE and "create it" in answer.err
    assert not (tmp_path / "kv").exists()
    assert call("store", tmp_path, "--capacity", "much").code == ExitCode.USAGE


def test_a_signal_during_the_start_is_no_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status was 130."""

    def signalled(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(serve_path, "parts_of", signalled)
    answer = call("store", tmp_path)
    assert (answer.code, answer.err) == (ExitCode.OK, "")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str, open_files: int | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvcascade.tools", "store", str(tmp_path), *options]
        if open_files is not None:
            # The limit is the child's alone: this process may have more files open.
            command = ["sh", "-c", f'ulimit -Sn {open_files} && exec "$@"', "sh", *command]
        # A child inherits what its parent ignores. Shells ignore SIGINT for background jobs, and
        # nohup ignores SIGHUP.
        former = signal.signal(signal.SIGINT, signal.default_int_handler)
        former_hup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        try:
            process = subprocess.Popen(
                command, env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True
            )
        finally:
            signal.signal(signal.SIGINT, former)
            signal.signal(signal.SIGHUP, former_hup)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def line_with(process: subprocess.Popen[str], text: str) -> str:
    """Read lines of a process until one has this text."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return line
    raise AssertionError(f"it ended without {text!r}")


def test_it_may_open_as_many_files_as_the_system_allows(
    service: Callable[..., subprocess.Popen[str]],
) -> None:
    """The writer keeps one open for each namespace and folder."""
    kind = resource.RLIMIT_NOFILE
    hard = resource.getrlimit(kind)[1]
    process = service("--capacity", "64MiB", "--min-free", "0", open_files=min(512, hard - 1))
    line_with(process, "writes")
    assert resource.prlimit(process.pid, kind) == (hard, hard)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_cleanly(
    tmp_path: Path, service: Callable[..., subprocess.Popen[str]], number: int
) -> None:
    process = service("--capacity", "64MiB", "--min-free", "0")
    assert "64.0 MiB" in line_with(process, "writes")
    with kvcascade.open(tmp_path, namespace="mine", block_bytes=BLOCK) as cache:
        assert cache.put([key(1)], [bytes(BLOCK)]) == [kvcascade.PutOutcome.STORED]
    answer = call_outside("store", tmp_path)
    assert answer.code == ExitCode.IN_USE and str(process.pid) in answer.err
    process.send_signal(number)
    assert process.wait(STOP_LIMIT_S) == ExitCode.OK
    with open_session(FS, tmp_path) as session:
        assert session.is_writer
        (found,) = session.ask("list")["namespaces"]
        assert session.ask("namespace", name=found["name"])["blocks"] == 1


def test_the_next_one_takes_over_from_a_killed_one(
    tmp_path: Path, service: Callable[..., subprocess.Popen[str]]
) -> None:
    first = service("--capacity", "64MiB", "--min-free", "0")
    line_with(first, "writes")
    second = service("--wait")
    assert str(first.pid) in line_with(second, "has a writer already")
    first.kill()
    assert "64.0 MiB" in line_with(second, "writes")
    second.terminate()
    assert second.wait(STOP_LIMIT_S) == ExitCode.OK


@pytest.mark.parametrize("waits", [False, True])
def test_the_next_one_takes_over_from_a_running_one(
    tmp_path: Path, service: Callable[..., subprocess.Popen[str]], waits: bool
) -> None:
    first = service("--capacity", "64MiB", "--min-free", "0", *(["--wait"] if waits else []))
    line_with(first, "writes")
    second = service("--capacity", "32MiB", "--take-over")
    assert "32.0 MiB" in line_with(second, "writes")
    assert "is handed over" in line_with(first, str(tmp_path))
    if waits:
        line_with(first, "has a writer already")
        second.kill()
        assert "64.0 MiB" in line_with(first, "writes")
        first.terminate()
    assert first.wait(STOP_LIMIT_S) == ExitCode.OK
    second.terminate()
    second.wait(STOP_LIMIT_S)


def test_the_unit_gives_it_time_and_starts_it_before_the_engines() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "docs" / "deploy" / "systemd" / "kvcascade-store.service")
    *_, command = shlex.split(unit["Service"]["ExecStart"])
    words = shlex.split(command)
    assert Path(words[1]).name == "kvcascade"
    program = "import sys; print(sys.argv[1:])"
    here = command.replace(words[1], f"{sys.executable} -c {shlex.quote(program)}")
    done = subprocess.run(
        ["/bin/sh", "-c", here], env={"KV_PATH": "/a b"}, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(["store", "/a b", "--wait"])
    assert int(unit["Service"]["TimeoutStopSec"]) > STOP_LIMIT_S
    assert unit["Unit"]["Before"] == "vllm.service"
