"""`kvcascade.open`: blocks in a path of one's own, beside engines, and in an engine's namespace."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, cast

import msgspec
import numpy as np
import psutil
import pytest
import torch
from support.clock import ManualClock
from support.forks import idle_fork, said_by_fork
from support.keys import key
from support.path_engine import WAIT_S, PathEngine
from support.waiting import wait_until

import kvcascade
from kvcascade.block_buffers import checked_keys
from kvcascade.block_cache import ENDING as SAID_AT_THE_END
from kvcascade.config.machine import Disk, Machine
from kvcascade.errors import ClosedError, ConfigError, FormatError, InUseError, NoSpaceError
from kvcascade.handlers.node.node_keeper import LISTEN_GAP_S, WAIT_SLICE_S
from kvcascade.handlers.node.path.path_client import node_thread
from kvcascade.handlers.node.path.path_io import IOThreads
from kvcascade.handlers.node.path_wire import NodeJoined
from kvcascade.tiers.nvme.disk.filesystem import RealFile, RealFileSystem
from kvcascade.tiers.nvme.path.path_lock import PathDoor, try_lead
from kvcascade.tiers.nvme.path.path_messages import PathOptions, Removed, Stored, TierFigures
from kvcascade.tiers.nvme.path.writer.path_options import load_record, save_record
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of
from kvcascade.tools.commands.path_session import open_session

BLOCK = 4096
SMALL: dict[str, Any] = {"capacity": "64MiB", "min_free": 0}
"""Options of a path that fits a machine with a full disk."""
NEGATED = torch._neg_view(torch.zeros(1024))  # pyright: ignore[reportPrivateImportUsage]
STORED, HELD = kvcascade.PutOutcome.STORED, kvcascade.PutOutcome.HELD
PUTS_MAX = 20
Open = Callable[..., kvcascade.BlockCache]


def content(number: int, version: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng([number, version]).integers(0, 256, BLOCK, np.uint8)


def engine_at(path: Path, *, is_thread: bool = True) -> PathEngine:
    options = PathOptions(64 << 20, segment_bytes=8 * BLOCK, policy="sieve")
    return PathEngine([path], options, is_thread=is_thread).open()


def namespace_in(path: Path) -> str:
    (found,) = (one.name for one in path.iterdir() if (one / "namespace.json").exists())
    return found


@pytest.fixture
def open_cache(tmp_path: Path) -> Iterator[Open]:
    made: list[kvcascade.BlockCache] = []

    def start(path: Path = tmp_path / "kv", **options: Any) -> kvcascade.BlockCache:
        given = {"namespace": "mine", "buffer_size": 16 * BLOCK, **options}
        made.append(kvcascade.open(path, **given))
        return made[-1]

    yield start
    for cache in made:
        cache.close()


def new(open_cache: Open, **options: Any) -> kvcascade.BlockCache:
    """A cache in a new path."""
    return open_cache(block_bytes=BLOCK, **{**SMALL, "segment_size": 64 * BLOCK, **options})


def test_what_is_put_is_got_by_the_next_process(open_cache: Open) -> None:
    numbers = range(100)
    with new(open_cache) as cache:
        assert not any(cache.exists(map(key, numbers)))
        outcomes = cache.put([key(n) for n in numbers], [content(n) for n in numbers])
        assert outcomes == [STORED] * 100, "more than the buffer holds"
        assert cache.put([key(0), key(100), key(100)], [content(0)] * 3) == [HELD, STORED, HELD]
    again = open_cache()
    assert again.block_bytes == BLOCK and not again.is_read_only
    assert again.exists([key(0), key(99), key(101)]) == [True, True, False]
    found = again.get([key(n) for n in (*numbers, 101)])
    assert found[100] is None
    for number, block in zip(numbers, found, strict=False):
        assert block is not None and np.array_equal(block, content(number))
    assert again.put([], []) == [] and again.get([]) == []


def test_a_cache_that_was_moved_keeps_its_blocks(open_cache: Open, tmp_path: Path) -> None:
    with new(open_cache) as cache:
        assert cache.put([key(0)], [content(0)]) == [STORED]
    (tmp_path / "kv").rename(tmp_path / "moved")
    (found,) = open_cache(tmp_path / "moved").get([key(0)])
    assert found is not None and np.array_equal(found, content(0))


def test_buffers_of_every_kind(open_cache: Open) -> None:
    cache = new(open_cache)
    given = [
        content(0).view(np.float16).reshape(32, 64),
        torch.from_numpy(content(1)).view(torch.bfloat16).reshape(2, -1),
        bytes(content(2)),
        memoryview(content(3).tobytes()).cast("B", (64, 64)),
        torch.nn.Parameter(torch.from_numpy(content(4)[:].copy()).view(torch.float32)),
    ]
    keys = [key(n) for n in range(5)]
    assert cache.put(keys, given) == [STORED] * 5
    stacked = np.zeros((5, BLOCK), np.uint8)
    assert all(row is not None for row in cache.get(keys, list(stacked)))
    tensors = [torch.zeros(BLOCK // 2, dtype=torch.bfloat16) for _ in keys]
    assert [a is b for a, b in zip(cache.get(keys, tensors), tensors, strict=True)] == [True] * 5
    kept = bytearray(BLOCK)
    assert cache.get([key(9)], [kept]) == [None] and not any(kept)
    for number in range(5):
        assert np.array_equal(stacked[number], content(number))
        assert np.array_equal(tensors[number].view(torch.uint8).numpy(), content(number))


def test_keys_of_a_numpy_array(open_cache: Open) -> None:
    """Its elements are of a subclass of bytes, which messages cannot hold."""
    cache = new(open_cache)
    names = np.array([b"a", b"bb"])
    assert cache.put(names, [content(0), content(1)]) == [STORED] * 2
    assert cache.exists([b"a", b"bb"]) == [True, True] == cache.exists(names)
    for number, block in enumerate(cache.get(names)):
        assert block is not None and np.array_equal(block, content(number))
    cache.touch(names)
    assert [type(name) for name in checked_keys(names)] == [bytes] * 2


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda c: c.put(["text"], [bytes(BLOCK)]), "keys[0] is a str"),
        (lambda c: c.exists([b""]), "keys[0] is 0 bytes"),
        (lambda c: c.exists(cast(Any, None)), "keys is a NoneType"),
        (lambda c: c.put([b"a"], cast(Any, None)), "buffers is a NoneType"),
        (lambda c: c.put([b"a"], cast(Any, iter([bytes(BLOCK)]))), "buffers is a list_iterator"),
        (
            lambda c: c.put([b"a"], [np.zeros((1, 9), np.uint8).view(np.matrix)]),
            "buffers[0] has 9 bytes",
        ),
        (lambda c: c.get([bytes(65)]), "from 1 to 64"),
        (lambda c: c.put([b"a"], []), "0 buffers for 1 keys"),
        (lambda c: c.put([b"a"], [bytes(8)]), "buffers[0] has 8 bytes"),
        (lambda c: c.put([b"a"], [7]), "buffers[0] is a int"),
        (lambda c: c.put([b"a"], [np.zeros((BLOCK, 2), np.uint8)[:, 0]]), "not contiguous"),
        (lambda c: c.put([b"a"], [torch.zeros(64, 64, dtype=torch.uint8).T]), ".contiguous()"),
        (lambda c: c.put([b"a"], [torch.zeros(BLOCK, device="meta")]), "copy it to the CPU"),
        (lambda c: c.get([b"a"], [bytes(BLOCK)]), "read-only"),
        (lambda c: c.put([b"a"], [np.empty(512, object)]), "holds Python objects"),
        (lambda c: c.get([b"a"], [np.empty(64, [("n", int), ("o", object)])]), "Python objects"),
        (lambda c: c.put([b"a"], [torch.zeros(512, dtype=torch.complex64).conj()]), "resolve_conj"),
        (lambda c: c.get([b"a"], [NEGATED]), "resolve_neg"),
        (lambda c: c.put([b"a"], [torch.zeros(1024).to_sparse()]), "to_dense"),
    ],
)
def test_wrong_arguments_are_one_sentence(
    open_cache: Open, call: Callable[[kvcascade.BlockCache], object], named: str
) -> None:
    cache = new(open_cache)
    with pytest.raises(ConfigError) as caught:
        call(cache)
    assert named in str(caught.value)
    assert cache.exists([b"a"]) == [False]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"namespace": "mine"}, "open.block_bytes is missing"),
        ({"block_bytes": 1000}, "no multiple of 4096"),
        ({"block_bytes": "64KiB"}, "open.block_bytes"),
        ({"namespace": " ", "block_bytes": BLOCK}, "open.namespace"),
        ({"namespace": "llama-0123456789ab"}, "there are none"),
        ({"block_bytes": BLOCK, "capacity": "7 parsecs"}, "open.capacity"),
        ({"block_bytes": BLOCK, "policy": "lru2"}, "open.policy"),
        ({"block_bytes": BLOCK, "durability": "both"}, "open.durability"),
        ({"block_bytes": BLOCK, "io_threads": 0}, "open.io_threads"),
        ({"block_bytes": BLOCK, "timeout_s": 0}, "open.timeout_s"),
        ({"block_bytes": BLOCK, "buffer_size": "50%"}, "open.buffer_size"),
        ({"block_bytes": BLOCK, "capacity": 1 << 60}, "open.capacity"),
        ({"block_bytes": BLOCK, "path": []}, "open.path"),
        ({"block_bytes": BLOCK, "path": 7}, "open.path"),
        ({"block_bytes": BLOCK, "path": ""}, "open.path"),
    ],
)
def test_a_wrong_opening_is_one_sentence_and_leaves_nothing(
    open_cache: Open, tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        open_cache(**{**SMALL, **options})
    assert named in str(caught.value)
    assert not (tmp_path / "kv").exists()


def test_a_path_that_cannot_be_joined_is_refused_with_the_reason(
    open_cache: Open, tmp_path: Path
) -> None:
    new(open_cache).close()
    lock = try_lead(RealFileSystem(), tmp_path / "kv")
    assert lock is not None

    def is_refused_with_it() -> bool:
        """A second may pass on a busy machine before the reason is found."""
        with pytest.raises(InUseError) as caught:
            open_cache(timeout_s=1.0)
        return "its lock is held; stop the process that holds it" in str(caught.value)

    wait_until(is_refused_with_it)
    lock.release()


def test_a_buffer_that_no_machine_has_is_no_space(open_cache: Open) -> None:
    with pytest.raises(NoSpaceError, match="buffer_size"):
        new(open_cache, buffer_size="4096TiB")


def test_another_block_size_is_refused(open_cache: Open) -> None:
    new(open_cache).close()
    with pytest.raises(ConfigError, match="4096 bytes, not 8192"):
        open_cache(block_bytes=2 * BLOCK)


def test_a_policy_that_cannot_be_imported_is_refused_unless_it_is_the_recorded_one(
    open_cache: Open, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"policy": "no_such_module:Order"}
    with pytest.raises(ConfigError, match="no_such_module"):
        new(open_cache, **asked)
    new(open_cache)
    with pytest.raises(ConfigError, match="no_such_module"):
        open_cache(**asked)
    fs, root = RealFileSystem(), tmp_path / "kv"
    record = load_record(fs, root)
    assert record is not None
    options = msgspec.structs.replace(record.options, policy=asked["policy"])
    save_record(fs, root, msgspec.structs.replace(record, options=options))
    open_cache(**asked)


def test_options_that_are_not_given_stay_as_recorded(open_cache: Open, tmp_path: Path) -> None:
    new(open_cache, policy="s3fifo").close()
    fs, root = RealFileSystem(), tmp_path / "kv"
    before = load_record(fs, root)
    assert before is not None and before.options.policy == "s3fifo"
    open_cache().close()
    assert load_record(fs, root) == before
    open_cache(capacity="32MiB").close()
    after = load_record(fs, root)
    assert after is not None and after.options.capacity_bytes == 32 << 20
    assert after.options.policy == "s3fifo"


def test_what_is_recorded_must_fit_and_not_a_default(
    open_cache: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default reserve is more than this disk has free; the recorded one is 0."""
    monkeypatch.setattr(Machine, "disk", lambda *_: Disk(1, total=100 << 30, free=1 << 30))
    with pytest.raises(ConfigError, match="open.min_free"):
        open_cache(block_bytes=BLOCK)
    folders = [tmp_path / "a", tmp_path / "b"]
    new(open_cache, path=folders).close()
    open_cache(path=folders[0], capacity="128MiB", durability="power").close()
    with pytest.raises(ConfigError, match="open.capacity"):
        open_cache(path=folders[0], capacity="2GiB")
    open_cache(path=folders[0], min_free="1%").close()  # it has this capacity, and keeps more free


