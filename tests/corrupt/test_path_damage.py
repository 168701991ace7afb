"""Every file of a path x every kind of damage, while closed and while engines run.

Outcome: fewer blocks, named by a counter or a line in the log; or one sentence that says what to
do. Never wrong bytes (`PathEngine.get` compares), never an exception, never a wait without an end.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import msgspec
import pytest
from support.keys import key
from support.path_engine import PathEngine
from support.users import NOBODY

from kvcascade.handlers.node.path import path_service
from kvcascade.handlers.node.path_wire import NodeState
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.path.path_messages import PathOptions
from kvcascade.tiers.nvme.path.presence_table import hash_of
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of

BLOCK, SLOTS, PER_SEGMENT = 4096, 32, 8
OPTIONS = PathOptions(capacity_of(4, PER_SEGMENT, BLOCK), segment_bytes=PER_SEGMENT * BLOCK)
BLOCKS, OTHERS = range(SLOTS), range(5000, 5000 + SLOTS - 3)
NEW = range(9000, 9008)
OK = BlockOutcome.OK
HEADER = PAGE = 4096
VICTIM = 3
"""Block whose cell, checksum and entry are damaged."""
UNEXPECTED = ("should not", "Traceback")
"""Words of log lines about errors that nobody foresaw."""

Offset = int | Callable[[bytes], int]


def cell(data: bytes) -> int:
    """Offset of the cell of a block in the presence table."""
    tag = hash_of(key(VICTIM)) >> 32
    return next(
        at
        for at in range(HEADER, len(data) - 8, 8)
        if data[at + 4 : at + 8] == tag.to_bytes(4, "little")
    )


def place(data: bytes) -> tuple[int, int]:
    """The slot of a block, and the number of slots of the table."""
    at = cell(data)
    return int.from_bytes(data[at : at + 4], "little") - 1, int.from_bytes(data[8:16], "little")


def checksum(data: bytes) -> int:
    """Offset of the checksum of a block in the presence table."""
    slot, slots = place(data)
    return len(data) - 12 * slots + 8 * slot


def home(data: bytes) -> int:
    """Offset of the low half of the hash of a block in the presence table."""
    slot, slots = place(data)
    return len(data) - 4 * slots + 4 * slot


LAYERS: dict[str, tuple[str, Offset]] = {
    "payload": ("NS/segments/000000.safetensors", HEADER + 5),
    "segment header": ("NS/segments/000000.safetensors", 12),
    "presence magic": ("NS/presence", 0),
    "presence slots": ("NS/presence", 8),
    "presence boot": ("NS/presence", 20),
    "presence epoch": ("NS/presence", 128),
    "presence commit": ("NS/presence", 136),
    "presence mark": ("NS/presence", 144),
    "presence tag": ("NS/presence", lambda data: cell(data) + 5),
    "presence slot": ("NS/presence", cell),
    "presence checksum": ("NS/presence", checksum),
    "presence home": ("NS/presence", home),
    "table head": ("NS/blocks/data.mdb", 16),
    "table key": ("NS/blocks/data.mdb", lambda data: data.index(key(VICTIM)) + 3),
    "table entry": ("NS/blocks/data.mdb", lambda data: data.index(key(VICTIM)) + len(key(VICTIM))),
    "table names": ("NS/blocks/data.mdb", lambda data: data.index(b"slots")),
    "table mark": ("NS/blocks/clean", 3),
    "description": ("NS/namespace.json", 30),
    "lock": ("NS/lock", 0),
    "recency stamps": ("NS/state/lru_stamp.arr", 80),
    "recency log": ("NS/state/lru_log.arr", 80),
    "recency ends": ("NS/state/lru_ends.arr", 70),
    "last uses": ("NS/state/use_last.arr", 70),
    "session": ("NS/state/session", 0),
    "record of the path": (".kvcascade/path.json", 40),
    "note of the writer": (".kvcascade/writer.json", 5),
    "lock of the path": (".kvcascade/writer.lock", 0),
    "socket": (".kvcascade/writer.sock", 0),
    "lock of older versions": (".kvcascade.lock", 0),
}
MUST_SERVE_ALL = ("recency", "last", "session", "note", "lock", "socket")
"""Beginnings of the layers on which no block depends."""

WHOLE_FILE = {"swap", "empty", "extend", "delete", "folder", "fifo", "link", "loop"}
WHOLE_FILE |= {"others may write", "another user's"}
"""Damages that no offset changes: one layer of each file has them."""
Damage = Callable[[Path, int, Path], object]


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(min(offset, max(0, path.stat().st_size - 1)))
        file.write(data)


def flip(path: Path, offset: int, twin: Path) -> None:
    data = path.read_bytes() or b"\0"  # locks are empty
    patch(path, offset, bytes([data[min(offset, len(data) - 1)] ^ 0x40]))


def noise(path: Path, offset: int, twin: Path) -> None:
    size = min(4096, max(1, path.stat().st_size - offset))
    patch(path, offset, random.Random(f"{path.name}{offset}").randbytes(size))


def replaced(make: Callable[[Path], object]) -> Damage:
    """Damage that leaves something else of the same name."""

    def damage(path: Path, offset: int, twin: Path) -> None:
        path.unlink()
        make(path)

    return damage


def linked(path: Path, offset: int, twin: Path) -> None:
    """A link to another tier's file, which must not change."""
    path.unlink()
    path.symlink_to(twin)


