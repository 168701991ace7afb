"""Nodes as processes and threads on a real path: sharing, and faults of the writer."""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue

import msgspec
import pytest
from contract.below_contract import SLOTS, BelowContract, BelowRig
from support.path_engine import PathEngine

from kvcascade.handlers.node.path.path_jobs import PutJobs
from kvcascade.handlers.node.path.writer_search import Joined, WriterSearch
from kvcascade.handlers.node.path_wire import NodeState
from kvcascade.tiers.base import BlockOutcome
from kvcascade.tiers.nvme.disk.filesystem import RealFileSystem
from kvcascade.tiers.nvme.index.index_pages import ALWAYS_CHECKED_BYTES
from kvcascade.tiers.nvme.path.path_messages import Granted, PathOptions
from kvcascade.tiers.nvme.path.writer.path_options import PATH_FOLDER
from kvcascade.tiers.nvme.path.writer.path_plan import capacity_of
from kvcascade.tools.commands.path_files import load_note

BLOCK, PER_SEGMENT = 4096, 8
PAGE, META_PAGES, PAGE_HEAD_BYTES, BRANCH = 4096, 2, 16, 1
"""Numbers of LMDB's format."""
LARGE_SLOTS = 16_384
OK, GONE = BlockOutcome.OK, BlockOutcome.GONE
Engines = Callable[..., PathEngine]