def test_the_other_folders_of_a_path_are_found(open_cache: Open, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    with new(open_cache, path=folders) as cache:
        cache.put([key(n) for n in range(200)], [content(n) for n in range(200)])
    assert list((tmp_path / "b").glob("*/segments/*"))
    again = open_cache(path=folders[0])
    assert again.exists([key(0), key(199)]) == [True, True]
    again.close()
    with pytest.raises(ConfigError, match=str(folders[1])):
        open_cache(path=[*folders, tmp_path / "c"])


@pytest.mark.parametrize("is_thread", [True, False], ids=["thread", "process"])
def test_an_engines_namespace_is_read_by_name(
    open_cache: Open, tmp_path: Path, is_thread: bool
) -> None:
    engine = engine_at(tmp_path, is_thread=is_thread)
    try:
        engine.store(range(8))
        cache = open_cache(tmp_path, namespace=namespace_in(tmp_path))
        assert cache.is_read_only and cache.block_bytes == engine.block_bytes
        assert cache.exists([key(0), key(8)]) == [True, False]
        blocks = cache.get([key(n) for n in range(9)])
        assert [block is not None for block in blocks] == [True] * 8 + [False]
        for number, block in enumerate(blocks[:8]):
            assert bytes(block) == engine.content(number)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="read only"):
            cache.put([key(9)], [content(9)])
        own = open_cache(tmp_path, block_bytes=BLOCK)
        assert own.put([key(0)], [content(0)]) == [STORED], "beside the engine, in its own"
        assert engine.holds(range(10)) == list(range(8))
    finally:
        engine.close()