DAMAGES: dict[str, Damage] = {
    "flip": flip,
    "zero": lambda path, offset, twin: patch(
        path, offset, bytes(min(4096, max(1, path.stat().st_size - offset)))
    ),
    "noise": noise,
    "swap": lambda path, offset, twin: shutil.copyfile(twin, path),
    "cut": lambda path, offset, twin: os.truncate(path, offset),
    "empty": lambda path, offset, twin: os.truncate(path, 0),
    "extend": lambda path, offset, twin: os.truncate(path, path.stat().st_size + 9999),
    "delete": lambda path, offset, twin: path.unlink(),
    "folder": replaced(lambda path: (path / "x").mkdir(parents=True)),
    "fifo": replaced(os.mkfifo),
    "link": linked,
    "loop": replaced(lambda path: path.symlink_to(path)),
    "others may write": lambda path, offset, twin: path.chmod(0o666),
    "another user's": lambda path, offset, twin: os.chown(path, NOBODY, NOBODY),
}
NOT_OURS = {"folder", "fifo", "link", "loop", "others may write", "another user's"}
"""Damages after which a path is no file of this user's any more."""
REFUSED: dict[str, set[str]] = {
    "presence magic": NOT_OURS,
    "table head": NOT_OURS | {"flip", "zero", "noise", "cut", "empty"},
    "table key": {"cut"},
    "table entry": {"cut"},
    "table names": {"zero", "noise", "cut"},
    "description": NOT_OURS | {"flip", "zero", "noise", "cut", "empty", "extend"},
    "lock": NOT_OURS,
    "recency stamps": NOT_OURS,
    "recency log": NOT_OURS,
    "recency ends": NOT_OURS,
    "last uses": NOT_OURS,
    "session": NOT_OURS,
    "record of the path": NOT_OURS | {"zero", "noise", "cut", "empty", "extend"},
    "lock of the path": NOT_OURS,
    "socket": {"folder"},
}
"""Damages of each layer with which the tier does not come up, and says why. With all others it
serves."""
OF_NO_FILE = {"delete", "folder", "fifo", "link", "loop"}
"""Damages that can be done to a socket."""


def cases() -> Iterator[tuple[str, str, str]]:
    """Every layer, damage and state of the path that make sense."""
    seen: set[tuple[str, str]] = set()
    for layer, (name, _) in LAYERS.items():
        for how in DAMAGES:
            if how == "another user's" and os.geteuid() != 0:
                continue
            if (name, how) in seen and how in WHOLE_FILE:
                continue
            seen.add((name, how))
            if layer != "socket" or how in OF_NO_FILE:
                yield layer, how, "closed"
                if layer.startswith(("presence", "table")) and how not in WHOLE_FILE:
                    yield layer, how, "killed"


