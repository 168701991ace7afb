"""Frames over sockets that do not block, and the writer of a path as a service."""

from __future__ import annotations

import selectors
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from enum import Enum, IntEnum
from hashlib import sha256
from pathlib import Path
from threading import Event

import msgspec
import pytest
from support.path_rig import BLOCK_BYTES, Message, PathRig, slots_in, uint64
from support.waiting import wait_until
from support.writer_twin import namespace_spec

from kvcascade.errors import InUseError
from kvcascade.handlers.node.path import path_link
from kvcascade.handlers.node.path.path_link import FrameSocket
from kvcascade.handlers.node.path.path_loop import NodeLoop
from kvcascade.handlers.node.path.path_service import ClientSockets, WriterService
from kvcascade.handlers.node.path_wire import NodeJoined, NodeSetup, from_node_process
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.path import path_messages
from kvcascade.tiers.nvme.path.frames import FrameReader, frame
from kvcascade.tiers.nvme.path.path_lock import LOCK_NAME, PathDoor, try_lead
from kvcascade.tiers.nvme.path.path_messages import (
    PROTOCOL,
    Commit,
    CommitDone,
    FromNode,
    Grant,
    Granted,
    Hello,
    KeysListed,
    ListKeys,
    NamespaceSpec,
    PathOptions,
    Removed,
    Reset,
    Retire,
    Touch,
    Welcome,
    from_writer,
)
from kvcascade.tiers.nvme.path.writer.namespace.namespace_writer import NamespaceWriter
from kvcascade.tiers.nvme.path.writer.path_options import PATH_FOLDER
from kvcascade.tools.commands.path_session import open_session

OPTIONS = PathOptions(capacity_bytes=64 << 20, segment_bytes=1 << 20)
WAIT_S = 20.0
DEEP = b"\xa2\x86\1\0\x93\x26\x90" + b"\x91" * 99_998 + b"\0"
"""A `Removed` with one more field, which is a list in thousands of lists."""
OLD = pytest.mark.skipif(sys.version_info >= (3, 14), reason="it can be read, and is left out")