def test_changes_by_others_do_not_pile_up_for_an_idle_cache(
    open_cache: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle cache receives nothing. Its node would end at `MAX_UNSENT_BYTES`."""
    heard: list[type] = []
    note = kvcascade.BlockCache._note

    def hear(cache: kvcascade.BlockCache, message: object) -> None:
        heard.append(type(message))
        note(cache, message)

    monkeypatch.setattr(kvcascade.BlockCache, "_note", hear)
    engine = engine_at(tmp_path)
    try:
        engine.store(range(8))
        cache = open_cache(tmp_path, namespace=namespace_in(tmp_path))
        with open_session(RealFileSystem(), tmp_path) as session:
            rows = session.ask("blocks", name=cache.name)["blocks"]
            assert session.ask("drop", name=cache.name, blocks=rows[:4]) == {"dropped": 4}
        engine.until(lambda: len(engine.tier.feed.lost) == 4)
        assert sum(block is not None for block in cache.get([key(n) for n in range(8)])) == 4
        assert NodeJoined in heard and not {Removed, Stored, TierFigures}.intersection(heard)
    finally:
        engine.close()


def test_a_closed_engines_namespace_is_read_and_nothing_recorded(
    open_cache: Open, tmp_path: Path
) -> None:
    engine = engine_at(tmp_path)
    engine.store(range(8))
    engine.close()
    before = load_record(RealFileSystem(), tmp_path)
    with open_cache(tmp_path, namespace=namespace_in(tmp_path)) as cache:
        assert all(block is not None for block in cache.get([key(n) for n in range(8)]))
    assert load_record(RealFileSystem(), tmp_path) == before


def test_a_reader_of_a_namespace_whose_engines_were_reset_is_warned_and_removes_nothing(
    open_cache: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_at(tmp_path)
    engine.tier.reset()
    engine.until(lambda: not engine.tier._resets_due)
    engine.store(range(4))
    name = namespace_in(tmp_path)

    def found(cache: kvcascade.BlockCache) -> int:
        return sum(block is not None for block in cache.get([key(n) for n in range(4)]))

    with open_cache(tmp_path, namespace=name) as cache:
        assert found(cache) == 4, "beside the engine"
    engine.close()
    for _ in range(2):
        caplog.clear()
        with open_cache(tmp_path, namespace=name) as cache:
            assert found(cache) == 4, "alone"
        assert "were reset" in caplog.text
    with open_cache(tmp_path, namespace=name) as cache:
        engine_at(tmp_path).close()
        assert found(cache) == 0, "an engine that starts beside a reader is alone"


def test_a_namespace_of_another_version_is_refused(open_cache: Open, tmp_path: Path) -> None:
    new(open_cache).close()
    root = tmp_path / "kv"
    file = root / namespace_in(root) / "namespace.json"
    file.write_text(file.read_text().replace('"format_version": 3', '"format_version": 2'))
    with pytest.raises(FormatError, match="version 2"):
        open_cache()


def test_a_closed_cache_keeps_no_memory_though_it_is_named(open_cache: Open) -> None:
    def resident_bytes() -> int:
        return int(psutil.Process().memory_info().rss)

    before = resident_bytes()
    cache = new(open_cache, buffer_size="128MiB")
    assert cache.put([key(0)], [content(0)]) == [STORED]
    assert resident_bytes() - before > 100 << 20
    cache.close()
    assert resident_bytes() - before < 64 << 20


def test_a_closed_cache_keeps_no_file_open_though_it_is_named(
    open_cache: Open, tmp_path: Path
) -> None:
    cache = new(open_cache)
    assert cache.put([key(0)], [content(0)]) == [STORED] and len(cache.get([key(0)])) == 1
    cache.close()
    files = [os.readlink(f.path) for f in os.scandir("/proc/self/fd") if os.path.lexists(f.path)]
    mapped = Path("/proc/self/maps").read_text()
    assert str(tmp_path) not in mapped + " ".join(files)


def test_the_next_one_writes_when_the_writer_leaves(open_cache: Open) -> None:
    first, second = new(open_cache), open_cache()
    assert first.put([key(0)], [content(0)]) == [STORED]
    assert second.exists([key(0)]) == [True]
    first.close()
    assert second.put([key(1)], [content(1)]) == [STORED]
    assert [block is not None for block in second.get([key(0), key(1)])] == [True, True]
    with pytest.raises(ClosedError):
        first.get([key(0)])


def test_a_forked_process_does_not_keep_a_closed_cache_open(
    open_cache: Open, tmp_path: Path
) -> None:
    """It has copies of all sockets and of the lock, and never looks at them."""
    first, second = new(open_cache), open_cache()
    put_all(first, range(1))
    with idle_fork():
        first.close()
        assert first._client.pid is None, "its node has ended"
        assert second.put([key(1)], [content(1)]) == [STORED], "it writes the path now"
    with idle_fork():
        second.close()
        door = PathDoor(tmp_path / "kv")
        assert door.connect() is None, "nobody listens"
        door.close()
        third = open_cache()
        assert third.exists([key(0), key(1)]) == [True, True]
        third.close()


def test_a_fork_is_refused_and_the_cache_of_its_parent_goes_on(open_cache: Open) -> None:
    """Its puts went to a copy of the arena, and the node wrote the parent's slots instead."""
    cache = new(open_cache)
    put_all(cache, range(1))
    calls: list[Callable[[], object]] = [
        lambda: cache.put([key(1)], [content(1)]),
        lambda: cache.get([key(0)]),
        lambda: cache.exists([key(0)]),
        lambda: cache.touch([key(0)]),
    ]
    for call in calls:
        said = said_by_fork(call)
        assert said.startswith("ClosedError") and "open it again in this process" in said
    assert cache.get([key(1)]) == [None]
    assert said_by_fork(cache.close) == "None"
    put_all(cache, range(1, 2))
    assert said_by_fork(lambda: open_cache().exists([key(0), key(1), key(2)])) == str(
        [True, True, False]
    )
    assert all(block is not None for block in cache.get([key(0), key(1)]))


PROGRAM = """
import sys, threading
import kvcascade
def opened():
    return kvcascade.open(sys.argv[1], namespace="mine")
cache = opened()
def go_on():
    threading.main_thread().join()
    for call in (lambda: cache.put([b"late"], [bytes(4096)]), lambda: cache.get([b"a"]), opened):
        try:
            print(call())
        except kvcascade.ClosedError as error:
            print(error)
threading.Thread(target=go_on).start()
assert cache.put([b"in time"], [bytes(4096)])[0].is_there
"""


def test_a_program_that_ends_closes_its_caches_and_later_calls_are_refused(
    open_cache: Open, tmp_path: Path
) -> None:
    """Threads for I/O end with the main thread: a call of another thread stored nothing."""
    new(open_cache).close()
    path = tmp_path / "kv"
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout.splitlines() == [SAID_AT_THE_END] * 3, done
    assert (done.returncode, done.stderr) == (0, "")
    assert (path / namespace_in(path) / "blocks" / "clean").exists()
    assert open_cache().exists([b"in time", b"late"]) == [True, False]


def put_all(cache: kvcascade.BlockCache, numbers: range) -> None:
    """Store blocks; a time limit of half a second may pass on a busy machine."""
    keys, blocks = [key(n) for n in numbers], [content(n) for n in numbers]
    for _ in range(PUTS_MAX):
        if all(outcome.is_there for outcome in cache.put(keys, blocks)):
            return
    raise AssertionError("the blocks were not stored")


def opened_soon(open_cache: Open, path: Path) -> kvcascade.BlockCache:
    """Open a cache with a time limit of half a second, once the machine is quick enough."""
    found: list[kvcascade.BlockCache] = []

    def is_open() -> bool:
        with suppress(InUseError):
            found.append(open_cache(path, block_bytes=BLOCK, timeout_s=0.5))
        return bool(found)

    wait_until(is_open)
    return found[0]


def test_a_stopped_writer_costs_the_time_limit_and_reads_go_on(
    open_cache: Open, tmp_path: Path
) -> None:
    engine = engine_at(tmp_path, is_thread=False)
    try:
        cache = opened_soon(open_cache, tmp_path)
        put_all(cache, range(1))
        engine.signal(signal.SIGSTOP)
        timed_out = kvcascade.PutOutcome.TIMED_OUT
        for number in range(1, 4):
            assert cache.put([key(number)], [content(number)]) == [timed_out]
        wait_until(lambda: cache.get([key(0)])[0] is not None)
        engine.signal(signal.SIGCONT)
        put_all(cache, range(4, 40))  # slots of late answers are used again
    finally:
        engine.signal(signal.SIGCONT)
        engine.close()


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("preadv", lambda cache: cache.get([key(0)])),
        ("pwritev", lambda cache: cache.put([key(1)], [content(1)])),
    ],
)
def test_a_disk_that_hangs_costs_the_blocks_and_the_cache_goes_on(
    open_cache: Open,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    call: Callable[[kvcascade.BlockCache], object],
) -> None:
    """Slots of a transfer that hangs are not free, although the node counts as silent."""
    clock, hangs, is_ending, answers = ManualClock(), Event(), Event(), Event()
    node_of = partial(node_thread, clock=clock)
    monkeypatch.setattr("kvcascade.block_cache.node_thread", node_of)
    cache = new(open_cache)
    put_all(cache, range(1))
    transfer, wait = getattr(RealFile, method), IOThreads.wait

    def hanging(*given: Any) -> int:
        hangs.set()
        assert answers.wait(WAIT_S)
        return int(transfer(*given))

    def waiting(io: IOThreads) -> None:
        is_ending.set()
        wait(io)

    monkeypatch.setattr(RealFile, method, hanging)
    monkeypatch.setattr(IOThreads, "wait", waiting)
    with ThreadPoolExecutor(1) as threads:
        called = threads.submit(call, cache)
        assert hangs.wait(WAIT_S)
        for _ in range(int(WAIT_S / WAIT_SLICE_S)):  # silence counts while the cache listens
            clock.advance(LISTEN_GAP_S)
            if is_ending.wait(WAIT_SLICE_S):
                break
        assert is_ending.is_set()
        cache.exists([key(0)])
        assert len(cache._moves._free) < cache._moves.slots, "its job has not ended"
        answers.set()
        assert called.result() in ([None], [kvcascade.PutOutcome.FAILED])
    put_all(cache, range(2))
    assert all(block is not None for block in cache.get([key(0), key(1)]))