def options_for(slots: int) -> PathOptions:
    """Options of a path with room for so many blocks."""
    capacity = capacity_of(slots // PER_SEGMENT, PER_SEGMENT, BLOCK)
    return PathOptions(capacity, segment_bytes=PER_SEGMENT * BLOCK)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    made: list[PathEngine] = []

    def start(*, is_thread: bool = False, slots: int = 64) -> PathEngine:
        name = f"engine {len(made)}"
        engine = PathEngine([tmp_path], options_for(slots), name=name, is_thread=is_thread)
        made.append(engine)
        return engine.open()

    yield start
    for engine in made:
        engine.close()


@pytest.mark.parametrize("is_thread", [True, False], ids=["threads", "processes"])
def test_two_engines_share_what_either_stores(engines: Engines, is_thread: bool) -> None:
    one, two = engines(is_thread=is_thread), engines(is_thread=is_thread)
    assert (one.state, two.state) == (NodeState.LEADING, NodeState.FOLLOWING)
    one.store(range(4))
    two.store(range(4, 8))
    for engine in (one, two):
        assert engine.holds(range(10)) == list(range(8))
        assert list(engine.get(range(8))) == [OK] * 8


def test_cold_nodes_that_start_together_elect_one_writer(tmp_path: Path) -> None:
    pair = [PathEngine([tmp_path], options_for(64), name=f"engine {n}") for n in range(2)]
    try:
        for engine in pair:
            engine.keeper.start()
        for engine in pair:
            engine.until(lambda tier=engine.tier: tier.takes_puts)  # type: ignore[misc]
        states = [engine.state for engine in pair]
        assert sorted(state.value for state in states) == ["following", "leading"]
        note = load_note(RealFileSystem(), tmp_path)
        leader = pair[states.index(NodeState.LEADING)]
        assert note is not None and note.pid == leader.keeper.pid
        for number, engine in enumerate(pair):
            engine.store(range(4 * number, 4 * number + 4))
        assert [list(engine.get(range(8))) for engine in pair] == [[OK] * 8] * 2
    finally:
        for engine in pair:
            engine.close()


def test_no_process_but_the_writers_has_the_index_open(engines: Engines) -> None:
    """The index counts its readers by process numbers, which containers do not share."""

    def has_index(pid: int | None) -> bool:
        return "/blocks/data.mdb" in Path(f"/proc/{pid}/maps").read_text()

    one, two = engines(), engines()
    two.store(range(4))
    assert list(two.get(range(4))) == [OK] * 4
    pids = one.keeper.pid, two.keeper.pid, os.getpid()
    assert list(map(has_index, pids)) == [True, False, False]
    one.kill()
    two.until(lambda: two.state is NodeState.LEADING)
    assert list(map(has_index, pids[1:])) == [True, False]


def test_blocks_outlive_their_engines(engines: Engines) -> None:
    one = engines()
    one.store(range(6))
    one.tier.shutdown(0.0)
    one.keeper.close()
    two = engines()
    assert two.state is NodeState.LEADING
    assert list(two.get(range(7))) == [OK] * 6 + [GONE]


def test_the_writer_is_killed_and_the_others_go_on(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = engines(), engines()
    one.store(range(8))
    one.kill()
    assert list(two.get(range(8))) == [OK] * 8, "reads need no writer"
    # A successor may be elected during the reads, so nobody need see the node without a writer.
    two.until(lambda: two.state is not NodeState.FOLLOWING)
    two.until(lambda: two.tier.takes_puts)
    two.store(range(8, 12))
    one.until(lambda: one.state is NodeState.FOLLOWING or two.state is NodeState.FOLLOWING)
    one.until(lambda: one.tier.takes_puts)
    assert list(one.get(range(12))) == [OK] * 12
    assert {one.state, two.state} == {NodeState.LEADING, NodeState.FOLLOWING}
    writer = "this engine" if two.state is NodeState.LEADING else "another engine"
    (line,) = [record.getMessage() for record in caplog.records if "go on;" in record.getMessage()]
    assert line == f"tier nvme: writes go on; {writer} is the writer of the path"


def wait_until(engine: PathEngine, *, takes_puts: bool) -> None:
    """Wait until an engine may write, or at least has found the writer."""
    engine.until(
        lambda: engine.tier.takes_puts if takes_puts else engine.state is NodeState.FOLLOWING
    )


def test_writers_are_killed_under_load_and_no_block_is_wrong(engines: Engines) -> None:
    pair = [engines(), engines()]
    pair[0].store(range(16))
    stored = set(range(16))
    for round_number in range(3):
        leader = next(each for each in pair if each.state is NodeState.LEADING)
        other = next(each for each in pair if each is not leader)
        new = range(100 + 16 * round_number, 116 + 16 * round_number)
        leader.store(new)
        leader.kill()
        while other.state is not NodeState.LEADING:
            assert set(other.get(sorted(stored)[:16])) <= {OK, GONE}
            other.put(range(200, 204))
            other.tier.maintain()
        wait_until(other, takes_puts=True)
        stored |= set(other.holds(new))
        assert len(other.holds(new)) == 16, "what was acknowledged is there"
        assert list(other.get(list(new))) == [OK] * 16
        wait_until(leader, takes_puts=False)


@pytest.mark.parametrize("is_in_commit", [False, True])
def test_a_stopped_writer_rests_writes_and_goes_on(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, is_in_commit: bool
) -> None:
    one, two = engines(), engines(is_thread=True)
    one.store(range(4))
    granted = PutJobs.granted

    def stop() -> None:
        """Stop the writer; from then on silence counts soon."""
        one.signal(signal.SIGSTOP)
        monkeypatch.setattr("kvcascade.handlers.node.path.path_node.SILENCE_LIMIT_S", 0.3)

    def stop_then_write(jobs: PutJobs, message: Granted) -> None:
        stop()
        granted(jobs, message)

    if is_in_commit:  # the writer granted a slot, and the block is written while it is stopped
        monkeypatch.setattr(PutJobs, "granted", stop_then_write)
    else:
        stop()
    try:
        assert list(two.put([9])) == [BlockOutcome.CANCELLED]
        two.until(lambda: two.state is NodeState.SILENT)
        assert not two.tier.takes_puts
        assert list(two.get(range(4))) == [OK] * 4
    finally:
        monkeypatch.setattr(PutJobs, "granted", granted)
        one.signal(signal.SIGCONT)
    two.until(lambda: two.tier.takes_puts)
    two.store([10])
    assert two.holds([9]) == [9] * is_in_commit, "the writer takes in what it was sent"
    assert list(two.get([9, 10])) == [OK if is_in_commit else GONE, OK]


def test_a_reset_reaches_every_engine(engines: Engines) -> None:
    one, two = engines(), engines()
    one.store(range(4))
    two.tier.reset()
    assert two.holds(range(4)) == []
    two.until(lambda: not two.tier._resets_due)
    assert one.tier.maintain() and one.holds(range(4)) == []
    one.store(range(4))
    assert two.holds(range(4)) == list(range(4))


def test_an_empty_folder_in_place_of_the_tier_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcascade.handlers.node.path.path_service.PLACE_CHECK_INTERVAL_S", 0.0)
    tier, away = tmp_path / "tier", tmp_path / "away"
    tier.mkdir()
    engine = PathEngine([tier], options_for(64), is_thread=True).open()
    try:
        engine.store(range(4))
        tier.rename(away)
        tier.mkdir()
        engine.until(lambda: engine.state is NodeState.ORPHANED)
        assert list(engine.get(range(4))) == [OK] * 4, "what is open can be read"
        engine.until(lambda: not list(tier.iterdir()))
        tier.rmdir()
        away.rename(tier)
        engine.until(lambda: engine.tier.takes_puts)
        engine.store(range(4, 6))
    finally:
        engine.close()


def test_a_path_longer_than_the_address_of_a_socket(tmp_path: Path) -> None:
    long = tmp_path / ("v" * 100) / ("w" * 100)
    long.mkdir(parents=True)
    pair = [PathEngine([long], options_for(64), name=name).open() for name in ("a", "b")]
    try:
        pair[1].store(range(2))
    finally:
        for engine in pair:
            engine.close()


OWN_POLICY = """
import logging
import os

from kvcascade.tiers.policies.lru import LruOrder


class NewestFirst(LruOrder):
    def victims(self, limit, wanted, mask=None, window=None):
        found = super().victims(self.capacity, wanted, mask, window)[::-1][:limit]
        logging.getLogger(__name__).warning("slots %s leave in process %d", found, os.getpid())
        return found
"""


def test_a_policy_of_the_users_own_evicts_and_logs_in_the_process_of_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "own_policy.py").write_text(OWN_POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    options = msgspec.structs.replace(options_for(PER_SEGMENT), policy="own_policy:NewestFirst")
    engine = PathEngine([tmp_path / "tier"], options).open()
    try:
        for numbers in (range(PER_SEGMENT - 1), [50], [60]):
            engine.store(numbers)
        assert engine.holds([*range(PER_SEGMENT), 50, 60]) == [*range(PER_SEGMENT - 1), 60]
        pid = engine.keeper.pid
    finally:
        engine.close()
    line = rf"\(kvcascade node pid={pid}\) WARNING .* slots \[\d\] leave in process {pid}\n"
    assert re.search(line, capfd.readouterr().err), "the standard error of the engine has it"


def test_the_process_loads_only_what_moving_blocks_needs() -> None:
    """Every engine waits for it at its start; each of these takes 10 to 30 ms."""
    unwanted = {"psutil", "torch", "importlib.metadata", "kvcascade.config.schema"}
    unwanted |= {"kvcascade.tiers.cpu.arena", "kvcascade.config.machine"}
    script = "import sys, kvcascade.handlers.node.path.path_main; print(*sys.modules)"
    command = [sys.executable, "-S", "-P", "-c", script]  # without what site packages load
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    loaded = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert not unwanted & set(loaded.stdout.split())


class RealRig(BelowRig):
    """Two engines on one path, with nodes on threads; the second one resets it."""

    def __init__(self, path: Path) -> None:
        options = options_for(SLOTS)
        self.pair = [
            PathEngine([path], options, name=name, is_thread=True).open() for name in ("one", "two")
        ]
        self.below = self.pair[0].tier

    def view(self, slot: int) -> memoryview:
        return self.pair[0].view(slot)

    def overtake(self) -> None:
        other = self.pair[1]
        other.tier.reset()
        other.until(lambda: not other.tier._resets_due)

    def now_s(self) -> float:
        return self.pair[0].tier._clock()

    def close(self) -> None:
        for engine in self.pair:
            engine.close()


class TestNodeThreads(BelowContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[BelowRig]:
        rig = RealRig(tmp_path)
        yield rig
        rig.close()


@pytest.mark.parametrize("was_reset", [False, True])
def test_a_node_that_is_restarted_keeps_the_blocks_of_its_engine(
    engines: Engines, was_reset: bool
) -> None:
    """The weights are those of before; only an engine that starts begins empty after a reset."""
    engine = engines()
    if was_reset:
        engine.tier.reset()
        engine.until(lambda: engine.tier.feed.epoch is not None)
    engine.store(range(8))
    pid = engine.keeper.pid
    engine.kill()
    engine.until(lambda: engine.keeper.pid not in (None, pid) and engine.tier.takes_puts)
    assert list(engine.get(range(8))) == [OK] * 8


@pytest.mark.parametrize("was_here", [True, False])
def test_only_the_first_node_of_an_engine_makes_a_tier(tmp_path: Path, was_here: bool) -> None:
    """A later one meets the mount point of a disk that was unmounted."""
    found: Queue[Joined] = Queue()
    search = WriterSearch(
        RealFileSystem(False),
        [tmp_path],
        options_for(64),
        "engine",
        True,
        found.put,
        lambda text: None,
        was_here=was_here,
    )
    search.begin()
    joined = found.get(timeout=60)
    assert joined.is_leader is not was_here and bool(joined.text) is was_here
    assert (tmp_path / PATH_FOLDER).exists() is not was_here
    if was_here:  # the disk is mounted again
        (tmp_path / PATH_FOLDER).mkdir(0o700)
        search.begin()
        joined = found.get(timeout=60)
        assert joined.is_leader
    assert joined.connection is not None
    joined.connection.close()
    search.end()
    search.close()


def empty_branches(index: Path) -> None:
    """Take all nodes from the pages that lead to others, as a page of an older state may be.

    LMDB ends its process over such a page.
    """
    data = bytearray(index.read_bytes())
    for start in range(META_PAGES * PAGE, len(data), PAGE):
        (kind,) = struct.unpack_from("<H", data, start + 10)
        if kind == BRANCH:
            struct.pack_into("<H", data, start + 12, PAGE_HEAD_BYTES)
    index.write_bytes(data)


def test_an_index_that_ends_a_process_is_checked_by_the_next_one(
    engines: Engines, tmp_path: Path
) -> None:
    """On the boot of its last writer the pages of a large index are trusted."""
    one = engines(slots=LARGE_SLOTS)
    for first in range(0, 256, 8):
        one.store(range(first, first + 8))
    assert one.keeper.kill(), "no clean close"
    (index,) = tmp_path.glob("*/blocks/data.mdb")
    assert index.stat().st_size > ALWAYS_CHECKED_BYTES
    empty_branches(index)
    two = PathEngine([tmp_path], options_for(LARGE_SLOTS), name="two")
    try:
        two.keeper.start()
        damaged = f"the index in {index.parent} is damaged"
        two.until(lambda: any(damaged in text for text in two.refusals))
    finally:
        two.close()
