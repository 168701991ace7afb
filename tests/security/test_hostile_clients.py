"""Clients of a path that send garbage, or do not read: the writer goes on for the others."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from support.path_engine import PathEngine
from support.waiting import wait_until
from support.writer_twin import namespace_spec

from kvcascade.handlers.node.path import path_link
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.path.frames import frame
from kvcascade.tiers.nvme.path.path_lock import PathDoor
from kvcascade.tiers.nvme.path.path_messages import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Ask,
    Bad,
    Chain,
    Commit,
    Grant,
    Hello,
    ListKeys,
    PathOptions,
    Read,
    Release,
    Reset,
    Retire,
    Touch,
)
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of

BLOCK, PER_SEGMENT = 4096, 8
OPTIONS = PathOptions(capacity_of(8, PER_SEGMENT, BLOCK), segment_bytes=PER_SEGMENT * BLOCK)
OK = BlockOutcome.OK
SEED = random.SystemRandom().randrange(1 << 30)
CLIENTS, MESSAGES = 12, 200
WAIT_S = 20.0
Connect = Callable[[], socket.socket]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[PathEngine]:
    engine = PathEngine([tmp_path], OPTIONS, is_thread=True, capacity=64).open()
    engine.store(range(8))
    yield engine
    engine.close()


@pytest.fixture
def connect(tmp_path: Path, engine: PathEngine) -> Iterator[Connect]:
    made: list[socket.socket] = []
    door = PathDoor(tmp_path)

    def connect() -> socket.socket:
        """Connect; who asks as a newer version may end the writer, and another one follows."""

        def may_connect() -> bool:
            link = door.connect()
            made.extend([] if link is None else [link])
            return link is not None

        wait_until(may_connect)
        made[-1].settimeout(WAIT_S)
        return made[-1]

    yield connect
    door.close()
    for link in made:
        link.close()


def goes_on(engine: PathEngine, first: int, caplog: pytest.LogCaptureFixture) -> None:
    """The engine stores and reads, and the writer met nothing unforeseen."""
    engine.until(lambda: engine.tier.takes_puts)
    engine.put(range(first, first + 8))  # a reset may end these
    engine.store(range(first, first + 8))
    assert list(engine.get(range(first, first + 8))) == [OK] * 8
    assert "should not" not in caplog.text and not any(r.exc_info for r in caplog.records)


def send(link: socket.socket, data: bytes) -> bool:
    """Send all of it; False if the writer has closed the connection."""
    try:
        link.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def hello(path: Path) -> Hello:
    return Hello(PROTOCOL, "fuzz", (str(path),), namespace_spec(BLOCK), OPTIONS)


def drawn(rng: random.Random) -> msgspec.Struct:
    """A message that decodes, with contents that make no sense."""

    def numbers() -> bytes:
        return rng.randbytes(rng.choice((0, 1, 3, 4, 8, 12, 400)))

    def number() -> int:
        return rng.choice((0, 1, -1, 2**31, 2**63 - 1, -(2**63), rng.randrange(100)))

    keys = [
        rng.randbytes(rng.choice((0, 1, 36, 64, 65))) for _ in range(rng.choice((0, 1, 5, 300)))
    ]
    return rng.choice(
        [
            Grant(number(), keys),
            Commit(number(), number(), keys, numbers(), numbers()),
            Release(numbers(), rng.random() < 0.1),
            Bad(keys, numbers(), numbers()),
            Touch(keys, rng.random() < 0.5, rng.random() < 0.5),
            Read(number()),
            Ask(number(), rng.choice(("stat", "list", "take", "drop", "")), numbers()),
            Retire(rng.choice((0, PROTOCOL))),
            ListKeys(rng.randbytes(5), number()),
            Chain(numbers(), number(), number()),
        ]
    )


def garbled(data: bytes, rng: random.Random) -> bytes:
    """A frame with a few bytes changed, added or lost."""
    at = rng.randrange(len(data))
    kind = rng.randrange(4)
    if kind == 0:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
    if kind == 2:
        return data[:at] + data[at + 1 :]
    return rng.randbytes(len(data))


@pytest.mark.parametrize("is_garbled", [False, True])
def test_nonsense_of_clients_stops_nobody(
    engine: PathEngine,
    connect: Connect,
    tmp_path: Path,
    is_garbled: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    print("seed", SEED)
    for client in range(CLIENTS):
        rng = random.Random(f"{SEED}:{client}")
        link = connect()
        if client % 3:
            send(link, frame(hello(tmp_path)))
        for _ in range(MESSAGES):
            data = frame(drawn(rng))
            if not send(link, garbled(data, rng) if is_garbled and rng.random() < 0.1 else data):
                break
        link.close()
    goes_on(engine, 100, caplog)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", MAX_FRAME_BYTES + 1),
        struct.pack("<I", 2**32 - 1) + b"x" * 1000,
        struct.pack("<I", 100_000) + b"\x91" * 100_000,
        struct.pack("<I", 5) + b"\xdd\xff\xff\xff\xff",
        struct.pack("<I", 5) + b"\xc6\xff\xff\xff\xff",
        struct.pack("<I", 0),
        frame(Ask(1, "stat")).replace(b"stat", b"sta\xc4"),
    ],
    ids=["too long", "4 GiB", "deeply nested", "a huge list", "huge bytes", "empty", "no text"],
)
def test_a_frame_that_is_no_message_ends_its_connection(
    engine: PathEngine, connect: Connect, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    link = connect()
    send(link, data)
    try:
        assert link.recv(1) == b""
    except ConnectionResetError:
        pass
    goes_on(engine, 100, caplog)


def test_a_document_nested_without_end_is_answered(
    engine: PathEngine, connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link, nested = connect(), b"[" * 1_000_000
    send(link, frame(Ask(1, "stat", nested)))
    assert link.recv(1)
    spec = msgspec.structs.replace(namespace_spec(BLOCK), fields=nested)
    send(link, frame(msgspec.structs.replace(hello(tmp_path), namespace=spec)))
    goes_on(engine, 100, caplog)


def test_half_a_frame_costs_its_client_only(
    engine: PathEngine, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    links = [connect() for _ in range(4)]
    for link in links:
        send(link, struct.pack("<I", MAX_FRAME_BYTES) + b"x" * 100)
    goes_on(engine, 100, caplog)


def test_a_client_that_never_reads_is_cut_off(
    engine: PathEngine,
    connect: Connect,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(path_link, "MAX_UNSENT_BYTES", 1 << 20)
    link = connect()
    send(link, frame(hello(tmp_path)))
    question = frame(Ask(1, "stat")) * 64
    for _ in range(2000):
        send(link, question)
        if "does not read" in caplog.text:
            break
    else:
        raise AssertionError("the writer keeps answers without a limit")
    goes_on(engine, 100, caplog)
    while link.recv(1 << 20):
        """The writer sends what was on its way, and then ends the stream."""


def test_resets_of_another_client_hide_blocks_and_stop_nobody(
    engine: PathEngine, connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link = connect()
    send(link, frame(hello(tmp_path)) + b"".join(frame(Reset(n)) for n in range(1, 200)))
    link.close()
    engine.until(lambda: engine.tier.feed.epoch == 199)
    assert engine.holds(range(8)) == []
    goes_on(engine, 100, caplog)