def test_the_write_budget_is_an_outcome(open_cache: Open) -> None:
    cache = new(open_cache, write_budget=8 * BLOCK)
    assert cache.put([key(100)], [content(100)]) == [STORED]
    outcomes = cache.put([key(n) for n in range(11)], [content(n) for n in range(11)])
    assert outcomes.count(STORED) == 7
    assert outcomes.count(kvcascade.PutOutcome.OVER_BUDGET) == 4


def test_a_damaged_block_is_absent_from_then_on(open_cache: Open, tmp_path: Path) -> None:
    cache = new(open_cache)
    cache.put([key(n) for n in range(4)], [content(n) for n in range(4)])
    (segment,) = (tmp_path / "kv").glob("*/segments/*")
    data = segment.read_bytes()
    at = data.index(content(2).tobytes())
    with segment.open("r+b") as file:
        file.seek(at + 99)
        file.write(bytes([data[at + 99] ^ 1]))
    numbers = [0, 1, 3]
    found = cache.get([key(n) for n in range(4)])
    assert found[2] is None and all(found[n] is not None for n in numbers)
    assert cache.put([key(2)], [content(2)]) in ([STORED], [HELD])
    cache.close()
    again = open_cache()
    assert all(block is not None for block in again.get([key(n) for n in numbers]))