class Pair:
    """A `FrameSocket` and the raw socket at its other end."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.theirs.settimeout(WAIT_S)
        self.selector = selectors.DefaultSelector()
        self.link = FrameSocket(ours, from_writer.decode, self.selector, lambda: None)

    def close(self) -> None:
        self.link.close()
        self.theirs.close()
        self.selector.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_messages_come_whole_however_they_were_cut(pair: Pair) -> None:
    data = b"".join(frame(Removed([bytes([i]) * i])) for i in range(1, 6))
    got: list[Removed] = []
    for at in range(0, len(data), 7):
        pair.theirs.sendall(data[at : at + 7])
        got += pair.link.receive()
    assert [len(message.keys[0]) for message in got] == [1, 2, 3, 4, 5]
    assert not pair.link.has_ended and list(pair.link.receive()) == []


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\x02\0\0\0\xc1\xc1", pytest.param(DEEP, id="deep", marks=OLD), b""],
)
def test_nonsense_and_the_end_break_a_link(pair: Pair, data: bytes) -> None:
    if data:
        pair.theirs.sendall(data)
    else:
        pair.theirs.close()
    assert list(pair.link.receive()) == [] and pair.link.has_ended
    pair.link.send(Removed([b"x"]))
    pair.link.flush()


def test_a_peer_that_does_not_read_blocks_nobody_and_is_dropped_in_the_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_link, "MAX_UNSENT_BYTES", 4 << 20)
    message = Removed([b"x" * 36] * 1000)
    sent = 0
    for _ in range(20):
        pair.link.send(message)
        pair.link.flush()
        sent += 1
    assert not pair.link.has_ended
    (key,) = pair.selector.get_map().values()
    assert key.events & selectors.EVENT_WRITE, "it is told when the peer reads again"
    reader, got = FrameReader(), 0
    while got < sent:
        got += sum(1 for _ in reader.feed(pair.theirs.recv(1 << 16)))
        pair.link.flush()
    for _ in range(200):
        pair.link.send(message)
        pair.link.flush()
    assert pair.link.has_ended and not pair.link.unsent


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[], WriterService]]:
    made: list[WriterService] = []

    def start() -> WriterService:
        fs = RealFileSystem()
        lock = try_lead(fs, tmp_path)
        assert lock is not None
        made.append(WriterService(fs, [tmp_path], OPTIONS, lock))
        return made[-1]

    yield start
    for service in made:
        assert service.stop(WAIT_S)


def say(connection: socket.socket, message: FromNode) -> None:
    connection.setblocking(True)
    connection.settimeout(WAIT_S)
    connection.sendall(frame(message))


def hello(path: Path) -> Hello:
    return Hello(PROTOCOL, "test", (str(path),), namespace_spec(4096), OPTIONS)


def first(connection: socket.socket) -> object:
    """The first message that comes; None at the end of the connection."""
    return first_of(connection, object)


def first_of(connection: socket.socket, kind: type[Message]) -> Message | None:
    """The first message of a kind that comes; None at the end of the connection."""
    reader = FrameReader()
    with suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            for message in map(from_writer.decode, reader.feed(data)):
                if isinstance(message, kind):
                    return message
    return None


def test_only_one_of_many_that_try_at_once_leads(tmp_path: Path) -> None:
    fs = RealFileSystem()
    with ThreadPoolExecutor(4) as threads:
        locks = list(threads.map(lambda _: try_lead(fs, tmp_path), range(16)))
    held = [lock for lock in locks if lock is not None]
    assert len(held) == 1
    held[0].release()


def test_a_service_welcomes_through_the_door_and_ends_cleanly(
    tmp_path: Path, serve: Callable[[], WriterService]
) -> None:
    service = serve()
    door = PathDoor(tmp_path)
    for connection in (service.connect(), door.connect()):
        assert connection is not None
        with connection:
            say(connection, hello(tmp_path))
            assert first_of(connection, Welcome)
    door.close()
    assert service.stop(WAIT_S)
    lock = try_lead(RealFileSystem(), tmp_path)
    assert lock is not None, "the lock was released"
    lock.release()


class ServedPath:
    """A path in memory whose writer serves real sockets, one round at a time."""

    def __init__(self, folder: Path) -> None:
        self.rig = PathRig()
        self._door = str(folder / "door")
        self._held = ExitStack()

    def __enter__(self) -> ServedPath:
        listener = self._held.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(self._door)
        listener.listen()
        self.clients = ClientSockets(listener, self.rig.writer)
        self._held.callback(self.clients.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def serve(self, rounds: int = 1) -> None:
        """Do what a `WriterService` does."""
        for _ in range(rounds):
            for receive in self.clients.wait(0.0):
                receive()
            self.clients.send(self.rig.writer.step())
            self.clients.flush()
            self.clients.drop_ended()

    def node(self, *, is_silent: bool = False) -> socket.socket:
        """Return the socket of a node that has said hello, unless it is silent."""
        end = self._held.enter_context(socket.socket(socket.AF_UNIX))
        end.settimeout(WAIT_S)
        end.connect(self._door)
        if not is_silent:
            spec = NamespaceSpec("m", b'{"model": "m"}', b"{}", BLOCK_BYTES)
            end.sendall(frame(Hello(PROTOCOL, "node", ("/path",), spec, self.rig.options)))
        return end

    @property
    def namespace(self) -> NamespaceWriter:
        """The only namespace."""
        (namespace,) = self.rig.writer.namespaces.values()
        return namespace


def test_the_end_of_a_node_is_seen_before_the_hello_of_its_engine_that_starts_again(
    tmp_path: Path,
) -> None:
    """The writer was stopped meanwhile. The engine has other weights than before its reset."""
    with ServedPath(tmp_path) as path:
        old = path.node()
        path.serve(2)
        old.sendall(frame(Reset(5)))
        path.serve()
        assert path.namespace.epoch == 1
        old.sendall(frame(Touch([b"key"])))
        old.close()
        path.node()
        path.serve(3)
        assert path.namespace.epoch == 2, "blocks since the reset are not for it"


@pytest.mark.parametrize("fault", ["does not read", "sends nonsense"])
def test_a_node_that_the_writer_gives_up_keeps_its_slots_until_it_hangs_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(path_link, "MAX_UNSENT_BYTES", 1 << 16)
    with ServedPath(tmp_path) as path:
        node, request = path.node(), Grant(1, [b"one", b"two"])
        path.serve(2)
        node.sendall(frame(request))
        path.serve(4)
        assert path.namespace.space.granted == 2
        if fault == "sends nonsense":
            node.sendall(b"\xff\xff\xff\xff")
        else:
            path.clients.send([(1, Removed([b"x" * 36] * 1000))] * 40)
        path.serve(2)
        node.sendall(frame(Grant(2, [b"three"])))  # it does not know yet
        while node.recv(1 << 16):
            """It reads what it was sent, and then the end."""
        path.serve(4)
        assert path.namespace.space.granted == 2, "it may still write"
        assert [client.name for client in path.rig.writer.clients] == ["node"]
        node.close()
        path.serve()
        assert path.namespace.space.granted == 0 and not path.rig.writer.clients


def test_a_stranger_that_sends_nonsense_is_dropped_at_once(tmp_path: Path) -> None:
    with ServedPath(tmp_path) as path:
        stranger = path.node(is_silent=True)
        path.serve(2)
        stranger.sendall(b"\xff\xff\xff\xff")
        path.serve()
        assert not path.rig.writer.clients and first(stranger) is None


def test_a_node_that_connects_to_a_writer_past_its_end_sees_the_end(
    tmp_path: Path, serve: Callable[[], WriterService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's thread lives a moment longer. The node of its process would wait for it."""
    service = serve()
    monkeypatch.setattr(ClientSockets, "_accept", lambda _: None)  # it ends before it accepts
    with service.connect() as before:
        assert service.stop(WAIT_S)
        before.settimeout(WAIT_S)
        assert first(before) is None
    with pytest.raises(InUseError):
        service.connect()