def engine_in(root: Path) -> PathEngine:
    """An engine that need not come up; its node is a thread."""
    return PathEngine([root], OPTIONS, is_thread=True, capacity=SLOTS)


def namespace_in(root: Path) -> Path:
    (found,) = (each.parent for each in root.glob("*/namespace.json"))
    return found


def fill(root: Path, blocks: range) -> Path:
    engine = engine_in(root).open()
    for first in range(blocks.start, blocks.stop, 16):
        engine.store(range(first, min(first + 16, blocks.stop)))
    engine.close()
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed path that is full."""
    return fill(tmp_path_factory.mktemp("cache"), BLOCKS)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same path as a kill of the writer leaves it."""
    root = tmp_path_factory.mktemp("killed")
    engine = engine_in(root).open()
    for first in (0, 16):
        engine.store(range(first, first + 16))
    copy = tmp_path_factory.mktemp("copies") / "killed"
    shutil.copytree(root, copy, copy_function=copy_plain, ignore=sockets)
    engine.close()
    return copy


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path with other blocks: its files are valid, and not these."""
    return fill(tmp_path_factory.mktemp("other"), OTHERS)


def copy_plain(source: str, target: str) -> None:
    shutil.copyfile(source, target)
    os.chmod(target, 0o600)


def sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".sock")]


def copied(root: Path, tmp_path: Path) -> Path:
    """A copy of a path, whose record names it, with a socket that a dead writer left."""
    target = tmp_path / "tier"
    shutil.copytree(root, target, ignore=sockets)
    record = target / ".kvcascade" / "path.json"
    document = json.loads(record.read_text())
    record.write_text(json.dumps({**document, "paths": [str(target)]}))
    with socket.socket(socket.AF_UNIX) as left:
        fd = os.open(target / ".kvcascade", os.O_PATH)
        left.bind(f"/proc/self/fd/{fd}/writer.sock")
        os.close(fd)
    return target


def told(log: pytest.LogCaptureFixture, root: Path) -> list[str]:
    """Lines of the node about the path; that a slow disk still opens it is none of them."""
    lines = [r.getMessage() for r in log.records if r.name.endswith("node_feed")]
    return [line for line in lines if str(root) in line]


def comes_up(engine: PathEngine, root: Path, log: pytest.LogCaptureFixture) -> bool:
    """Wait until the tier works, is off, or its node has said why it waits."""
    engine.keeper.start()

    def is_known() -> bool:
        is_up = engine.tier.takes_puts or engine.state is NodeState.OFF
        return is_up or bool(told(log, root))

    engine.until(is_known)
    return engine.tier.takes_puts


def survivors(root: Path, log: pytest.LogCaptureFixture) -> tuple[int, int] | None:
    """Number of blocks served, each one right, and of those that did not match.

    None if the tier did not come up. What was served is served after a restart, and what did
    not match can be stored again.
    """
    engine = engine_in(root)
    try:
        if not comes_up(engine, root, log):
            return None
        outcomes = {n: engine.get([n])[0] for n in BLOCKS}
        served = [n for n, outcome in outcomes.items() if outcome is OK]
        foreign = engine.get(OTHERS)  # what a foreign file may name
        corrupt = [*outcomes.values(), *foreign].count(BlockOutcome.CORRUPT)
    finally:
        engine.close()
    engine = engine_in(root).open()
    try:
        assert [n for n in BLOCKS if engine.get([n])[0] is OK] == served
        lost = [n for n in BLOCKS if outcomes[n] is BlockOutcome.CORRUPT] or list(NEW)
        for start in range(0, len(lost), 8):
            some = lost[start : start + 8]
            engine.store(some)
            assert list(engine.get(some)) == [OK] * len(some)
    finally:
        engine.close()
    return len(served), corrupt


def check_log(log: pytest.LogCaptureFixture) -> None:
    """Nothing unforeseen happened, and every line is one sentence."""
    assert not any(word in log.text for word in UNEXPECTED), log.text
    assert not any(record.exc_info for record in log.records), log.text
    assert not any("\n" in record.getMessage() for record in log.records), log.text


def refusal_in(log: pytest.LogCaptureFixture, root: Path) -> str:
    """The sentence that says why the tier did not come up."""
    (line,) = told(log, root)
    return line


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """The log, in which a node soon says why it waits."""
    monkeypatch.setattr("kvcascade.handlers.node.path.path_node.NOBODY_LIMIT_S", 0.3)
    return caplog


@pytest.mark.parametrize(("layer", "how", "state"), list(cases()))
def test_damage(
    layer: str,
    how: str,
    state: str,
    cache: Path,
    killed: Path,
    other: Path,
    tmp_path: Path,
    log: pytest.LogCaptureFixture,
) -> None:
    root = copied(cache if state == "closed" else killed, tmp_path)
    twin = copied(other, tmp_path / "twin") if how == "link" else other
    name, offset = LAYERS[layer]
    path, source = (each / name.replace("NS", namespace_in(each).name) for each in (root, twin))
    if not path.exists() and not path.is_socket():
        pytest.skip("a kill leaves no such file")
    before = source.read_bytes() if how == "link" and source.is_file() else b""
    if not isinstance(offset, int):
        offset = offset(path.read_bytes())
    DAMAGES[how](path, offset, source)
    log.clear()
    found = survivors(root, log)
    check_log(log)
    if before:
        assert source.read_bytes() == before, "nothing is written through a link"
    is_refused = how in REFUSED.get(layer, ())
    if found is None:
        reason = refusal_in(log, root)
        assert is_refused, reason
        return
    assert not is_refused, "it came up"
    served, corrupt = found
    if served < SLOTS and (layer.split()[0], state) != ("presence", "killed"):
        # After a kill this boot trusts the presence table: what it lacks is a miss.
        assert corrupt or log.records, "nothing is lost without a word"
    if layer.startswith("presence") and state == "closed":
        assert served == SLOTS, "the mark of the close finds the damage, and the table is rebuilt"
    if name.startswith("NS/segments"):
        assert served >= SLOTS - PER_SEGMENT, "the rest is served"
    elif layer.startswith(MUST_SERVE_ALL):
        assert served == SLOTS, "no block depends on it"


# -- while engines run -------------------------------------------------------------------------

RUNNING: dict[str, Callable[[Path, Path], object]] = {
    "a segment is gone": lambda root, ns: (ns / "segments" / "000000.safetensors").unlink(),
    "all segments are gone": lambda root, ns: shutil.rmtree(ns / "segments"),
    "a segment is cut": lambda root, ns: os.truncate(ns / "segments" / "000001.safetensors", 5000),
    "payload is noise": lambda root, ns: noise(ns / "segments" / "000000.safetensors", HEADER, ns),
    "segments are swapped": lambda root, ns: swapped(
        ns / "segments" / "000000.safetensors", ns / "segments" / "000001.safetensors"
    ),
    "cells are noise": lambda root, ns: noise(ns / "presence", HEADER, ns),
    "the presence table is zero": lambda root, ns: patch(
        ns / "presence", HEADER, bytes((ns / "presence").stat().st_size - HEADER)
    ),
    "the epoch is another": lambda root, ns: patch(ns / "presence", 128, b"\7"),
    "the presence table is gone": lambda root, ns: (ns / "presence").unlink(),
    "the index is gone": lambda root, ns: shutil.rmtree(ns / "blocks"),
    "the state is gone": lambda root, ns: shutil.rmtree(ns / "state"),
    "the description is gone": lambda root, ns: (ns / "namespace.json").unlink(),
    "the namespace is gone": lambda root, ns: shutil.rmtree(ns),
    "the record is gone": lambda root, ns: (root / ".kvcascade" / "path.json").unlink(),
    "the socket is gone": lambda root, ns: (root / ".kvcascade" / "writer.sock").unlink(),
    "the lock is gone": lambda root, ns: (root / ".kvcascade" / "writer.lock").unlink(),
    "the folder of the path is gone": lambda root, ns: shutil.rmtree(root / ".kvcascade"),
}

UNREAD = {
    "the index is gone",
    "the state is gone",
    "the description is gone",
    "the record is gone",
    "the socket is gone",
    "the lock is gone",
    "the folder of the path is gone",
}
"""Damages of files that no read needs while engines run."""
MISSES = {OK, BlockOutcome.GONE, BlockOutcome.CORRUPT}
"""Outcomes of reads beside damages; `PathEngine.get` compares what is OK."""


def swapped(one: Path, two: Path) -> None:
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


@pytest.mark.parametrize("what", RUNNING)
def test_damage_while_engines_run(
    what: str,
    tmp_path: Path,
    log: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node of the writer is a process, that of the follower a thread of this one."""
    monkeypatch.setattr("kvcascade.handlers.node.path.path_service.PLACE_CHECK_INTERVAL_S", 0.1)
    root = tmp_path / "tier"
    root.mkdir()
    writer = PathEngine([root], OPTIONS, capacity=SLOTS, stall_s=5.0)
    reader = engine_in(root)
    try:
        for engine in (writer, reader):
            engine.open()
        for first in (0, 16):
            writer.store(range(first, first + 16))
        RUNNING[what](root, namespace_in(root))
        found = {engine.get([n])[0] for engine in (writer, reader) for n in BLOCKS}
        assert found == {OK} if what in UNREAD else found <= MISSES
        for _ in range(2):
            for engine in (writer, reader):
                engine.put(range(7000, 7008))
                engine.tier.maintain()
                for some in (range(16), range(16, 32), range(7000, 7008)):
                    assert set(engine.get(some)) <= MISSES
        writer.kill()
        reader.until(lambda: reader.state is not NodeState.FOLLOWING)
        pause_s = monotonic() + 1.0
        reader.until(lambda: reader.tier.takes_puts or monotonic() > pause_s)
        assert set(reader.get(range(16))) <= MISSES
    finally:
        reader.close()
        writer.close()
    check_log(log)
    again = engine_in(root)  # and the next engine comes up, or says why not
    try:
        if comes_up(again, root, log):
            assert set(again.get(range(16))) <= MISSES
            again.store(NEW)
            assert list(again.get(NEW)) == [OK] * len(NEW)
    finally:
        again.close()
    check_log(log)
    said = capfd.readouterr().err  # of the process, too
    assert not any(word in said for word in UNEXPECTED), said


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("boot", ["same", "other", "unknown"])
def test_an_index_that_a_loss_of_power_tore_begins_empty_where_no_power_was_promised(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    boot: str,
    durability: str,
) -> None:
    path, torn = tmp_path / "tier", tmp_path / "torn"
    path.mkdir()
    change = {"durability": durability, "write_budget_bytes": 1 << 30}  # the start reads its use
    options = msgspec.structs.replace(OPTIONS, **change)
    engine = PathEngine([path], options, is_thread=True).open()
    engine.store(BLOCKS)
    shutil.copytree(path, torn, ignore=shutil.ignore_patterns("*.sock"))
    engine.close()
    (index,) = torn.glob("*/blocks/data.mdb")
    data = index.read_bytes()
    index.write_bytes(data[: 2 * PAGE] + bytes(16 * PAGE) + data[18 * PAGE :])
    if boot != "same":
        monkeypatch.setattr(path_service, "boot_id", lambda: boot.encode() * (boot != "unknown"))
    again = PathEngine([torn], options, is_thread=True)
    again.keeper.start()
    again.until(lambda: bool(again.refusals) or again.tier.takes_puts)
    if boot == "other" and durability == "process":
        assert not again.refusals and "begins empty" in caplog.text
        assert not again.holds(BLOCKS)
        again.store(NEW)
        assert set(again.get(NEW)) == {OK}
    else:
        assert "damaged" in again.refusals[0] and not any(index.read_bytes()[2 * PAGE :][:PAGE])
    again.close()