def test_threads_share_a_cache(open_cache: Open) -> None:
    cache = new(open_cache)

    def work(number: int) -> bool:
        names = [key(1000 * number + n) for n in range(50)]
        blocks = [content(1000 * number + n) for n in range(50)]
        assert cache.put(names, blocks) == [STORED] * 50
        found = cache.get(names)
        return all(
            a is not None and np.array_equal(a, b) for a, b in zip(found, blocks, strict=True)
        )

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_closing_waits_for_a_call_that_has_begun(
    open_cache: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = new(open_cache)
    begun, may_go_on = Event(), Event()
    submit = cache._client.submit

    def held(*job: Any) -> bool:
        begun.set()
        assert may_go_on.wait(WAIT_S)
        return submit(*job)

    monkeypatch.setattr(cache._client, "submit", held)
    numbers = range(100)  # more than one buffer holds
    with ThreadPoolExecutor(2) as threads:
        put = threads.submit(cache.put, [key(n) for n in numbers], [content(n) for n in numbers])
        assert begun.wait(WAIT_S)
        closed = threads.submit(cache.close)
        wait_until(lambda: cache._is_closed)
        with pytest.raises(ClosedError):
            cache.get([key(0)])
        may_go_on.set()
        assert put.result() == [STORED] * 100
        closed.result()
    assert open_cache().exists(map(key, numbers)) == [True] * 100


def test_a_call_that_closes_its_own_cache_is_not_waited_for(
    open_cache: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the handler of a signal does that interrupts a call."""
    cache = new(open_cache)

    def interrupted(*_: Any) -> bool:
        cache.close()
        return False

    monkeypatch.setattr(cache._client, "submit", interrupted)
    with pytest.raises(ClosedError, match="during the call"):
        cache.put([key(0)], [content(0)])


def test_against_a_dictionary(open_cache: Open) -> None:
    """A block may be absent, since the path evicts; wrong bytes never come."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    capacity = capacity_of(4, 8, BLOCK)
    first = new(open_cache, capacity=capacity, segment_size=8 * BLOCK)
    pair = [first, open_cache()]
    kept: dict[int, int] = {}
    hits = 0
    for turn in range(120):
        cache = rng.choice(pair)
        numbers = rng.sample(range(60), rng.randint(1, 20))
        if rng.random() < 0.5:
            blocks = [content(n, turn) for n in numbers]
            outcomes = cache.put([key(n) for n in numbers], blocks)
            assert set(outcomes) <= {STORED, HELD}
            kept.update(
                {n: turn for n, each in zip(numbers, outcomes, strict=True) if each is STORED}
            )
            continue
        for number, block in zip(numbers, cache.get([key(n) for n in numbers]), strict=True):
            if block is not None:
                hits += 1
                assert np.array_equal(block, content(number, kept[number]))
    assert hits > 100
