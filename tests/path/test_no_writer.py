"""Engines that cannot be the writer of a path: without sockets, without the policy, as others."""

from __future__ import annotations

import errno
import gc
import os
import selectors
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from support.path_engine import PathEngine
from support.users import unprivileged

from kvcascade.errors import ConfigError, TierIOError
from kvcascade.handlers.node.path.path_service import IO_THREADS, WriterService
from kvcascade.handlers.node.path_wire import NodeState
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.namespace import namespaces_under, remove_namespace
from kvcascade.tiers.nvme.path.path_lock import lock_path, try_lead
from kvcascade.tiers.nvme.path.path_messages import PathOptions
from kvcascade.tiers.nvme.path.writer.path_options import PATH_FILE, PATH_FOLDER

OPTIONS = PathOptions(capacity_bytes=64 << 20, segment_bytes=1 << 20)
MISSING = msgspec.structs.replace(OPTIONS, policy="no_such_module:Order")
OK = BlockOutcome.OK


class NoSockets(socket.socket):
    """A socket on a file system that keeps none."""

    def bind(self, address: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.fixture
def started(caplog: pytest.LogCaptureFixture) -> Iterator[list[PathEngine]]:
    engines: list[PathEngine] = []
    yield engines
    for engine in engines:
        engine.close()


def start(started: list[PathEngine], path: Path, options: PathOptions = OPTIONS) -> PathEngine:
    """An engine whose node is a thread, and need not join."""
    engine = PathEngine([path], options, name=f"engine {len(started)}", is_thread=True)
    started.append(engine)
    engine.keeper.start()
    return engine


def test_a_file_system_without_sockets_turns_the_tier_off(
    tmp_path: Path,
    started: list[PathEngine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(socket, "socket", NoSockets)
    engine = start(started, tmp_path)
    engine.until(lambda: engine.state is NodeState.OFF)
    assert caplog.text.count("has no sockets") == 1
    lock = try_lead(RealFileSystem(), tmp_path)
    assert lock is not None, "it holds no lock"
    lock.release()


def test_an_engine_without_its_policy_follows_and_says_so_once(
    tmp_path: Path, started: list[PathEngine], caplog: pytest.LogCaptureFixture
) -> None:
    follower = start(started, tmp_path, MISSING)
    follower.until(lambda: "cannot write the path, others can" in caplog.text)
    assert follower.state is NodeState.JOINING and not (tmp_path / PATH_FOLDER).exists()
    leader = start(started, tmp_path)
    leader.until(lambda: leader.tier.takes_puts)
    follower.until(lambda: follower.tier.takes_puts)
    assert (leader.state, follower.state) == (NodeState.LEADING, NodeState.FOLLOWING)
    follower.store(range(4))
    assert list(leader.get(range(4))) == [OK] * 4
    assert caplog.text.count("cannot write the path, others can") == 1


def test_a_lock_that_is_held_elsewhere_is_no_second_writer(
    tmp_path: Path,
    started: list[PathEngine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("kvcascade.handlers.node.path.path_node.NOBODY_LIMIT_S", 0.2)
    elsewhere = try_lead(RealFileSystem(), tmp_path)
    assert elsewhere is not None
    engine = start(started, tmp_path)
    engine.until(lambda: "which may be on another host" in caplog.text)
    assert engine.state is NodeState.JOINING and not engine.tier.takes_puts
    assert sorted(os.listdir(tmp_path / PATH_FOLDER)) == ["writer.lock"]
    elsewhere.release()
    engine.until(lambda: engine.tier.takes_puts)
    assert caplog.text.count("which may be on another host") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_engines_of_another_user_are_refused_with_the_remedy() -> None:
    with TemporaryDirectory() as text:
        path = Path(text)
        path.chmod(0o755)
        with unprivileged(), pytest.raises(ConfigError, match="as one user"):
            try_lead(RealFileSystem(), path)
        with unprivileged(), pytest.raises(TierIOError, match="as the user of the engines"):
            lock_path(RealFileSystem(), path)
        lock = try_lead(RealFileSystem(), path)
        assert lock is not None
        with unprivileged(), pytest.raises(ConfigError, match="as one user"):
            try_lead(RealFileSystem(), path)
        assert lock.is_in_place()
        lock.release()


@pytest.mark.parametrize("fault", ["socket", "record"])
def test_a_writer_that_cannot_start_leaves_nothing_open(tmp_path: Path, fault: str) -> None:
    fs = RealFileSystem()
    lock = try_lead(fs, tmp_path)
    assert lock is not None
    lock.release()
    name = "writer.sock" if fault == "socket" else PATH_FILE
    (tmp_path / PATH_FOLDER / name).mkdir()
    before = None
    for _ in range(4):
        lock = try_lead(fs, tmp_path)
        assert lock is not None, "the lock was released"
        with pytest.raises(TierIOError):
            WriterService(fs, [tmp_path], OPTIONS, lock)
        gc.collect()  # the error holds the frames of the attempt
        now = len(os.listdir("/proc/self/fd"))
        assert before is None or now <= before
        before = now


@pytest.mark.parametrize("threads", [None, *range(IO_THREADS + 1)])
def test_a_writer_without_a_thread_or_files_lets_others_lead(
    tmp_path: Path, started: list[PathEngine], monkeypatch: pytest.MonkeyPatch, threads: int | None
) -> None:
    """`threads` may be started; None: all of them, but a file cannot be opened."""
    start(started, tmp_path).until(lambda: started[0].tier.takes_puts)
    started.pop().close()
    fs = RealFileSystem()

    begin, left = threading.Thread.start, 0

    def limited(thread: threading.Thread) -> None:
        nonlocal left
        if not left:
            raise RuntimeError("can't start new thread")
        left -= 1
        begin(thread)

    def no_file() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    for _ in range(2):
        lock = try_lead(fs, tmp_path)
        assert lock is not None, "the lock was released"
        with monkeypatch.context() as patched, pytest.raises(TierIOError, match="raise the limit"):
            if threads is not None:
                left = threads
                patched.setattr(threading.Thread, "start", limited)
            else:
                patched.setattr(selectors, "DefaultSelector", no_file)
            WriterService(fs, [tmp_path], OPTIONS, lock)
    (namespace,) = namespaces_under(fs, tmp_path)
    assert remove_namespace(fs, namespace.path), "no lock of an idle namespace is left"