def test_a_newer_version_retires_a_service(
    tmp_path: Path, serve: Callable[[], WriterService]
) -> None:
    service = serve()
    with service.connect() as one, service.connect() as two:
        say(one, hello(tmp_path))
        assert first_of(one, Welcome)
        say(two, Retire(PROTOCOL + 1))
        while first(one) is not None:
            """Figures may come before the end."""
    assert service.stop(WAIT_S) and service.was_retired


def test_a_service_whose_folder_was_replaced_stops_and_is_no_second_writer(
    tmp_path: Path, serve: Callable[[], WriterService]
) -> None:
    service = serve()
    with service.connect() as connection:
        say(connection, hello(tmp_path))
        (tmp_path / ".kvcascade").rename(tmp_path / "elsewhere")
        while first(connection) is not None:
            """It goes on until it looks."""
    wait_until(lambda: not service.is_alive)
    assert not (tmp_path / ".kvcascade").exists()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_writer_whose_lock_was_deleted_during_a_pause_writes_nothing(
    tmp_path: Path,
    serve: Callable[[], WriterService],
    monkeypatch: pytest.MonkeyPatch,
    is_stopped: bool,
) -> None:
    """Another process may lead meanwhile. The pause is one of the process, as by SIGSTOP."""
    wait, is_paused, goes_on, pauses = ClientSockets.wait, Event(), Event(), Event()

    def paused(clients: ClientSockets, limit_s: float | None) -> list[Callable[[], None]]:
        arrived = wait(clients, limit_s)
        if arrived and pauses.is_set():
            is_paused.set()
            assert goes_on.wait(WAIT_S)
        return arrived

    monkeypatch.setattr(ClientSockets, "wait", paused)
    service, keys = serve(), [b"one", b"two"]
    with service.connect() as connection:
        say(connection, hello(tmp_path))
        assert first_of(connection, Welcome)
        say(connection, Grant(1, keys))
        granted = first_of(connection, Granted)
        assert granted is not None and slots_in(granted) == [0, 1]
        pauses.set()
        say(connection, Commit(2, granted.epoch, keys, granted.slots, uint64([7, 7])))
        assert is_paused.wait(WAIT_S)
        (tmp_path / PATH_FOLDER / LOCK_NAME).unlink()
        lock = try_lead(RealFileSystem(), tmp_path)
        assert lock is not None
        if is_stopped:
            assert not service.stop(0.0)
        goes_on.set()
        assert first_of(connection, CommitDone) is None, "it ends without an answer"
    lock.release()
    wait_until(lambda: not service.is_alive)
    assert not list(tmp_path.glob("*/blocks/clean"))
    pauses.clear()
    with serve().connect() as connection:
        say(connection, hello(tmp_path))
        assert first_of(connection, Welcome)
        say(connection, ListKeys(b"", 16))
        assert first_of(connection, KeysListed) == KeysListed(b"", [])


@pytest.mark.parametrize("is_thread", [True, False])
def test_only_a_node_without_running_writes_hangs_up(
    tmp_path: Path, serve: Callable[[], WriterService], is_thread: bool
) -> None:
    """The end of a connection frees its grants. The writes of a process end with it."""
    service = serve()
    ours, theirs = socket.socketpair()
    setup = NodeSetup(hello(tmp_path), 0, 1, 1)
    loop = NodeLoop(theirs, setup, memoryview(bytearray(4096)), RealFileSystem())
    with ThreadPoolExecutor(1) as threads, ours:
        running = threads.submit(loop.run, waits_for_io=is_thread)
        reader, heard = FrameReader(), list[object]()
        ours.settimeout(WAIT_S)
        while not any(isinstance(message, NodeJoined) for message in heard):
            heard += map(from_node_process.decode, reader.feed(ours.recv(1 << 16)))
        ours.shutdown(socket.SHUT_RDWR)
        running.result(WAIT_S)
    with open_session(RealFileSystem(), tmp_path) as session:
        (namespace,) = session.ask("list")["namespaces"]
    assert namespace["clients"] == (0 if is_thread else 1)
    loop.hang_up()
    assert service.is_alive


def test_messages_of_another_shape_have_another_protocol() -> None:
    """Nodes of different versions meet: one that cannot read the other's messages must know why."""
    shapes: dict[str, list[object]] = {}
    kinds = [each for each in vars(path_messages).values() if isinstance(each, type)]
    for kind in kinds:
        if issubclass(kind, msgspec.Struct):
            config, optional = kind.__struct_config__, len(kind.__struct_defaults__)
            fields = [f"{name} {kind.__annotations__[name]}" for name in kind.__struct_fields__]
            shapes[kind.__name__] = [config.tag, config.array_like, optional, *fields]
        elif issubclass(kind, Enum) and kind is not Enum and kind is not IntEnum:
            shapes[kind.__name__] = [each.value for each in kind]
    digest = sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:16]
    known = {2: "878e32befe3690e9", 3: "da7ca6e2c69aa6cc"}
    assert digest == known.get(PROTOCOL), "raise PROTOCOL, and note the new digest"
